"""What connects the engine with xpyd_kv: the cache's memory, the transports, an engine's and a
rank's half of the transfer.

    load  ->  engine (the engine's half)  ->  transports  ->  xpyd_kv
    ranks ->  rank (a rank's half)        ->  cache (memory on the host or a GPU)

`engine` and `transports` import no torch. The transfer itself is xpyd_kv (docs/kv-transfer.md).
"""

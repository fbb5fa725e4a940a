"""The KV transfer inside vLLM: the out-of-tree connector that `vllm serve` loads.

    --kv-transfer-config '{"kv_connector": "XpydConnector",
        "kv_connector_module_path": "xpyd_kv.vllm.connector", "kv_role": "kv_producer", ...}'

vLLM makes one connector object in the process of its scheduler and one in each rank's:

    connector   the class that vLLM loads: passes each call to the half of its process
    prefill     P's half in the scheduler's process: it offers, stages, holds blocks
    decode      D's: it waits, loads and gives up
    scheduler   what the two have in common: the way to the ranks, whose a request is
    worker      a rank's half: its cache, what it sends and receives
    gpu         where that cache is on a GPU
    stats       the counts in vLLM's own /metrics
    channel     between the two processes
    api_server  the plugin in vLLM's API server: routes beside vLLM's own
    instance    what the plugin says of this vLLM: heartbeats, the routes' answers
    link        between that process and the scheduler's
    options     what the command line says, and what is refused at start
    engine_api  vLLM's connector API as it is used here: the one file that imports vLLM

See docs/vllm.md and docs/adr/0052.
"""

"""`make bench-kv`: what moves KV how fast, between two processes with paged blocks on one machine.

`__main__` runs it and writes docs/benchmarks/kv.json and .md; `moves` takes the measurements with a
`Pair` of processes (`side` is what runs in each), `fleet` those of whole engines; `report` makes
numbers of them and `page` tables. What moves the bytes is a contender: `ours` is the product,
`plain`, `gloo`, `nixl_peer` and `mooncake_peer` are what it is measured against.
"""

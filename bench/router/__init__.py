"""`make bench-router`: the router beside vllm-router and SMG, in front of mock engines.

`__main__` runs it and writes docs/benchmarks/router.json and .md. `shape` has the rows and cases;
`engine.c` is the mock engine and `load.c` the load generator, which `programs` compiles; `mocks`
runs the engines and beats for them, `routers` the programs that are measured, `turns` one row under
one load; `report` makes numbers of the turns and `page` tables.
"""

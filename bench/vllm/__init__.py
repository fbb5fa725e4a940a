"""`make bench-vllm`: our connector inside vLLM, beside NixlConnector and beside no transfer at all.

`__main__` runs it and writes docs/benchmarks/vllm.json and .md. `servers` starts vLLM and routers
and reads vLLM's own metrics; `rounds` lets the contenders take turns; `report` makes figures and
tables of the turns.
"""

"""`make bench-engine`: the engine beside vLLM's CPU build and transformers, on three models.

`__main__` runs it and writes docs/benchmarks/engine-cpu.json and .md. `shape` has the models and
cases, `models` writes the checkpoints; `contender` is a process that is measured: ours and `peer`
(vLLM from PyPI, in an environment of its own) are servers, `reference` is transformers; `rounds`
lets them take turns; `speculation` does so with engines that draft beside the same ones that do
not; `report` makes numbers of the turns and `page` tables.
"""

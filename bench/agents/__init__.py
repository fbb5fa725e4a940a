"""`make bench-agents`: what structured output and the APIs of agents cost.

`__main__` runs it and writes docs/benchmarks/agents.json and .md. `schemas` has the JSON schemas;
`structured` asks our engine and vLLM for answers of them, `bystanders` for plain streams while bad
schemas arrive; `translated` measures the router; `report` makes figures and tables.
"""

"""`make bench-change`: what clients notice while a fleet in a cluster is changed in every way.

`__main__` runs it in a cluster of its own and writes docs/benchmarks/change.json and .md. `site`
has the fleet and the chart, `changes` what is done to them, `run` the load meanwhile and what
routers say, `report` makes rows and complaints of it. tests/cluster/test_change.py runs it small.
"""

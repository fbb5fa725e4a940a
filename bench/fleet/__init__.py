"""`make bench-fleet`: P and D apart beside the same engines aggregated, over a ladder of rates.

`__main__` runs it and writes docs/benchmarks/fleet.json, .svg and .md. `rounds` starts the fleets
and lets them take turns; `report` makes figures and tables of the turns and `plot` the picture.
"""

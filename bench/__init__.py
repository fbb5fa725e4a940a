"""What `make bench-NAME` runs: one folder for each benchmark, beside what they share.

`environments` installs a peer under test into an environment of its own, `process` starts and ends
processes, `report` writes docs/benchmarks/NAME.json and the page beside it.
"""

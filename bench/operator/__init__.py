"""What the operator costs beside plain Deployments: `make bench-operator`.

    __main__   a cluster of its own -> inside, in the cluster's network
    inside     big (1,000 pods, up and down) and many (100 fleets, then 500) -> report

The page is docs/benchmarks/operator.md; tests/cluster/test_operator_scale.py runs the same code
small. Nothing here knows the operator's modules: it is a process, and what the API server shows.
"""

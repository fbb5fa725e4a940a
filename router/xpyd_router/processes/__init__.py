"""`--processes N`: one parent of discovery, probes and health; N processes that serve HTTP.

    parent     takes beats, probes, decides health; starts, watches and replaces the workers
    worker     serves requests on the shared port; its registry and health mirror the parent's

They talk over one socket pair for each worker (`events`, `channel`) and share counters in memory
(`shared_loads`). `gathered_metrics` makes one /metrics of all.
"""

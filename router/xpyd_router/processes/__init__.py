"""`--processes N`: one owner of discovery, probes and health; N processes that serve HTTP.

    owner      hears beats, probes, judges; starts, watches and replaces the workers
    worker     serves requests on the shared port; its registry and health mirror the owner's

They talk over one socket pair for each worker (`events`, `channel`) and share counters in memory
(`rows`, `shared_loads`). `merge` makes one /metrics of all.
"""

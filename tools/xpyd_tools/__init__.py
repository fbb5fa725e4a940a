"""Programs for a person who plans or measures a fleet: `xpyd advise`, `bench` and `kv-probe`.

None of them serves requests, and none imports torch. They speak to engines and servers over HTTP;
only `xpyd bench latency` and `throughput` run an engine, in this process, by its public names. What
else they take from other packages than xpyd_core is listed in pyproject.toml and checked there.
docs/architecture.md has the map of all packages.
"""

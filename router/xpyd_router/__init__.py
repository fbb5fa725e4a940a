"""The HTTP entry of a fleet: learns of instances by heartbeats, pairs a P with a D, relays answers.

A request goes `http.inference` -> `admission` -> `request.flow` -> `policy` -> `upstream`, and its
answer comes back through `request.relay` to a sink of `http`. Heartbeats and probes go
`discovery` -> `fleet`. `router` puts a router of one process together, `processes` one of several.
The layers are a contract in pyproject.toml. The router knows engines only by their heartbeats and
HTTP; it never imports torch, the worker or the KV packages. docs/architecture.md has the map.
"""

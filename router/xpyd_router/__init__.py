"""The HTTP entry of a fleet: learns the instances by heartbeat, pairs a P with a D, relays.

The flow: `discovery` feeds `registry`; `flow` picks with `policy`, edits with `bodies`, calls with
`upstream`, answers with `answers`; `app` is the HTTP surface and `main` puts it together. Knows
engines only by their heartbeats and HTTP; never imports torch, the worker or the KV packages.
"""

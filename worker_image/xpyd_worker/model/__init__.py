"""The forward pass: configuration, weights and layers.

Knows torch; must not know requests, HTTP or KV transfer.
"""

"""Holds KV: a rank's paged cache on a CPU or a GPU, and the memory that transfers use.

`api` and `device` are the seams; `store` leases memory, `space` is the memory itself.
See journey 2 of docs/architecture.md.
"""

"""Where KV stands: a rank's paged cache on a CPU or a GPU, and memory that transfers use.

`api` and `device` are the seams; `store` keeps the engine's books, `space` is the memory itself.
See journey 2 of docs/architecture.md.
"""

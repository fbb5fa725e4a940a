"""Connections between instances and the I/O thread that owns them. `api` is the seam.
See journey 2 of docs/architecture.md."""

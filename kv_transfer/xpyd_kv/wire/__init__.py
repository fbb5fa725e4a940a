"""KV control protocol v1 as values and bytes. Pure: no sockets, no clock, no threads.
See journey 2 of docs/architecture.md."""

"""KV control protocol v1 as values and bytes. Pure: no sockets, no clock, no threads."""

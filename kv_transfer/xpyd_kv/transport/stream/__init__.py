"""Connections over TCP and Unix sockets: their frames, timers, failures and ends.
See journey 2 of docs/architecture.md."""

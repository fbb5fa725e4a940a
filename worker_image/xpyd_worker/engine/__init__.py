"""Scheduler, block manager and the engine loop. No torch, no sockets, no HTTP.
See journey 4 of docs/architecture.md."""

"""Scheduler, block manager and the engine loop. No torch, no sockets, no HTTP."""

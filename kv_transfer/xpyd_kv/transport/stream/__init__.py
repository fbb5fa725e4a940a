"""Connections over TCP and Unix sockets: their frames, timers, failures and ends."""

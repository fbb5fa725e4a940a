"""The transfer's state machines, P's and D's. Pure: no sockets, no threads, no clock of their
own.

A session always has ranks: see docs/adr/0035. See journey 2 of docs/architecture.md.
"""

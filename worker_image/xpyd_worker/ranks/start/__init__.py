"""How a rank's process starts: the fork server, the processes, the rank's main, its program and
the messages of the start. ADR 0033; docs/parallel.md.
"""

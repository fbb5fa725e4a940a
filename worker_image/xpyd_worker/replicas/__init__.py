"""Replicas of an engine behind one endpoint: which one gets a request, and how replicas that share
experts keep step. Decisions only: no sockets, no threads, no torch. ADR 0118.

    choice                what the front end needs to pick a replica
    coordinator -> waves  lock step: one coordinator, one `ReplicaWave` in each replica's loop
"""

"""Replicas of an engine behind one endpoint: which one gets a request, and how replicas that share
experts keep step. No sockets, no torch. ADR 0118, 0122.

    choice                what the front end needs to pick a replica
    coordinator -> waves  lock step, decisions only: one coordinator, one `ReplicaWave` a loop
    lock_step             both for engines that are threads of one process, and the finish check
"""

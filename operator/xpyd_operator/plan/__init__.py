"""Decides what a fleet's workloads should be and, for local mode, its processes. Pure.

    InferenceFleet --fleet_want--> FleetWant --plan(want, seen, now)--> actions on workloads
                                   Workload  --keep(workload, seen, now)--> actions on instances

A shell observes, calls these, applies the actions and calls again. No I/O, no clock, no randomness:
time comes in as an argument. Applying a plan twice changes nothing the second time.

See docs/adr/0004, and journey 3 of docs/architecture.md.
"""

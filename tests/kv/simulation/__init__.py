"""A fleet of prefill and decode processes in one thread, on one virtual clock, out of one seed.

What runs is the real thing down to the seam `xpyd_kv.transport.api`: connectors, sessions,
stores. What is played is what surrounds it: sockets and their I/O loops (`endpoint`, `link`), the
engines (`prefill`, `decode`), the processes (`process`), and what befalls them (`faults`). The
played connection does what a TCP connection can do and no more: it is ordered and reliable until
it is cut; each side learns of the cut at its own time, or only by silence; what was under way
arrives up to any point; a new connection may stand before the old one is known to be dead.

    plan_of(seed)   what there is and what befalls it: plan.py
    run(plan)       plays it to its end; SimulationError with the seed and the last steps
    invariants.py   what is checked after each step, and at the end

A run is a pure function of its plan, a plan of its seed. To replay a seed and see every step:

    .venv/bin/python -m tests.kv.simulation 4711
"""

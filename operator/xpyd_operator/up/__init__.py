"""Local mode: a fleet as processes of this machine, one loopback address for each pod.

    commands   the `xpyd up|status|scale|logs|chat|down` entry points, light to import
    supervisor observes processes, calls plan() and keep(), applies; serves the control socket
    the rest   one thing each: state folder, processes, memory plan, pod commands, probes, logs

Not a cluster manager: one machine, one user, Linux.
"""

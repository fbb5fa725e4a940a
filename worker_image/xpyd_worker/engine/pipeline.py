"""How running decodes are dealt out to the steps of a pipeline, so that its stages overlap. Pure.

A sequence is in one step at a time from its first drawn token on. Were all decodes in one step,
each stage would wait for the others; so each step gets its share of them.
"""

from __future__ import annotations


def decodes_per_step(decodes: int, *, ready: int, stages: int, free: int) -> int:
    """How many decodes go into the next step of a pipeline of `stages`. `decodes` run, `ready` of
    them are in no step, and `free` steps may still be launched before one is waited for.

    The first bound keeps steps even where many become ready at once; each that is ready then waits
    for `stages` steps at most. The second leaves some for the other free steps.
    """
    return min(-(-decodes // stages), -(-ready // free))

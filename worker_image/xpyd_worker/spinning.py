"""How torch's threads wait for each other. Called before torch is imported; imports nothing."""

from __future__ import annotations

import os


def bound_spinning() -> None:
    """Let waiting threads sleep soon, unless OMP_WAIT_POLICY or GOMP_SPINCOUNT says otherwise.

    A thread that waits for the others looks this often before it sleeps, and waking takes 30 us,
    many times a step. Without end, as is the default, it would take the cores that HTTP, KV and
    other engines share. OpenMP reads it from the environment when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")

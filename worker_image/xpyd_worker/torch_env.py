"""What torch reads from the environment when it is imported. Called before; imports nothing."""

from __future__ import annotations

import os


def prepare_for_torch() -> None:
    """Defaults for a machine that an engine shares with HTTP, KV and other engines; what the
    environment says already stays.

    A thread that waits for the others looks GOMP_SPINCOUNT times before it sleeps, and waking takes
    30 us, many times a step; without end, as is OpenMP's default, it would take the others' cores.
    torch imports numpy, whose BLAS nobody uses here, and which would start a thread for each core.
    Weights stand in huge pages: reading them all at each step was 1.15 times as fast. Of a lost
    rank torch's store would log C++ stacks, several of them; the error that is raised says it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

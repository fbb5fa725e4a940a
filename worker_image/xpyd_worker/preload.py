"""What an engine on a CPU imports, all at once: for a fork server that forks engines. ADR 0045.

Nothing here starts a thread, opens a device or reads the environment of the engine to be; Triton
and what else only GPUs need is imported behind the fork.
"""

from __future__ import annotations

from importlib import import_module

from xpyd_worker.system import prepare_for_torch

MODULES = (
    "xpyd_core.cli",
    "xpyd_worker.command",
    "xpyd_worker.main",
    "xpyd_worker.load.engine",
    "xpyd_worker.load.one_rank",
    "xpyd_worker.load.replicas",
    "xpyd_worker.load.replicated_engine",
    "xpyd_worker.kernels.cpu.kernels",
    "xpyd_worker.kv.rank",
    "xpyd_worker.ranks.start.program",
    # What is imported when it is used first.
    "encodings.idna",
    "uvicorn.lifespan.off",
    "llguidance",
)


def preload() -> None:
    """Import it."""
    prepare_for_torch()
    for name in MODULES:
        import_module(name)
    from xpyd_worker.runner.tokenizer import import_library

    import_library()

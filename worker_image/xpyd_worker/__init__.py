"""The engine: one instance of a fleet, from a checkpoint folder to OpenAI HTTP.

    server (asyncio thread)  ->  engine (a thread: schedule, execute, update)  ->  runner, model
                                   |
                                 xpyd_kv (KV from and to other instances; its own I/O thread)

`engine` is pure Python without torch; torch lives in `runner` and `model`, behind the Executor
seam. `offline` is the same engine without HTTP: `from xpyd_worker import LLM, SamplingParams`. Its
names are imported when they are asked for, since this module is imported by everything here and by
the command line, which must not wait for torch. docs/architecture.md shows the way of one token,
docs/adr/0001 why these are threads of one process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xpyd_worker.offline.llm import LLM
    from xpyd_worker.offline.outputs import CompletionOutput, Logprob, RequestOutput
    from xpyd_worker.offline.sampling import SamplingParams, StructuredOutputsParams
    from xpyd_worker.ranks.loss import RankLostError

__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RankLostError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "offline.llm",
    "CompletionOutput": "offline.outputs",
    "Logprob": "offline.outputs",
    "RankLostError": "ranks.loss",
    "RequestOutput": "offline.outputs",
    "SamplingParams": "offline.sampling",
    "StructuredOutputsParams": "offline.sampling",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

"""`xpyd` whose engines of several ranks have one step under way: a pipeline without its queue."""

from __future__ import annotations

import sys
from typing import Any

from xpyd_core.cli import main
from xpyd_worker.load import engine
from xpyd_worker.ranks.executor import RankedExecutor


class _OneStep(RankedExecutor):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **{**named, "depth": 1})


if __name__ == "__main__":
    engine.RankedExecutor = _OneStep
    sys.exit(main(sys.argv[1:]))

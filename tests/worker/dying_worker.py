"""`xpyd worker` that breaks from inside: `python -m tests.worker.dying_worker FILE worker ...`.

While FILE holds `engine` the next step raises what no step may raise; `server`: the HTTP server's
loop does; `load`: the checkpoint's files are not read yet. Nothing else differs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import xpyd_worker.main as program
from xpyd_core.cli import main
from xpyd_worker.runner.runner import ModelRunner
from xpyd_worker.server.http.server import Server


def arm(file: Path) -> None:
    """Put the faults in."""

    def is_told(fault: str) -> bool:
        return file.read_text() == fault

    launch, on_tick = ModelRunner.launch, Server.on_tick
    read_checkpoint = program.read_checkpoint

    def launch_or_die(self: ModelRunner, *args: Any, **named: Any) -> Any:
        if is_told("engine"):
            raise ZeroDivisionError("told to")
        return launch(self, *args, **named)

    async def on_tick_or_die(self: Server, counter: int) -> bool:
        if is_told("server"):
            raise ZeroDivisionError("told to")
        return await on_tick(self, counter)

    def read_checkpoint_later(*args: Any) -> Any:
        while is_told("load"):
            time.sleep(0.02)
        return read_checkpoint(*args)

    program.read_checkpoint = read_checkpoint_later
    ModelRunner.launch = launch_or_die  # type: ignore[method-assign]
    Server.on_tick = on_tick_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    arm(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))

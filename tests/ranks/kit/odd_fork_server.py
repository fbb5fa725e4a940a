"""A fork server that does something odd: `python -m tests.ranks.kit.odd_fork_server HOW`.

`--instance HOW`: an instance with such a fork server, which prints the processes that it has.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.ranks.kit.fake_rank import FakeProgram, Step
from tests.ranks.kit.instances import WAIT_S, make
from xpyd_core.parallel.ranks import Sizes
from xpyd_kv.ranks.engine import Channel
from xpyd_worker.ranks.instance import Instance
from xpyd_worker.ranks.start.fork_server import main
from xpyd_worker.ranks.start.messages import Start
from xpyd_worker.ranks.start.rank_main import GiveUp, MakeProgram

TWO = Sizes(tensor=2)
MODULE = "tests.ranks.kit.odd_fork_server"


def odd(how: str) -> Instance:
    """With a fork server that does what `how` says as it imports."""
    instance = make(TWO)
    processes = instance._pod._processes  # pyright: ignore[reportPrivateUsage]
    processes._command = (sys.executable, "-m", MODULE, how)  # pyright: ignore[reportPrivateUsage]
    return instance


def fork_server_of(instance: Instance) -> int:
    """Its process, as soon as it is there."""
    ticks = threading.Event()
    for _ in range(round(WAIT_S / 0.01)):
        found = instance._pod._processes._fork_server  # pyright: ignore[reportPrivateUsage]
        if found is not None:
            return found.pid
        ticks.wait(0.01)
    raise AssertionError("no fork server")


def text_of(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


class Told:
    """A step's answer, with what is to be told beside it."""

    broke = ""

    def __init__(self, step: Step, imported_by: str) -> None:
        self._step = step
        self._imported_by = imported_by

    @property
    def is_over(self) -> bool:
        return self._step.is_over

    def finish(self) -> bytes | None:
        output = self._step.finish()
        if output is None:
            return None
        return json.dumps({**json.loads(output), "imported_by": self._imported_by}).encode()


class Program(FakeProgram):
    def __init__(self, start: Start, channel: Channel, give_up: GiveUp, importer: int) -> None:
        super().__init__(start, channel, give_up)
        self._imported_by = "the rank" if importer == os.getpid() else "the fork server"

    def launch(self, message: bytes) -> Told:
        return Told(super().launch(message), self._imported_by)


def prepare(how: str) -> MakeProgram:
    importer = os.getpid()
    match how:
        case "count":
            pass
        case "thread":
            threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        case "fail":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        case "hang":
            time.sleep(3600)
        case "die after a fork":
            os.register_at_fork(before=dying_at_the_second())
        case _:
            raise AssertionError(how)
    return lambda start, channel, give_up: Program(start, channel, give_up, importer)


def dying_at_the_second() -> Callable[[], None]:
    forks = 0

    def before() -> None:
        nonlocal forks
        forks += 1
        if forks == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    return before


def show_instance(how: str) -> None:
    """Start one, print its processes as soon as they are what `how` leads to, and wait."""
    instance = odd(how)
    starting = threading.Thread(target=instance.start, daemon=True)
    starting.start()
    pids = [fork_server_of(instance)]
    if how == "count":
        starting.join()
        pids = [instance.rank_identity(rank).pid for rank in range(2)]
    while how == "hang" and text_of(pids[0], "comm").strip() != "xpyd-forkserver":
        time.sleep(0.01)
    print(*pids, flush=True)  # noqa: T201 - to who started it
    starting.join()
    signal.pause()


if __name__ == "__main__":
    if sys.argv[1] == "--instance":
        show_instance(sys.argv[2])
    how = sys.argv.pop(1)
    main(lambda: prepare(how))

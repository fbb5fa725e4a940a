"""A rank without a model: `python -m tests.ranks.kit.fake_rank`, started as the real one is.

A step is JSON: what each rank does with it, by its number (`"*"`: all); the output rank answers
what it was told. At the start it does what the model's name says.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from xpyd_core.errors import UserError
from xpyd_kv.ranks.engine import Channel
from xpyd_worker.engine.executor import LayerExperts
from xpyd_worker.parallel.api import GroupError
from xpyd_worker.ranks.start.fork_server import main
from xpyd_worker.ranks.start.messages import RankReady, Start
from xpyd_worker.ranks.start.rank_main import GiveUp


class Step:
    is_over, broke = True, ""

    def __init__(self, output: bytes | None) -> None:
        self._output = output

    def finish(self) -> bytes | None:
        return self._output


class FakeProgram:
    def __init__(self, start: Start, channel: Channel, give_up: GiveUp) -> None:
        self._start = start
        self._give_up = give_up
        self._told: dict[str, Any] = json.loads(start.config.model)
        self._blocks = self._steps = 0
        self._do("open")
        self._channel = channel
        channel.listen(self._hear)

    def _hear(self, message: bytes) -> None:
        if message.startswith(b"give up: "):
            # As the KV transfer's threads do, which are not the link's.
            reason = message.removeprefix(b"give up: ").decode()
            threading.Thread(target=self._give_up, args=(reason,)).start()
        else:
            self._channel.post(b"%d heard " % self._start.rank + message)

    def _do(self, when: str) -> Any:
        told = self._told.get(f"{when} {self._start.rank}") or self._told.get(f"{when} *")
        return None if told is None else act(told)

    def load(self) -> None:
        self._do("load")

    def measure(self) -> int:
        self._do("measure")
        return int(self._told.get("blocks", [7] * 64)[self._start.rank])

    def make(self, blocks: int) -> RankReady:
        self._do("make")
        self._blocks = blocks
        return RankReady(blocks, 100, 200, None, "float32", 1, False)

    def launch(self, message: bytes) -> Step:
        told = json.loads(message)
        self._steps += 1
        rank = self._start.rank
        told_me = told.get(str(rank)) or told.get("*")
        if told_me:
            act(told_me)
        if rank != self._start.sizes.output_rank:
            return Step(None)
        answer = {"rank": rank, "blocks": self._blocks, "say": told.get("say")}
        if told.get("where"):
            start = self._start
            answer["where"] = [start.rendezvous[0], start.address, start.config.host]
        return Step(json.dumps(answer).encode())

    def experts_chosen(self) -> tuple[LayerExperts, ...]:
        """Layer 3 has experts on ranks that are told so, each step for one more token."""
        told = self._told.get(f"experts {self._start.rank}", [])
        return (LayerExperts(3, tuple(n + self._steps for n in told)),) if told else ()

    def close(self) -> None:
        self._do("close")


def act(what: str) -> None:
    match what.split(":", 1):
        case ["user", text]:
            raise UserError(text)
        case ["misses"]:
            raise GroupError("the others do not answer")
        case ["fail", text]:
            raise ValueError(text)
        case ["exit", status]:
            os._exit(int(status))
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["stop"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["hang"]:
            time.sleep(3600)
        case ["touch", path]:
            Path(path).touch()
        case ["unseen", path]:
            stay_unseen(Path(path))
        case ["spin"]:
            while True:
                pass
        case _:
            raise AssertionError(what)


def stay_unseen(path: Path) -> None:
    """Take a second, and fail when the file comes in that time."""
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        time.sleep(0.01)
        if path.exists():
            raise UserError(f"{path} is there")


if __name__ == "__main__":
    main(lambda: FakeProgram)

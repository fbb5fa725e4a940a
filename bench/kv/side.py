"""One of the two processes: `python -m bench.kv.side` with its settings as JSON, then one
line of JSON in and one out for each command. `Pair` is the other end.

Needs numpy; everything else is its contenders'.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.kv.contender import Place, Receiver, Sender, make_receiver, make_sender
from bench.kv.memory import Arena, Ring, look_into, own_memory, visible_memory
from bench.kv.shape import Case

_SEEDS = {"P": 1, "D": 2}


class Side:
    """`settings`: role, blocks, folder, product (whether xpyd can be imported here)."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.role: str = settings["role"]
        self.blocks: int = settings["blocks"]
        self.folder = Path(settings["folder"])
        self.shared: Any = None
        self.fd = -1
        self.arena = self._arena(settings["product"])
        self.far: Arena | None = None
        self.copied: Arena | None = None
        self.ends: dict[str, Any] = {}
        self.commands: dict[str, Callable[..., Any]] = {
            name.removeprefix("do_"): getattr(self, name)
            for name in dir(self)
            if name.startswith("do_")
        }

    def _arena(self, product: bool) -> Arena:
        if self.role == "D":
            return own_memory(self.blocks)
        if product:
            from bench.kv.shape import BLOCK_BYTES_ALL
            from xpyd_kv.transport.host.shared_memory import SharedMemory

            self.shared = SharedMemory(self.blocks * BLOCK_BYTES_ALL)
            self.fd = self.shared.fd
            return Arena(self.shared.buffer)
        arena, self.fd = visible_memory(self.blocks)
        return arena

    def _place(self) -> Place:
        other = "D" if self.role == "P" else "P"
        rings = (Ring(self.blocks, seed=_SEEDS[role]) for role in (self.role, other))
        return Place(self.arena, *rings, self.folder, self.shared)

    # --- commands

    def do_fill(self) -> Any:
        """P: bytes to send. D: memory of its own to copy from."""
        self.arena.fill(_SEEDS[self.role])
        return {"pid": os.getpid(), "fd": self.fd}

    def do_look(self, pid: int, fd: int) -> None:
        """D: see what P has, to compare."""
        self.far = look_into(pid, fd)

    def do_listen(self, name: str) -> Any:
        receiver = self.ends[name] = make_receiver(name, self._place())
        return receiver.address

    def do_accept(self, name: str) -> None:
        self.ends[name].accept()

    def do_connect(self, name: str, address: Any) -> None:
        self.ends[name] = make_sender(name, self._place(), address)

    def do_cpu(self) -> float:
        return time.process_time()

    def do_clear(self) -> None:
        self.arena.clear()

    def do_holds(self, ids: list[int], far_ids: list[int]) -> bool:
        assert self.far is not None
        return self.arena.holds(ids, self.far, far_ids)

    def do_send(self, name: str, case: list[Any], count: int) -> Any:
        sender: Sender = self.ends[name]
        what, ids, seconds = Case(*case), [], []
        for _ in range(count):
            start = time.perf_counter()
            ids = sender.send(what)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "ids": ids}

    def do_receive(self, name: str, case: list[Any], count: int) -> Any:
        receiver: Receiver = self.ends[name]
        what, ids = Case(*case), []
        for _ in range(count):
            ids = receiver.receive(what)
        return {"ids": ids}

    def do_copy(self, case: list[Any], count: int) -> Any:
        """memcpy by one thread, each time from and to another place."""
        if self.copied is None:
            self.copied = own_memory(self.blocks)
            self.copied.fill(3)
            self.copied_at = 0
        source, target = (arena.array.reshape(-1) for arena in (self.copied, self.arena))
        size, seconds = Case(*case).size_bytes, []
        for _ in range(count):
            first = self.copied_at if self.copied_at + size <= len(source) else 0
            self.copied_at = first + size
            start = time.perf_counter()
            np.copyto(target[first : first + size], source[first : first + size])
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}

    def do_close(self) -> None:
        for end in self.ends.values():
            end.close()

    # --- the loop

    def run(self, answers: int) -> None:
        with os.fdopen(answers, "w") as out:
            for line in sys.stdin:
                command = json.loads(line)
                try:
                    answer = {"ok": self.commands[command.pop("do")](**command)}
                except Exception as error:
                    traceback.print_exc()
                    answer = {"error": f"{type(error).__name__}: {error}"}
                out.write(json.dumps(answer) + "\n")
                out.flush()


if __name__ == "__main__":
    # What a library prints must not come among the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    Side(json.loads(sys.argv[1])).run(answers)

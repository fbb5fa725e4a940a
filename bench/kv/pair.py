"""P's and D's process as the benchmark's own process sees them. Every answer has a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.kv.shape import Case

ROOT = Path(__file__).parents[2]
_ANSWER_S = 180.0


class SideFailed(Exception):
    """A process answered with an error, not at all, or has ended."""


@dataclass(frozen=True)
class Batch:
    """Some transfers of one prompt's KV, one after another."""

    seconds: list[float]
    cpu_s: float
    """Of both processes, all transfers."""


class _Process:
    def __init__(self, python: Path, settings: dict[str, Any], log: Path, env: dict[str, str]):
        self._log = log
        self._rest = b""
        with log.open("ab") as file:
            self.popen = subprocess.Popen(
                [str(python), "-m", "bench.kv.side", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            )

    def tell(self, command: str, **more: Any) -> None:
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(json.dumps({"do": command, **more}).encode() + b"\n")
            self.popen.stdin.flush()
        except OSError as error:
            raise SideFailed(self._why()) from error

    def answer(self) -> Any:
        assert self.popen.stdout is not None
        deadline = time.monotonic() + _ANSWER_S
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.popen.stdout], [], [], max(0.0, left))
            if not ready:
                raise SideFailed(f"no answer within {_ANSWER_S:.0f} s")
            data = os.read(self.popen.stdout.fileno(), 1 << 20)
            if not data:
                raise SideFailed(self._why())
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise SideFailed(answer["error"])
        return answer["ok"]

    def ask(self, command: str, **more: Any) -> Any:
        self.tell(command, **more)
        return self.answer()

    def _why(self) -> str:
        """The last thing that it said."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(5)
        said = self._log.read_text(errors="replace").strip().splitlines()
        return said[-1][-200:] if said else f"ended with {self.popen.returncode}"

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


class Pair:
    """Two processes with full caches. `SideFailed` out of any call."""

    def __init__(self, p: _Process, d: _Process) -> None:
        self._p, self._d = p, d

    def prepare(self) -> None:
        """Fill both caches; D sees P's."""
        for side in (self._p, self._d):
            side.tell("fill")
        source, _ = self._p.answer(), self._d.answer()
        self._d.ask("look", **source)

    def open(self, name: str) -> None:
        """Connect one contender's two ends."""
        address = self._d.ask("listen", name=name)
        self._d.tell("accept", name=name)
        self._p.ask("connect", name=name, address=address)
        self._d.answer()

    def move(self, name: str, case: Case, count: int) -> Batch:
        """So many transfers."""
        return self._move(name, case, count)[0]

    def is_right(self, name: str, case: Case) -> bool:
        """Move one prompt into an empty cache and compare it, byte by byte."""
        self._d.ask("clear")
        _, ids, far_ids = self._move(name, case, 1)
        return self._d.ask("holds", ids=ids, far_ids=far_ids)

    def copy(self, case: Case, count: int) -> Batch:
        """memcpy in D's process."""
        before = self._d.ask("cpu")
        seconds = self._d.ask("copy", case=case, count=count)["seconds"]
        return Batch(seconds, self._d.ask("cpu") - before)

    def pause(self) -> None:
        """Not on turn: whatever polls in there stands still."""
        for side in (self._p, self._d):
            side.popen.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        for side in (self._p, self._d):
            side.popen.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Ask the contenders to end; what runs here may leave work to do."""
        for side in (self._p, self._d):
            side.ask("close")

    def _move(self, name: str, case: Case, count: int) -> tuple[Batch, list[int], list[int]]:
        what = {"name": name, "case": case, "count": count}
        before = self._cpu()
        self._d.tell("receive", **what)
        sent = self._p.ask("send", **what)
        received = self._d.answer()
        return Batch(sent["seconds"], self._cpu() - before), received["ids"], sent["ids"]

    def _cpu(self) -> float:
        return self._p.ask("cpu") + self._d.ask("cpu")


@contextlib.contextmanager
def pair(
    python: Path, folder: Path, *, blocks: int, product: bool, env: dict[str, str] | None = None
) -> Iterator[Pair]:
    """Both processes under this interpreter, prepared; ended on leaving. Logs in `folder`."""
    sides: list[_Process] = []
    try:
        for role in ("P", "D"):
            settings = {"role": role, "blocks": blocks, "folder": str(folder), "product": product}
            log = folder / f"{role}.log"
            sides.append(_Process(python, settings, log, env or {}))
        made = Pair(*sides)
        made.prepare()
        yield made
    finally:
        for side in sides:
            side.end()

"""A process, with all that it started, that is measured, stopped while others have their turn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.worker.bench.shape import MAX_MODEL_LEN, VOCABULARY, Case
from xpyd_worker.bench.client import Target
from xpyd_worker.bench.figures import Sample
from xpyd_worker.bench.prompts import random_asks
from xpyd_worker.bench.serve import run_load

ROOT = Path(__file__).parents[3]
START_S = 1200.0
_END_S = 30.0
_POLL_S = 0.05
_REQUEST_S = 600.0
# Contenders are on this machine, whatever http_proxy says.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
WARM_UP = Case("warm-up", 64, 4, 1, 1)


class ContenderFailed(Exception):
    """It did not start, ended, or did not do what was asked; says why."""


class Contender(Protocol):
    """Something that answers a case's prompts."""

    def run(self, case: Case, seed: int) -> list[Sample]:
        """Answer the prompts of this seed; as many tokens as asked. ContenderFailed."""
        ...

    def pss_gib(self) -> float:
        """Memory of its processes, shared pages counted in parts."""
        ...

    def stop(self) -> None:
        """Let it use no processor."""
        ...

    def go_on(self) -> None:
        """Until here."""
        ...


@dataclass(frozen=True)
class Recipe:
    """How a server is started; `{port}` in its words stands for the port."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]


class Processes:
    """A process and its descendants."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    def pss_gib(self) -> float:
        """Of all of them."""
        return sum(map(_pss_bytes, tree(self.process.pid))) / 2**30

    def stop(self) -> None:
        """SIGSTOP to all."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT to all."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """SIGTERM to the first; SIGKILL to what is left of all after a while."""
        self.go_on()
        pids = tree(self.process.pid)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        for pid in pids:
            # Nobody but they may have these ids: their parent lives or has not waited for them.
            if _is_of_session(pid, self.process.pid):
                _kill(pid, signal.SIGKILL)
        self.process.wait(_END_S)

    def complaint(self) -> str:
        """The end of what it said."""
        return self._log.read_text(errors="replace")[-2000:]

    def _signal(self, number: int) -> None:
        for pid in tree(self.process.pid):
            _kill(pid, number)


class Server(Processes):
    """A contender behind OpenAI's HTTP API."""

    def __init__(
        self, recipe: Recipe, process: subprocess.Popen[bytes], log: Path, port: int
    ) -> None:
        super().__init__(process, log)
        self._recipe = recipe
        self._port = port
        self.start_s = 0.0
        """From the process' start to the first 200 of /health."""

    def wait_ready(self, started_s: float) -> None:
        """Until /health is 200. ContenderFailed."""
        while not self._is_ready():
            if self.process.poll() is not None:
                raise ContenderFailed(f"{self._recipe.name} ended: {self.complaint()}")
            if time.perf_counter() > started_s + START_S:
                raise ContenderFailed(f"{self._recipe.name} did not start: {self.complaint()}")
            time.sleep(_POLL_S)
        self.start_s = time.perf_counter() - started_s

    def _is_ready(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self._port}/health"
            with _DIRECT.open(url, timeout=5) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def run(self, case: Case, seed: int) -> list[Sample]:
        """See Contender."""
        asks = random_asks(
            case.requests,
            input_tokens=case.input_tokens,
            output_tokens=case.output_tokens,
            vocabulary=VOCABULARY,
            seed=seed,
        )
        members = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
        target = Target(
            "127.0.0.1", self._port, False, "/v1/completions", "bench", members, _REQUEST_S
        )
        load = run_load(target, asks, [0.0] * len(asks), max_concurrency=case.concurrency)
        samples = asyncio.run(load)
        for sample in samples:
            check(self._recipe.name, case, sample)
        return samples


def check(name: str, case: Case, sample: Sample) -> None:
    """ContenderFailed where a request was not answered as asked."""
    got = (sample.input_tokens, sample.output_tokens)
    if sample.error or got != (case.input_tokens, case.output_tokens):
        raise ContenderFailed(
            f"{name}, {case.name}: {sample.error or f'{got[0]} tokens in, {got[1]} out'}"
        )


def own_recipe(folder: Path, threads: int, more: Sequence[str]) -> Recipe:
    """The product's server."""
    argv = [
        *(str(ROOT / ".venv/bin/xpyd"), "worker", "--model", str(folder)),
        *("--served-model-name", "bench", "--dtype", "bfloat16"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"),
        *("--kv-cache-memory", "1Gi", "--threads", str(threads)),
        *("--host", "127.0.0.1", "--port", "{port}", *more),
    ]
    return Recipe("xpyd", argv, {"OMP_NUM_THREADS": str(threads)})


@contextmanager
def served(recipe: Recipe, log: Path, cores: str) -> Iterator[Server]:
    """The server while the block runs, ready. ContenderFailed."""
    port = _free_port()
    argv = [word.replace("{port}", str(port)) for word in recipe.argv]
    started_s = time.perf_counter()
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["taskset", "-c", cores, *argv],
            env={**os.environ, **recipe.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=log.parent,
        )
    server = Server(recipe, process, log, port)
    try:
        server.wait_ready(started_s)
        yield server
    finally:
        server.end()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tree(pid: int) -> list[int]:
    """The process and its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def _stat(pid: int) -> list[str]:
    """State, parent, group, session, ... of a process; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_of_session(pid: int, session: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and int(fields[3]) == session and fields[0] != "Z"


def _pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.M)
    return int(found[1]) * 1024 if found else 0


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

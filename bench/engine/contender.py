"""A process, with all that it started, that is measured, stopped while others have their turn."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.engine.models import text_prompts
from bench.engine.shape import DTYPES, MAX_MODEL_LEN, VOCABULARY, Case
from bench.process import Processes, free_port
from xpyd_tools.bench.client import Target, run_load
from xpyd_tools.bench.load import LoadRequest, arrival_times, random_requests
from xpyd_tools.bench.summary import Sample

ROOT = Path(__file__).parents[2]
START_S = 1200.0
_POLL_S = 0.05
_REQUEST_S = 600.0
_METRICS_S = 30.0
# Contenders are on this machine, whatever http_proxy says.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
WARM_UP = Case("warm-up", 64, 4, 1, 1)


class ContenderFailed(Exception):
    """It did not start, ended, or did not do what was asked; says why."""


class Contender(Protocol):
    """Something that answers a case's prompts."""

    def run(self, case: Case, seed: int, rate: float = 0.0) -> list[Sample]:
        """Answer the prompts of this seed; as many tokens as asked. `rate`: so many come in a
        second, at random; 0: all at once. ContenderFailed."""
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


class Server(Processes):
    """A contender behind OpenAI's HTTP API."""

    def __init__(
        self, recipe: Recipe, process: subprocess.Popen[bytes], log: Path, port: int
    ) -> None:
        super().__init__(process, log)
        self._recipe = recipe
        self.port = port
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
            url = f"http://127.0.0.1:{self.port}/health"
            with _DIRECT.open(url, timeout=5) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def metrics(self) -> str:
        """What /metrics says. ContenderFailed."""
        try:
            url = f"http://127.0.0.1:{self.port}/metrics"
            with _DIRECT.open(url, timeout=_METRICS_S) as answer:
                return answer.read().decode()
        except OSError as error:
            raise ContenderFailed(f"{self._recipe.name}: /metrics: {error}") from error

    def run(self, case: Case, seed: int, rate: float = 0.0) -> list[Sample]:
        """See Contender."""
        requests = requests_of(case, seed)
        members = {"temperature": case.temperature, "ignore_eos": True, "return_token_ids": True}
        target = Target(
            "127.0.0.1", self.port, False, "/v1/completions", "bench", members, _REQUEST_S
        )
        starts = arrival_times(
            len(requests), rate_per_s=rate or math.inf, burstiness=1.0, seed=seed
        )
        load = run_load(target, requests, starts, max_concurrency=case.concurrency)
        samples = asyncio.run(load)
        for sample in samples:
            check(self._recipe.name, case, sample)
        return samples


def requests_of(case: Case, seed: int) -> list[LoadRequest]:
    """The requests of this seed: all contenders answer the same."""
    if case.text:
        prompts = text_prompts(case.requests, case.input_tokens, seed)
        return [LoadRequest(prompt, case.output_tokens) for prompt in prompts]
    return random_requests(
        case.requests,
        input_tokens=case.input_tokens,
        output_tokens=case.output_tokens,
        vocabulary=VOCABULARY,
        seed=seed,
    )


def check(name: str, case: Case, sample: Sample) -> None:
    """ContenderFailed where a request was not answered as asked."""
    got = (sample.input_tokens, sample.output_tokens)
    if sample.error or got != (case.input_tokens, case.output_tokens):
        raise ContenderFailed(
            f"{name}, {case.name}: {sample.error or f'{got[0]} tokens in, {got[1]} out'}"
        )


def kv_gib(dtype: str) -> int:
    """Of KV cache for each server: all sequences of the largest case fit."""
    return DTYPES[dtype] // 2


def own_recipe(folder: Path, threads: int, more: Sequence[str], dtype: str = "bfloat16") -> Recipe:
    """The product's server."""
    argv = [
        *(str(ROOT / ".venv/bin/xpyd"), "worker", "--model", str(folder)),
        *("--served-model-name", "bench", "--dtype", dtype),
        *("--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"),
        *("--kv-cache-memory", f"{kv_gib(dtype)}Gi", "--threads", str(threads)),
        *("--host", "127.0.0.1", "--port", "{port}", *more),
    ]
    return Recipe("xpyd", argv, {"OMP_NUM_THREADS": str(threads)})


@contextmanager
def served(recipe: Recipe, log: Path, cores: str) -> Iterator[Server]:
    """The server while the block runs, ready. ContenderFailed."""
    port = free_port()
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

"""Several vLLM with our connector whose P and D stop, die and start again under load.

Soak: see test_vllm_real; four vLLM take 10 GB.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest

from bench.engine.models import cache
from bench.engine.peer import VERSION
from tests.kv.vllm_kit import (
    KV_PORT,
    ROUTER,
    ROUTER_PORT,
    D,
    P,
    Vllm,
    by_router,
    fleet,
    pair,
    prompt,
    text_of,
    until_free,
)
from xpyd_core.request_id import pair_id_text

pytestmark = pytest.mark.soak
ON_P = {"cores": "0"}
# 32 blocks of 128 tokens: a D that is full again and again.
FULL = ["--num-gpu-blocks-override", "32", "--max-model-len", "2048"]
ON_D = {"cores": "1", "pool_bytes": 1 << 24, "flags": FULL}
REQUESTS, PERIOD_S = 240, 0.5
PROMPTS = [prompt(40 + 61 * seed, 1000 + seed) for seed in range(16)]
WORDS = 24
Engines = tuple[list[Vllm], list[Vllm]]


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Iterator[Engines]:
    skip_without_vllm()
    with fleet(tmp_path_factory.mktemp("vllm"), [ON_P, ON_P], [ON_D, ON_D]) as both:
        yield both


def skip_without_vllm() -> None:
    if not (cache() / f"vllm-{VERSION}/ready").exists():
        pytest.skip("run scripts/vllm_environment.py first")


class Load:
    """An open loop of requests, each by a connection of its own; every fifth client leaves."""

    def __init__(self, answers: list[str]) -> None:
        self._expected = answers
        self.right = 0
        self.wrong: list[str] = []
        self.refused: list[str] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        began = time.monotonic()
        for at in range(REQUESTS):
            time.sleep(max(0.0, began + at * PERIOD_S - time.monotonic()))
            call = self._leave if at % 5 == 4 else self._ask
            thread = threading.Thread(target=call, args=(at,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def hung(self, seconds: float) -> int:
        """How many have no answer after that time."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def _ask(self, at: int) -> None:
        number = at % len(PROMPTS)
        try:
            text = ask(PROMPTS[number], stream=at % 2 == 0)
        except (OSError, urllib.error.HTTPError, ValueError) as error:
            said = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
            with self._lock:
                self.refused.append(f"{at}: {error} {said}")
            return
        with self._lock:
            if text == self._expected[number]:
                self.right += 1
            else:
                self.wrong.append(f"{at}: {text!r} is not {self._expected[number]!r}")

    def _leave(self, at: int) -> None:
        ids = PROMPTS[at % len(PROMPTS)]
        sent = json.dumps(body(ids, stream=at % 2 == 0)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        with socket.create_connection((ROUTER, ROUTER_PORT), 10.0) as client:
            client.sendall(head.encode() + sent)
            time.sleep(0.02 * (at % 50))


def body(ids: list[int], *, stream: bool) -> dict[str, object]:
    return {
        "model": "demo-model",
        "prompt": ids,
        "max_tokens": WORDS,
        "stream": stream,
        "temperature": 0,
        "ignore_eos": True,
    }


def ask(ids: list[int], *, stream: bool) -> str:
    """The text; ValueError for a stream that breaks."""
    return text_of(by_router(**body(ids, stream=stream)))


@contextmanager
def stopped(one: Vllm) -> Iterator[None]:
    one.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        one.signal(signal.SIGCONT)


def kill(one: Vllm) -> None:
    one.signal(signal.SIGKILL)
    one.process.wait(20.0)


def again(one: Vllm) -> None:
    kill(one)
    one.start()
    one.wait()


def halt(one: Vllm) -> None:
    with stopped(one):
        time.sleep(8.0)


def test_under_load_nothing_hangs_and_every_answer_is_right(engines):
    some_p, some_d = engines
    alone = [some_p[0].complete(uuid4().hex, **body(ids, stream=False)) for ids in PROMPTS]
    load = Load([answer["choices"][0]["text"] for answer in alone])
    driver = threading.Thread(target=load.run, daemon=True)
    driver.start()
    steps: list[tuple[Callable[[Vllm], None], Vllm]] = [
        (halt, some_p[1]),
        (halt, some_d[1]),
        (again, some_p[1]),
        (again, some_d[1]),
    ]
    for step, one in steps:
        time.sleep(6.0)
        step(one)
    driver.join(REQUESTS * PERIOD_S + 60.0)
    assert load.hung(120.0) == 0
    assert not load.wrong
    assert not load.refused
    assert load.right == REQUESTS * 4 // 5
    for one in (*some_p, *some_d):
        until_free(one)


def test_d_does_not_wait_its_deadline_for_a_p_that_was_killed(tmp_path):
    skip_without_vllm()
    # Longer than a client's patience: an answer proves that D did not wait so long.
    of_d = {"cores": "1", "pool_bytes": 0, "wait_s": 300.0}
    with pair(tmp_path, ON_P, of_d) as (p, d):
        ids = prompt(700, 77)
        alone = d.complete(uuid4().hex, prompt=ids, max_tokens=8, cache_salt="alone")
        name = pair_id_text(f"{P}:{KV_PORT}", f"{D}:{KV_PORT}", uuid4().hex)
        # Without memory for KV that comes early, P keeps it until D's request runs.
        said = p.complete(name, prompt=ids, max_tokens=1)["kv_transfer_params"]
        kill(p)
        answer = d.complete(name, prompt=ids, max_tokens=8, kv_transfer_params=said)
        assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
        assert d.metric("xpyd_kv_recomputed_tokens_total") > 0
        until_free(d)

"""Several vLLM with our connector whose P and D leave, stop, die and start again under load, behind
a router that wants verified pairs.

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
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from uuid import uuid4

import pytest

from bench.engine.models import cache
from bench.engine.peer import VERSION
from tests.kv.vllm_kit import (
    KV_PORT,
    ROUTER,
    ROUTER_PORT,
    STRICT,
    D,
    Options,
    P,
    Vllm,
    by_router,
    disturbed,
    fleet,
    pair,
    prompt,
    text_of,
    until_free,
    until_verified,
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
    with fleet(tmp_path_factory.mktemp("vllm"), [ON_P, ON_P], [ON_D, ON_D], *STRICT) as both:
        until_verified(4)
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


class DistinctLoad:
    """An open loop of prompts that no prefix cache knows, until it is left; what each answers."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.answers: dict[str, Future[str]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Behind it all have an answer, or their exception."""
        over = threading.Event()
        with ThreadPoolExecutor(64) as clients:
            driver = clients.submit(self._run, clients, over)
            try:
                yield
            finally:
                over.set()
                driver.result(10.0)

    def until_more(self, requests: int) -> None:
        """Until so many more have been sent."""
        enough, deadline = len(self.answers) + requests, time.monotonic() + 60.0
        while len(self.answers) < enough:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def prompt_of(self, at: int) -> list[int]:
        return prompt(100 + 13 * at % 300, self._seed + at)

    def _run(self, clients: Executor, over: threading.Event) -> None:
        began = time.monotonic()
        for at in count():
            if over.wait(max(0.0, began + at * PERIOD_S - time.monotonic())):
                return
            name = f"drain-{self._seed + at}"
            self.answers[name] = clients.submit(self._ask, at, name)

    def _ask(self, at: int, name: str) -> str:
        asked = body(self.prompt_of(at), stream=at % 2 == 0)
        return text_of(by_router(request_id=name, **asked))


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


def until_said(one: Vllm, words: str) -> None:
    """Until its log has them."""
    deadline = time.monotonic() + 30.0
    while words not in one.log.read_text():
        assert time.monotonic() < deadline, one.log.read_text()[-2000:]
        time.sleep(0.1)


def computed_by(p: Vllm, ids: list[int]) -> tuple[str, Options]:
    """Have P compute the prompt; the request's name and body for D, which has no memory for KV that
    comes before its request: P keeps it until then."""
    name = pair_id_text(f"{P}:{KV_PORT}", f"{D}:{KV_PORT}", uuid4().hex)
    said = p.complete(name, prompt=ids, max_tokens=1)["kv_transfer_params"]
    return name, {"prompt": ids, "max_tokens": 8, "kv_transfer_params": said}


def test_a_drained_p_ends_when_its_kv_is_sent_and_a_killed_one_is_not_waited_for(tmp_path):
    """Before those of `engines`, which have the same addresses."""
    skip_without_vllm()
    # Longer than a client's patience: an answer proves that D did not wait so long.
    of_d = {"cores": "1", "pool_bytes": 0, "wait_s": 300.0}
    with pair(tmp_path, ON_P, of_d) as (p, d):
        drained, killed = prompt(700, 76), prompt(700, 77)
        alone = [d.text(prompt=ids, max_tokens=8, cache_salt="x") for ids in (drained, killed)]

        name, asked = computed_by(p, drained)
        p.process.send_signal(signal.SIGTERM)
        until_said(p, "routers have 0 requests here")
        assert d.complete(name, **asked)["choices"][0]["text"] == alone[0]
        assert p.process.wait(60.0) == 0
        assert d.metric("xpyd_kv_recomputed_tokens_total") == 0

        p.start()
        p.wait()
        name, asked = computed_by(p, killed)
        kill(p)
        assert d.complete(name, **asked)["choices"][0]["text"] == alone[1]
        assert d.metric("xpyd_kv_recomputed_tokens_total") > 0
        until_free(d)


@pytest.mark.parametrize("role", ["P", "D"])
def test_no_request_is_even_tried_again_when_an_instance_is_drained(engines, role):
    some_p, some_d = engines
    victim = (some_p if role == "P" else some_d)[1]
    load = DistinctLoad(400 if role == "P" else 800)
    with load.running():
        load.until_more(8)
        victim.process.send_signal(signal.SIGTERM)
        assert victim.process.wait(60.0) == 0
        load.until_more(2)
    assert "routers have 0 requests here" in victim.log.read_text()
    answers = [answer.result() for answer in load.answers.values()]
    assert disturbed(victim.log.parent / "router.log", list(load.answers)) == []
    for at, answer in enumerate(answers):
        asked = body(load.prompt_of(at), stream=False)
        assert answer == some_p[0].text(cache_salt="alone", **asked), at
    victim.start()
    victim.wait()
    until_verified(4)


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

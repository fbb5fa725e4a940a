"""Thousands of random requests in fast-forward: no block lost, no growth, each has its tokens.

Short and long prompts, every sampling option, several choices, continuations, priorities, salts;
clients that leave, choices cut at stop strings, steps that fail. `make soak` runs 20,000.
"""

from __future__ import annotations

import gc
import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from types import FunctionType, ModuleType
from typing import Any

import pytest

from tests.worker.engine_driver import (
    DRAFTS,
    MODEL_DRAFTS,
    ONE_OR_AHEAD,
    PIPELINES,
    STATE_DRAFTS,
    EngineDriver,
    StepFailed,
    Way,
)
from tests.worker.engine_fakes import BLOCK
from xpyd_worker.engine.request import EngineRequest, SamplingParams

_MARKS = 10
_OPEN = 40
# What a field of the engine may hold more than at each of the first rests, in bytes: a counter
# takes 28 from 256 on, the fake executor keeps who was in the last step that failed.
_NOISE_BYTES = 512

# How each field of SamplingParams is drawn: one line for each, and a test that none is missing.
Draw = Callable[[random.Random], Any]
OPTIONS: Mapping[str, Draw] = {
    "max_tokens": lambda rng: rng.choice([0, 1, 2, 5, 9, 20, 60]),
    "seed": lambda rng: rng.getrandbits(64),
    "min_tokens": lambda rng: rng.choice([0, 0, 0, 1, 4]),
    "temperature": lambda rng: rng.choice([0.0, 0.5, 1.0, 2.0]),
    "top_p": lambda rng: rng.choice([0.1, 0.9, 1.0]),
    "top_k": lambda rng: rng.choice([0, 1, 40]),
    "ignore_eos": lambda rng: rng.random() < 0.3,
    "stop_token_ids": lambda rng: rng.choice([(), (), (5,), (5, 6, 7)]),
    "logprobs": lambda rng: rng.choice([None, None, 0, 3]),
    "prompt_logprobs": lambda rng: rng.choice([None] * 9 + [0, 2]),
    "min_p": lambda rng: rng.choice([0.0, 0.2]),
    "repetition_penalty": lambda rng: rng.choice([1.0, 1.0, 1.3]),
    "presence_penalty": lambda rng: rng.choice([0.0, 0.0, 1.0]),
    "frequency_penalty": lambda rng: rng.choice([0.0, 0.0, -1.0]),
    "logit_bias": lambda rng: rng.choice([(), ((3, 2.0),)]),
    "allowed_token_ids": lambda rng: rng.choice([(), (1, 2, 3)]),
    "bad_words": lambda rng: rng.choice([(), (), ((5,), (6, 7))]),
}


class Soak:
    """One engine, the hand that plays with it, and the sizes seen each time it came to rest."""

    def __init__(self, seed: int, way: Way) -> None:
        """`way`: how the engine has its steps, and whether it drafts."""
        self.rng = random.Random(seed)
        # 60 blocks hold two of the longest requests.
        self.driver = EngineDriver(
            blocks=60,
            seqs=8,
            budget=24,
            model_len=120,
            threshold=16,
            policy="priority",
            **way,
        )
        # Those that end otherwise than alone, and of these whose client has left.
        self.cut: set[str] = set()
        self.left: set[str] = set()
        self.count = 0
        # At each rest: what the engine holds by its fields, and its objects in the whole process.
        self.bytes: list[dict[str, int]] = []
        self.objects: list[int] = []

    def run(self, requests: int) -> None:
        for mark in range(1, _MARKS + 1):
            while self.count < requests * mark // _MARKS:
                self.turn()
            self.rest()

    def turn(self) -> None:
        rng, driver = self.rng, self.driver
        driver.now += 0.1
        for _ in range(rng.choice([0, 0, 0, 1, 1, 4])):
            if len(driver.requests) < _OPEN:
                self.arrive()
        if driver.requests and rng.random() < 0.1:
            self.abort(rng.choice(list(driver.requests)))
        if rng.random() < 0.005:
            executor = driver.executor
            executor.during = lambda step: self.cut.update(
                s.log_id for s in step.sequences if executor.fail_with or executor.refuse_with
            )
            if rng.random() < 0.5:
                executor.fail_with = StepFailed("out of luck")
            else:
                executor.refuse_with = StepFailed("not even begun")
        if rng.random() < 0.01:
            driver.core.reset_prefix_cache(lambda _: None)
        driver.core.turn()
        self.look()

    def arrive(self) -> None:
        rng = self.rng
        head = [rng.randrange(3)] * rng.choice([0, 0, BLOCK, 2 * BLOCK, 5 * BLOCK, 20 * BLOCK])
        n = rng.choice([1, 1, 1, 1, 2, 3, 6])
        known: tuple[tuple[int, ...], ...] = ()
        if rng.random() < 0.2:
            known = tuple(_tokens(rng, rng.randrange(4)) for _ in range(n))
        request = EngineRequest(
            f"r{self.count}",
            log_id=f"r{self.count}",
            prompt=(*head, *_tokens(rng, rng.randrange(1, 9))),
            sampling=SamplingParams(**{name: draw(rng) for name, draw in OPTIONS.items()}),
            n=n,
            first_choice=n * rng.randrange(3),
            continue_from=known,
            cache_salt=rng.choice([b"", b"", b"salt"]),
            priority=rng.randrange(-2, 3),
        )
        self.count += 1
        self.driver.submit(request)

    def abort(self, name: str) -> None:
        """The client leaves, or some choices meet a stop string."""
        n = self.driver.requests[name].n
        some = tuple(c for c in range(n) if self.rng.random() < 0.5)
        self.cut.add(name)
        if self.rng.random() < 0.5:
            self.left.add(name)
            self.driver.core.abort(name)
        else:
            self.driver.core.abort(name, some)

    def look(self) -> None:
        """Check the requests that are over, and forget them and what ran."""
        driver = self.driver
        for name in list(driver.requests):
            if name in self.left or driver.finished(name):
                if name in self.cut:
                    driver.assert_begins_as_alone(name)
                else:
                    driver.assert_as_alone(name)
                del driver.requests[name], driver.outputs[name], driver.matchers[name]
                self.cut.discard(name)
                self.left.discard(name)
        driver.executor.steps.clear()

    def rest(self) -> None:
        """Let everything end; then nothing is held, and what is left is measured."""
        driver = self.driver
        driver.executor.fail_with = driver.executor.refuse_with = None
        for _ in range(5000):
            done = not driver.core.turn() and driver.core.is_idle()
            self.look()
            if done:
                break
        stats = driver.core.stats()
        assert not driver.requests
        assert (stats.running, stats.waiting) == (0, 0)
        driver.assert_all_blocks_free()
        # How much of the prefix cache is filled is chance.
        answers: list[bool] = []
        driver.core.reset_prefix_cache(answers.append)
        driver.core.turn()
        assert answers == [True]
        gc.collect()
        self.bytes.append(bytes_of(driver.core))
        self.objects.append(engine_objects())


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, 40) for _ in range(count))


def bytes_of(root: object) -> dict[str, int]:
    """Memory of all that can be reached from each field of `root`, but for code and for what an
    earlier field has reached. Of containers their entries: what they have room for is chance."""
    seen = {id(root), id(vars(root))}
    sizes: dict[str, int] = {}
    for name, value in vars(root).items():
        found, sizes[name] = [value], 0
        while found:
            one = found.pop()
            if id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType):
                seen.add(id(one))
                inside = gc.get_referents(one)
                is_container = isinstance(one, dict | list | set | deque)
                sizes[name] += 8 * len(inside) if is_container else sys.getsizeof(one)
                found.extend(inside)
    return sizes


def engine_objects() -> int:
    """Objects of the engine's own types, whoever holds them. Those of others are no measure: other
    tests of the process leave threads that make some, the more the longer this test takes."""
    types = (type(one).__module__ for one in gc.get_objects())
    return sum(module.startswith("xpyd_worker.engine.") for module in types)


@contextmanager
def only_new_objects() -> Generator[None]:
    """The collector leaves alone what is there already, and does not list it. A process has half
    a million objects of other tests: ten looks at them would take longer than the requests."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _soak(requests: int, seed: int, way: Way, caplog: pytest.LogCaptureFixture) -> None:
    # pytest keeps what is logged; that would count as growth.
    caplog.set_level(logging.CRITICAL, "xpyd_worker")
    print(f"seed {seed}")  # noqa: T201
    soak = Soak(seed, way)
    with only_new_objects():
        soak.run(requests)
    stats = soak.driver.core.stats()
    assert soak.count >= requests
    assert min(stats.preemptions, stats.prefix_hit_tokens, stats.finished["abort"]) > 0
    assert {"stop", "length", "abort", "error"} <= stats.finished.keys()
    assert (stats.spec_accepted_tokens > 0) == ("speculative" in way)
    # The first marks fill the fake's slots.
    half = _MARKS // 2
    for name in soak.bytes[0]:
        sizes = [at_rest[name] for at_rest in soak.bytes]
        assert max(sizes[half:]) < max(sizes[:half]) + _NOISE_BYTES, (name, sizes)
    assert soak.objects[-1] < soak.objects[half] + 50, soak.objects


def test_the_soak_draws_every_sampling_option() -> None:
    assert OPTIONS.keys() == {field.name for field in fields(SamplingParams)}


DRAFTING: list[Way] = [
    {**way, "speculative": drafts}
    for drafts in (DRAFTS, MODEL_DRAFTS, STATE_DRAFTS)
    for way in (*ONE_OR_AHEAD, PIPELINES[-1])
]


@pytest.mark.parametrize("way", [*ONE_OR_AHEAD, PIPELINES[-1], DRAFTING[0], DRAFTING[3]])
def test_a_thousand_requests_leave_no_block_behind_and_nothing_grows(
    way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    _soak(1000, 6, way, caplog)


@pytest.mark.soak
@pytest.mark.parametrize("way", [*ONE_OR_AHEAD, *PIPELINES, *DRAFTING])
def test_twenty_thousand_requests_leave_no_block_behind_and_nothing_grows(
    way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    _soak(20_000, random.SystemRandom().randrange(2**32), way, caplog)

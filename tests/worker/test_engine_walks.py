"""Random walks of whole engines: whatever happens, each request's tokens are those it has alone.

Arrivals, aborts, preemptions, forks, continuations, failing steps and KV that comes, comes late or
never, over pools of a few blocks; step by step, with steps launched one ahead, and in a pipeline.
The fakes check each step; the end is checked here.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.worker.engine_driver import (
    DRAFTS,
    MODEL_DRAFTS,
    STATE_DRAFTS,
    EngineDriver,
    StepFailed,
    Way,
    make_request,
    walks,
)
from tests.worker.engine_fakes import BLOCK
from tests.worker.grammar_kit import GRAMMARS, ids_within, start_of
from xpyd_core.request_id import Address, TransferKey
from xpyd_worker.engine import speculation
from xpyd_worker.engine.request import EngineRequest, ReceiveFrom, SendTo
from xpyd_worker.engine.speculation import SpeculativeConfig
from xpyd_worker.grammar.matcher import Matcher

PEER = Address("127.0.0.1", 21001)


def draw_request(rng: random.Random, number: int, driver: EngineDriver) -> EngineRequest:
    """A request over few distinct prefixes, so that the prefix cache hits often."""
    head = [rng.randrange(3)] * (BLOCK * rng.randrange(4))
    prompt = head + [rng.randrange(40) for _ in range(rng.randrange(1, 12))]
    n = rng.choice([1, 1, 1, 2, 3, 5])
    known: tuple[tuple[int, ...], ...] = ()
    matchers: tuple[Matcher, ...] = ()
    if rng.random() < 0.3:
        start = start_of(rng.choice(GRAMMARS))
        matchers = tuple(start.copy() for _ in range(n))
        known = tuple(ids_within(rng, one) for one in matchers)
    elif rng.random() < 0.4:
        known = tuple(
            tuple(rng.randrange(1, 40) for _ in range(rng.randrange(4))) for _ in range(n)
        )
    return make_request(
        f"r{number}",
        prompt,
        n=n,
        continue_from=known,
        first_choice=n * rng.randrange(3),
        max_tokens=rng.randrange(0, 20),
        min_tokens=rng.choice([0, 0, 3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        top_k=rng.choice([0, 1]) if driver.drafts else 0,
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=rng.choice([(), (5, 6)]),
        prompt_logprobs=rng.choice([None, None, None, None, 1]),
        # The fake at the other end knows no salts.
        cache_salt=b"" if driver.consumer else rng.choice([b"", b"", b"salt"]),
        priority=rng.randrange(-2, 3),
        matchers=matchers,
    )


def with_transfer(
    rng: random.Random, request: EngineRequest, number: int, driver: EngineDriver
) -> EngineRequest:
    key = TransferKey(f"{number:032x}", 0)
    transfer: SendTo | ReceiveFrom | None = None
    if driver.producer and rng.random() < 0.7:
        transfer = SendTo(key, PEER, len(request.prompt), rng.random() < 0.5)
    if driver.consumer and rng.random() < 0.8:
        transfer = ReceiveFrom(key, wait_s=rng.choice([0.0, 1.0, 5.0]))
    return EngineRequest(**{**vars(request), "transfer": transfer})


def offered_ids(rng: random.Random, request: EngineRequest) -> list[int]:
    """What P would offer: the prompt, and with one choice its ids; now and then another prompt."""
    ids = list(request.prompt)
    if request.n == 1 and request.continue_from and rng.random() < 0.5:
        ids += request.continue_from[0]
    if rng.random() < 0.1:
        ids[-1] = 39 - ids[-1]
    return ids


class Walk:
    """One engine and the seeded hand that plays with it."""

    def __init__(self, seed: int, **driver: Any) -> None:
        self.rng = random.Random(seed)
        self.driver = EngineDriver(**driver)
        other = random.Random(seed)
        self.driver.executor.oldest_is_first = lambda: other.random() < 0.7
        self.touched: set[str] = set()
        self.count = 0

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.one_turn()
        self.settle()
        self.check()

    def one_turn(self) -> None:
        rng, driver = self.rng, self.driver
        driver.now += rng.choice([0.0, 0.1, 0.3])
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            if sum(not driver.finished(r) for r in driver.requests) < 12:
                self.arrive()
        if rng.random() < 0.06 and driver.requests:
            self.abort(rng.choice(list(driver.requests)))
        if driver.consumer:
            for key in list(driver.consumer.arrivals):
                if rng.random() < 0.3:
                    driver.consumer.land(key)
                elif rng.random() < 0.05:
                    driver.consumer.fail(key, "died")
        if rng.random() < 0.01:
            executor = driver.executor
            executor.during = lambda step: self.touched.update(
                s.log_id for s in step.sequences if executor.fail_with or executor.refuse_with
            )
            if rng.random() < 0.5:
                executor.fail_with = StepFailed("out of luck")
            else:
                executor.refuse_with = StepFailed("not even begun")
        driver.core.turn()

    def arrive(self) -> None:
        rng, driver = self.rng, self.driver
        self.count += 1
        request = draw_request(rng, self.count, driver)
        request = with_transfer(rng, request, self.count, driver)
        if driver.consumer and isinstance(request.transfer, ReceiveFrom) and rng.random() < 0.8:
            where = rng.choice(["direct", "direct", "buffer", "deferred"])
            driver.consumer.arrive(request.transfer.key, offered_ids(rng, request), where)
        if rng.random() < 0.95:
            driver.submit(request)

    def abort(self, request_id: str) -> None:
        self.touched.add(request_id)
        n = self.driver.requests[request_id].n
        some = tuple(c for c in range(n) if self.rng.random() < 0.5)
        self.driver.core.abort(request_id, self.rng.choice([None, some]))

    def settle(self) -> None:
        """No new requests; every transfer ends one way or the other; all requests end soon."""
        driver = self.driver
        driver.executor.fail_with = driver.executor.refuse_with = None
        for _ in range(60 * len(driver.requests) + 200):
            driver.now += 0.2
            if driver.consumer:
                for key in list(driver.consumer.arrivals):
                    driver.consumer.land(key)
                driver.consumer.drop_orphans()
            if not driver.core.turn() and driver.core.is_idle():
                return
        raise AssertionError("requests starve")

    def check(self) -> None:
        driver = self.driver
        assert driver.core.stats().running == driver.core.stats().waiting == 0
        driver.assert_all_blocks_free()
        for request_id in driver.requests:
            if request_id not in self.touched:
                if not any(o.error for o in driver.outputs[request_id]):
                    driver.assert_as_alone(request_id)
                else:
                    assert driver.outputs[request_id][-1].error_kind == "too_long"
                continue
            driver.assert_begins_as_alone(request_id)


WAYS_TO_DRAFT = (DRAFTS, MODEL_DRAFTS, STATE_DRAFTS)


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than the walks' prompts have tokens."""
    monkeypatch.setattr(speculation, "_STATES", 6)


@pytest.mark.parametrize(("seed", "way"), walks(2, 8))
def test_an_aggregated_engine_gives_every_request_its_own_tokens(seed: int, way: Way):
    walk = Walk(seed, **way, blocks=14, seqs=5, budget=9, model_len=48)
    walk.run(300)
    assert walk.driver.core.stats().preemptions > 0


@pytest.mark.parametrize("drafts", WAYS_TO_DRAFT, ids=["ngram", "model", "states"])
@pytest.mark.parametrize(("seed", "way"), walks(2, 8))
def test_so_it_does_with_drafts(seed: int, way: Way, drafts: SpeculativeConfig, few_states: None):
    sizes: Way = {"blocks": 14, "seqs": 5, "budget": 16, "model_len": 48}
    walk = Walk(seed, **way, **sizes, speculative=drafts)
    walk.run(300)
    stats = walk.driver.core.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens


@pytest.mark.parametrize("drafts", WAYS_TO_DRAFT, ids=["ngram", "model", "states"])
@pytest.mark.parametrize(("seed", "way"), walks(1, 8))
def test_so_it_does_with_drafts_behind_received_kv(
    seed: int, way: Way, drafts: SpeculativeConfig, few_states: None
):
    sizes: Way = {"blocks": 20, "seqs": 5, "budget": 16, "model_len": 48}
    walk = Walk(seed, **way, **sizes, receives=True, speculative=drafts)
    walk.run(300)
    assert walk.driver.core.stats().received_tokens > 0
    assert walk.driver.core.stats().spec_accepted_tokens > 0


@pytest.mark.parametrize(("seed", "way"), walks(2, 4))
def test_so_it_does_without_a_prefix_cache(seed: int, way: Way):
    walk = Walk(seed, **way, blocks=14, seqs=5, budget=9, model_len=48, caching=False)
    walk.run(300)
    assert walk.driver.core.stats().prefix_hit_tokens == 0


@pytest.mark.parametrize(("seed", "way"), walks(2, 8))
def test_a_sending_engine_sends_what_it_computed_and_frees_it(seed: int, way: Way):
    walk = Walk(seed, **way, blocks=24, seqs=5, budget=9, model_len=48, sends=True)
    walk.run(300)
    assert walk.driver.producer is not None
    assert any(call[0] == "cached" for call in walk.driver.producer.calls)


@pytest.mark.parametrize(("seed", "way"), walks(2, 8))
def test_so_it_does_where_ranks_send_and_steps_follow_each_other(seed: int, way: Way):
    sizes = {**way, "blocks": 24, "seqs": 5, "budget": 9, "model_len": 48}
    walk = Walk(seed, sends=True, ranks_send=True, **sizes)
    walk.run(400)
    assert walk.driver.producer is not None
    assert len(walk.driver.producer.offers) > 20
    assert all(step.kv for step in walk.driver.executor.steps)


@pytest.mark.parametrize(("seed", "way"), walks(2, 10))
def test_a_receiving_engine_uses_landed_kv_and_recomputes_what_does_not_come(seed: int, way: Way):
    walk = Walk(seed, **way, blocks=20, seqs=5, budget=9, model_len=48, receives=True)
    walk.run(300)
    stats = walk.driver.core.stats()
    assert stats.received_tokens > 0
    assert {"late", "died", "preempted"} & set(stats.kv_recomputed)


@pytest.mark.parametrize(("seed", "way"), walks(2, 4))
def test_one_sequence_at_a_time_is_enough_for_all(seed: int, way: Way):
    walk = Walk(seed, **way, blocks=12, seqs=1, budget=2, model_len=48, receives=True)
    walk.run(300)


@pytest.mark.parametrize("role", [{}, {"sends": True}, {"receives": True}])
@pytest.mark.parametrize(("seed", "way"), walks(2, 4))
def test_so_it_does_by_priority_and_with_a_threshold(seed: int, role: dict[str, bool], way: Way):
    sizes = {**way, "blocks": 20, "seqs": 5, "budget": 9, "model_len": 48, "threshold": 4}
    walk = Walk(seed, policy="priority", **sizes, **role)
    walk.run(300)
    assert walk.driver.core.stats().preemptions > 0

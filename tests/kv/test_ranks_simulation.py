"""Nothing that befalls connections of ranks, engines or requests breaks a transfer's promises."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.kv.rank_pods import engine_of
from tests.kv.rank_sim import Sim
from tests.kv.test_ranks_pairs import LAYOUTS, engines
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.settings import KvLimits, KvSettings
from xpyd_kv.wire.messages import MODES

UNIT = 6 * 4 * 8
RATES = (0.02, 0.06, 0.2, 0.6)
STORES = (
    StoreLimits(),
    StoreLimits(1.0, 64 * UNIT, 0),
    StoreLimits(1.0, 0, 64 * UNIT),
    StoreLimits(1.0, 0, 0),
    StoreLimits(0.6, 8 * UNIT, 16 * UNIT),
)


def sim_of(seed: int, faults: float) -> tuple[Sim, int, int]:
    """Everything from one number, and the prompts and the chunk of its run."""
    rng = random.Random(seed)
    name = rng.choice(sorted(LAYOUTS))
    settings = KvSettings(
        limits=KvLimits(
            ahead_bytes=rng.choice([1, 400, 10**6]),
            # Giving up the oldest is no fault, and not asked for without any.
            max_held_share=rng.choice([0.2, 0.5]) if faults else 1.0,
        ),
        frames=FrameLimits(rng.choice([1, 200, 10**6]), rng.choice([64, 200, 10**6])),
        store=rng.choice(STORES),
        mode=rng.choice(MODES),
    )
    p, d = engines(name, rng.choice([(4, 4), (4, 4), (2, 4), (8, 4)]))
    blocks = rng.choice([24, 48])
    sim = Sim(p, d, seed=seed, settings=settings, blocks=blocks, faults=faults)
    return sim, rng.choice([1, 2, 4]), rng.choice([3, 6, 100])


@pytest.mark.parametrize("first", range(0, 20, 5))
def test_without_faults_every_prompt_lands_in_any_order_of_messages(first: int) -> None:
    for seed in range(first, first + 5):
        sim, prompts, chunk = sim_of(seed, faults=0.0)
        sim.run(prompts, tokens=(5, 13, 17), chunk=chunk)
        ends = Counter(prompt.at_d for prompt in sim.prompts)
        assert set(ends) == {"landed"}, (seed, ends)


@pytest.mark.parametrize("first", range(1000, 1040, 10))
def test_faults_at_any_moment_break_no_promise(first: int) -> None:
    for seed in range(first, first + 10):
        sim, prompts, chunk = sim_of(
            seed, faults=random.Random(seed).choice([0.02, 0.06, 0.2, 0.6])
        )
        try:
            sim.run(prompts, tokens=(5, 13, 17), chunk=chunk)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error} after {sim.seen}") from error


@pytest.mark.soak
@pytest.mark.parametrize("first", range(10_000, 12_000, 200))
def test_faults_at_any_moment_break_no_promise_in_many_more_runs(first: int) -> None:
    for seed in range(first, first + 200):
        sim, prompts, chunk = sim_of(
            seed, faults=random.Random(seed).choice([0.02, 0.06, 0.2, 0.6])
        )
        try:
            sim.run(prompts, tokens=(5, 13, 17), chunk=chunk)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error} after {sim.seen}") from error


def test_the_faults_do_happen_and_some_prompts_land_nevertheless() -> None:
    seen: Counter[str] = Counter()
    for seed in range(2000, 2030):
        sim, prompts, chunk = sim_of(seed, faults=0.1)
        sim.run(prompts, tokens=(5, 13, 17), chunk=chunk)
        seen.update(sim.seen)
        seen.update(prompt.at_d for prompt in sim.prompts)
    assert {"cut", "cancel", "forget", "release", "pause", "corrupt", "dial", "landed"} <= set(seen)


def test_a_transfer_without_its_pairs_quiet_would_be_seen() -> None:
    """The watch works: a D that frees a landing while a rank still writes is caught."""
    sim = Sim(engine_of(2, ((0, 1),)), engine_of(1, ((0,), (1,))), seed=1, settings=KvSettings())
    view = sim.d.memories[0].block_view(0, 3)
    with pytest.raises(AssertionError, match="held by none"):
        sim.d.check_held([view], "a write into")
    block = sim.d.pool.take(4)
    assert block is not None
    sim.d.check_held([view], "a write into")

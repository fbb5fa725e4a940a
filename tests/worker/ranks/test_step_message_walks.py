"""Random walks of the real scheduler: each rank makes the same StepInput of what it is sent.

Forks, preemptions, continuations, adopted KV, evicted slots, steps that fail, and steps launched
one ahead (DRAWN_BEFORE): the executor under the walks checks every step.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.worker.engine_bench import seeds
from tests.worker.ranks.coded_executor import CodedExecutor, CrowdedExecutor
from tests.worker.test_engine_walks import Walk
from xpyd_worker.ranks.step_messages import Ahead, Chunk, Full, Going


def walk(seed: int, make_executor: type[CodedExecutor], **options: int | bool) -> Counter[type]:
    """Kinds of rows that one walk sent."""
    sizes = {"seqs": 5, "budget": 9, "model_len": 48} | options
    one = Walk(seed, make_executor=make_executor, **sizes)  # pyright: ignore
    one.run(300)
    executor = one.bench.executor
    assert isinstance(executor, CodedExecutor)
    return Counter(map(type, executor.rows))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("make_executor", [CodedExecutor, CrowdedExecutor])
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_the_ranks_make_the_step_that_was_sent(
    seed: int, make_executor: type[CodedExecutor], depth: int
):
    rows = walk(seed, make_executor, depth=depth, blocks=14)
    assert rows[Going if depth == 1 else Ahead] > rows[Full] / 2
    assert min(rows[Chunk], rows[Full]) > 10


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_so_they_do_of_sequences_whose_kv_was_received(seed: int, depth: int):
    rows = walk(seed, CodedExecutor, depth=depth, blocks=20, receives=True)
    assert min(rows[Chunk], rows[Full]) > 10

"""Random walks of the real scheduler: each rank makes the same StepInput of what it is sent.

Forks, preemptions, continuations, adopted KV, evicted slots, steps that fail, steps launched one
ahead (DRAWN_BEFORE) and those of a pipeline: the executor under the walks checks every step.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.ranks.kit.coded_executor import CodedExecutor, CrowdedExecutor
from tests.worker.engine_driver import DRAFTS, MODEL_DRAFTS, Way, walks
from tests.worker.test_engine_walks import Walk
from xpyd_worker.engine.speculation import SpeculativeConfig
from xpyd_worker.ranks.step.messages import Ahead, Chunk, Draft, Full, Going


def walk(seed: int, make_executor: type[CodedExecutor], **options: Any) -> Counter[type]:
    """Kinds of rows that one walk sent."""
    sizes = {"seqs": 5, "budget": 9, "model_len": 48} | options
    one = Walk(seed, make_executor=make_executor, **sizes)
    one.run(300)
    executor = one.driver.executor
    assert isinstance(executor, CodedExecutor)
    return Counter(map(type, executor.rows))


@pytest.mark.parametrize("make_executor", [CodedExecutor, CrowdedExecutor])
@pytest.mark.parametrize(("seed", "way"), walks(2, 6))
def test_the_ranks_make_the_step_that_was_sent(
    seed: int, make_executor: type[CodedExecutor], way: Way
):
    rows = walk(seed, make_executor, **way, blocks=14)
    assert rows[Ahead if way == {"depth": 2} else Going] > rows[Full] / 2
    assert min(rows[Chunk], rows[Full]) > 10


@pytest.mark.parametrize("drafts", [DRAFTS, MODEL_DRAFTS], ids=["ngram", "model"])
@pytest.mark.parametrize(("seed", "way"), walks(1, 6))
def test_so_they_do_of_steps_with_drafts(seed: int, way: Way, drafts: SpeculativeConfig):
    rows = walk(seed, CrowdedExecutor, **way, blocks=14, budget=16, speculative=drafts)
    assert min(rows[Chunk], rows[Full], 2 * rows[Draft]) > 10


@pytest.mark.parametrize(("seed", "way"), walks(2, 6))
def test_so_they_do_of_sequences_whose_kv_was_received(seed: int, way: Way):
    rows = walk(seed, CodedExecutor, **way, blocks=20, receives=True)
    assert min(rows[Chunk], rows[Full]) > 10

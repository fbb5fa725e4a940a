"""The update that every step ends with, on real stages in processes of their own: what the engine
does not send again, because the ranks have drawn it, they must know themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import pytest

from tests.e2e.harness import DEMO_MODEL
from tests.worker.runner_driver import Driver, make_runner
from xpyd_worker.config import WorkerConfig
from xpyd_worker.load.engine import executor_of
from xpyd_worker.ranks.executor import RankedExecutor
from xpyd_worker.ranks.instance import Instance
from xpyd_worker.ranks.start.messages import Logs
from xpyd_worker.ranks.start.processes import COMMAND
from xpyd_worker.runner.runner import ModelRunner

FORGETFUL = (sys.executable, "-m", "tests.ranks.kit.forgetful_rank")
PROMPTS = ((5, 90, 17, 33, 60, 8), (7,) * 19)
TOKENS = 6
pytestmark = pytest.mark.slow  # torch is imported twice


@contextmanager
def three_stages(command: Sequence[str]) -> Iterator[RankedExecutor]:
    config = WorkerConfig(
        model=str(DEMO_MODEL),
        dtype="float32",
        device="cpu",
        threads=1,
        kv_cache_bytes=1 << 20,
        pipeline_parallel_size=3,
    )
    instance = Instance(config, logs=Logs("warning"), command=command)
    try:
        ready = instance.start()
        yield executor_of(config, instance, ready[0])
    finally:
        instance.close(in_order=instance.loss is None)


def texts(runner: RankedExecutor | ModelRunner) -> list[list[int]]:
    """What it writes behind each prompt."""
    driver = Driver(cast(ModelRunner, runner))
    sequences = [driver.add(prompt) for prompt in PROMPTS]
    driver.run(sequences, tokens=TOKENS, budget=16)
    return [one.output for one in sequences]


def test_a_middle_stage_without_the_update_spoils_the_text_from_the_second_token_on() -> None:
    """Article fact 43."""
    right = texts(make_runner(DEMO_MODEL))
    with three_stages(COMMAND) as executor:
        assert texts(executor) == right
    with three_stages(FORGETFUL) as executor:
        wrong = texts(executor)
    for found, wanted in zip(wrong, right, strict=True):
        assert found[0] == wanted[0]
        assert found[1:] != wanted[1:]

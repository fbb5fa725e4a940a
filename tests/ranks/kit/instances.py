"""Instances of fake ranks: real processes, no model."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.config import WorkerConfig
from xpyd_worker.engine.executor import Running, StepInput, StepOutput
from xpyd_worker.ranks.executor import RankedExecutor
from xpyd_worker.ranks.instance import Instance
from xpyd_worker.ranks.loss import Loss
from xpyd_worker.ranks.start.messages import Logs

COMMAND = (sys.executable, "-m", "tests.ranks.kit.fake_rank")
WAIT_S = 120.0


class JsonSteps:
    """Steps are JSON, so that a test can say in one what each rank does."""

    def encode(self, step: StepInput) -> bytes:
        return step.kv

    def drawn(self, step: int, output: StepOutput) -> None:
        """Every step says all."""


def executor_of(
    instance: Instance, *, depth: int = 2, deadline_s: float = WAIT_S
) -> RankedExecutor:
    return RankedExecutor(
        instance,
        num_blocks=1,
        depth=depth,
        draws_ahead=False,
        encoder=JsonSteps(),
        decode=json.loads,
        step_deadline_s=deadline_s,
    )


def launch(executor: RankedExecutor, what: dict[str, Any]) -> Running:
    """A step in which each rank does what is said."""
    return executor.launch(StepInput(1, (), kv=json.dumps(what).encode()), lambda _: None)


def step(executor: RankedExecutor, what: dict[str, Any]) -> Any:
    """The same, to its end."""
    return cast(Any, launch(executor, what).wait())


def make(sizes: Sizes, *, host: str = "127.0.0.1", **told: Any) -> Instance:
    """Not started. `told`: what the ranks do as they start, e.g. `{"load 1": "exit:3"}`."""
    config = WorkerConfig(
        model=json.dumps(told),
        host=host,
        tensor_parallel_size=sizes.tensor,
        pipeline_parallel_size=sizes.pipeline,
    )
    return Instance(config, logs=Logs("warning"), command=COMMAND)


def pod_config(
    pod: int, *, leader: str, host: str, key_file: str, model: str = "{}", **more: Any
) -> WorkerConfig:
    """One of two pods, each with a stage of two ranks. `more`: fields that say it otherwise."""
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2} | more
    return WorkerConfig(
        model=model,
        host=host,
        **sizes,
        pods=2,
        pod=pod,
        leader_address=leader,
        kv_key_file=Path(key_file),
    )


@contextmanager
def started(sizes: Sizes, *, host: str = "127.0.0.1", **told: Any) -> Iterator[Instance]:
    """Ready for steps; ended as is due."""
    instance = make(sizes, host=host, **told)
    try:
        instance.start()
        await_pids(instance, sizes)
        yield instance
    finally:
        instance.close(in_order=instance.loss is None)


def await_pids(instance: Instance, sizes: Sizes) -> None:
    """Until the watch's thread has the ranks' processes, which may answer before."""
    ticks = threading.Event()
    for _ in range(round(WAIT_S / 0.01)):
        if all(instance.rank_identity(rank).pid for rank in range(sizes.replica)):
            return
        ticks.wait(0.01)
    raise AssertionError("a rank has no process")


def loss_of(instance: Instance) -> Loss:
    """Wait for it."""
    assert instance.settled.wait(WAIT_S), "no loss was noticed"
    assert instance.loss is not None
    return instance.loss


def is_alive(pid: int) -> bool:
    """Whether the process is there, and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"

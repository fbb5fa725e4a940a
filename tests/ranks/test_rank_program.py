"""What a rank's program makes of its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.config import WorkerConfig
from xpyd_worker.ranks.link.ring import RingFds
from xpyd_worker.ranks.start import program
from xpyd_worker.ranks.start.messages import Logs, Start

MODEL = Path(__file__).parents[2] / "examples/demo-model"
NO_RING = RingFds(-1, (), ())


class Met(Exception):
    """The program has come to the other ranks."""


def start_of(config: WorkerConfig) -> Start:
    """The start of the first of two ranks in one pod."""
    return Start(
        config=config,
        sizes=config.sizes,
        rank=0,
        pod_rank=0,
        pod_ranks=2,
        rendezvous=("127.0.0.1", 1),
        address="127.0.0.1",
        listener=None,
        ring=NO_RING,
        responses=NO_RING,
        beats=-1,
        logs=Logs(),
    )


@pytest.mark.parametrize("asked", [True, False])
def test_the_custom_all_reduce_is_asked_for_as_configured(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    given: dict[str, Any] = {}

    def open_parallel(_sizes: Sizes, **more: Any) -> None:
        given.update(more)
        raise Met

    monkeypatch.setattr(program, "open_parallel", open_parallel)
    config = WorkerConfig(
        model=str(MODEL),
        device="cpu",
        threads=1,
        tensor_parallel_size=2,
        custom_all_reduce=asked,
    )
    start = start_of(config)
    channel: Any = None
    with pytest.raises(Met):
        program.RankProgram(start, channel, pytest.fail).load()
    assert given["custom_all_reduce"] is asked


@pytest.mark.parametrize(("replica", "gpu"), [(0, "cuda:0"), (2, "cuda:4")])
def test_the_gpus_of_a_replica_are_behind_those_of_the_ones_before(
    monkeypatch: pytest.MonkeyPatch, replica: int, gpu: str
) -> None:
    asked: list[str] = []
    checked: list[tuple[int, int]] = []

    def choose(device: str) -> Any:
        asked.append(device)
        if len(asked) == 2:
            raise Met
        return "cuda"

    monkeypatch.setattr(program, "choose_device", choose)
    monkeypatch.setattr(program, "check_devices", lambda *given: checked.append(given))
    monkeypatch.setattr(program.torch.cuda, "device_count", lambda: 6)
    threads: list[int] = []
    monkeypatch.setattr(program.torch, "set_num_threads", threads.append)
    monkeypatch.setattr(program.os, "sched_getaffinity", lambda _: range(12))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = WorkerConfig(
        model=str(MODEL), tensor_parallel_size=2, data_parallel_size=3, replica=replica
    )
    channel: Any = None
    with pytest.raises(Met):
        program.RankProgram(start_of(config), channel, pytest.fail)
    assert (asked[1], checked, threads) == (gpu, [(6, 6)], [2])

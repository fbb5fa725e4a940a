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
    start = Start(
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
    channel: Any = None
    with pytest.raises(Met):
        program.RankProgram(start, channel, pytest.fail).load()
    assert given["custom_all_reduce"] is asked

"""The articles' numbers 7 and 8 as NCCL has them: how many communicators a fleet makes, and what
they take. The fake counts; that one really takes so much is unverified on hardware.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

from tests.kv.device_fake import Machine
from tests.kv.nccl_fake import FakeNccl, World
from xpyd_kv.transport.devices.nccl.communicators import Communicators
from xpyd_kv.transport.devices.nccl.library import RECEIVER, SENDER, NcclLimits, communicator_bytes
from xpyd_kv.transport.devices.nccl.path import NcclPath

UNIT = 64
GB = 10**9
PATIENCE_S = 30.0


def _communicators(world: World, name: str) -> Communicators:
    device = world.machine.device(name, gpu=name)
    return Communicators(FakeNccl(world, device), device, NcclLimits(), give_up=_unexpected)


def _unexpected(reason: str) -> None:
    raise AssertionError(reason)


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("p", "d", "tp", "groups"), [(1, 2, 2, 7), (1, 3, 1, 3), (3, 1, 1, 3), (2, 2, 2, 12)]
)
def test_one_communicator_for_each_pair_of_ranks_and_none_for_a_second_transfer(
    p: int, d: int, tp: int, groups: int
) -> None:
    """Article fact 7."""
    world = World(Machine(latest=0))
    p_side = [_communicators(world, f"p{i}") for i in range(p * tp)]
    d_side = [_communicators(world, f"d{i}") for i in range(d * tp)]
    views = {
        communicators: communicators.device.allocate(UNIT) for communicators in (*p_side, *d_side)
    }
    for sender, receiver in itertools.product(range(p * tp), range(d * tp)):
        if sender % tp == receiver % tp:
            _transfer_twice(p_side[sender], d_side[receiver], views)
    tp_groups = p + d if tp > 1 else 0
    assert len(world.comms) + tp_groups == groups
    assert all(sorted(comm) == [SENDER, RECEIVER] for comm in world.comms.values())
    assert [communicators.metrics.communicators for communicators in p_side] == [d] * (p * tp)
    assert [communicators.metrics.communicators for communicators in d_side] == [p] * (d * tp)
    for communicators in (*p_side, *d_side):
        communicators.close()
        communicators.device.free(views[communicators])
    world.machine.check()


def _transfer_twice(
    sender: Communicators, receiver: Communicators, views: dict[Communicators, object]
) -> None:
    lender = NcclPath(sender, unit_bytes=UNIT, lends=True).lender()
    borrower = NcclPath(receiver, unit_bytes=UNIT, lends=False).borrower()
    lent = lender.lent()
    borrower.open(lent.size_bytes, lent.body, [])
    for _ in range(2):
        places = lender.places([views[sender]], at_most=1)
        assert places is not None
        lender.sent()
        fetch = borrower.prepare(places, UNIT)([views[receiver]])
        _until(fetch.poll)
        assert not lender.has_news


@pytest.mark.parametrize(("channels", "megabytes"), [(16, 100), (8, 52)])
def test_a_communicator_of_16_channels_takes_100_mb_and_of_8_channels_52(
    channels: int, megabytes: int
) -> None:
    """Article fact 8."""
    assert communicator_bytes(channels) == megabytes * 10**6


@pytest.mark.parametrize(("channels", "of_p", "of_d"), [(16, 14.4, 9.6), (8, 7.5, 5.0)])
def test_in_96p144d_a_p_device_gives_144_communicators_and_a_d_device_96(
    channels: int, of_p: float, of_d: float
) -> None:
    """So much that the number of communicators is bounded; beyond it KV takes the sockets.

    Article fact 8.
    """
    p_device, d_device = (
        NcclLimits(channels=channels, max_communicators=count).most_bytes for count in (144, 96)
    )
    assert (round(p_device / GB, 1), round(d_device / GB, 1)) == (of_p, of_d)
    assert NcclLimits().most_bytes < 4 * GB

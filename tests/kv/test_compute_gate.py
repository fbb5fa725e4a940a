"""Calls that wait for the model's work on its GPU."""

from __future__ import annotations

import logging

import pytest

from tests.kv.device_fake import Machine
from xpyd_kv.ranks.handler import LIMIT_S, ComputeGate


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.machine = Machine(latest=0)
        self.gpu = self.machine.device("p")
        self.cache = self.gpu.allocate(16)
        self.gate = ComputeGate(lambda: self.now)
        self.said: list[str] = []

    def add(self, name: str) -> None:
        self.gpu.compute(self.cache, name.encode().ljust(16))
        event = self.gpu.compute_stream().record()
        self.gate.add(event, lambda: self.said.append(name), lambda: self.said.append(f"no {name}"))


@pytest.fixture
def world():
    return World()


def test_a_call_is_made_when_its_event_is_done_and_not_before(world):
    world.machine.is_stalled = True
    world.add("a")
    world.add("b")
    assert world.gate.poll() > world.now
    assert world.said == []
    world.machine.is_stalled = False
    assert world.gate.poll() is None
    assert world.said == ["a", "b"]
    assert world.gpu.read(world.cache) == b"b".ljust(16)


def test_an_event_that_is_done_already_costs_no_wait(world):
    world.add("a")
    assert world.said == ["a"]


def test_a_model_that_hangs_ends_the_wait_by_its_deadline(world, caplog):
    world.machine.is_stalled = True
    world.add("a")
    world.now += LIMIT_S / 2
    world.add("b")
    world.now += LIMIT_S / 2
    world.gate.poll()
    assert world.said == ["no a"]
    world.machine.is_stalled = False
    world.gate.poll()
    assert world.said == ["no a", "b"]
    assert [r.levelno for r in caplog.records] == [logging.ERROR]


def test_a_gpu_that_fails_fails_every_call_that_waits(world, caplog):
    world.machine.is_stalled = True
    world.add("a")
    world.add("b")
    world.machine.broken = "an illegal memory access was encountered"
    assert world.gate.poll() is None
    assert world.said == ["no a", "no b"]
    assert "illegal memory access" in caplog.text

"""The state machines under faults: at every step of a transfer, and in random walks.

Checked all the way by the simulation: no landing is given back while a write may land in it.
Checked at the end: every transfer is over, all blocks, bytes and leases are back, and what D
adopted is what P computed, byte by byte.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.kv.kvfakes import LAYOUT
from tests.kv.kvsim import Sent, World
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.settings import KvLimits, KvSettings
from xpyd_kv.values import Landed, NoKv

UNIT = LAYOUT.bytes_per_block
SETTINGS = KvSettings(frames=FrameLimits(group_bytes=1))
STORES = [
    StoreLimits(),
    StoreLimits(1.0, 100 * UNIT, 0),
    StoreLimits(1.0, 0, 100 * UNIT),
    StoreLimits(1.0, 0, 0),
    StoreLimits(0.6, 4 * UNIT, 6 * UNIT),
]


class Walk:
    """One transfer as a list of atomic steps, in the order in which they would happen."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sent = world.prompt(10, chunks=[6, 4])
        self.answer: object = None
        world.expect(self.sent)
        world.offer(self.sent)
        self.sources: list[Callable[[], bool]] = [
            self._admit,
            self._forward,
            lambda: self._calls("P"),
            lambda: self._calls("D"),
            self._dial,
            lambda: world.step_control("D"),
            lambda: world.step_control("P"),
            world.step_data,
            self._poll,
        ]

    def step(self) -> bool:
        """The first thing that can move moves."""
        return any(source() for source in self.sources)

    def _admit(self) -> bool:
        if self.answer is None:
            answer = self.world.admit(self.sent)
            if isinstance(answer, Landed | NoKv):
                self.answer = answer
                return True
        return False

    def _forward(self) -> bool:
        if self.sent.chunks and self.world.link is not None:
            self.world.forward(self.sent)
            return True
        return False

    def _calls(self, name: str) -> bool:
        endpoint = self.world.endpoints[name]
        if not endpoint.calls:
            return False
        endpoint.calls.popleft()()
        endpoint.tick()
        return True

    def _dial(self) -> bool:
        moved = bool(self.world.dialling)
        self.world.dial()
        return moved

    def _poll(self) -> bool:
        self.world.producer.poll(self.world.clock.now)
        self.world.consumer.poll(self.world.clock.now)
        return any(e.calls for e in self.world.endpoints.values())

    def end(self) -> None:
        """Let it come to its end, whatever happened."""
        world, sent = self.world, self.sent
        world.settle()
        while sent.chunks:
            world.forward(sent)
            world.settle()
        world.finish_request(sent)
        self._admit()
        for _ in range(30):
            if self.answer is not None:
                break
            world.pass_time(1)
            self._admit()
        if isinstance(self.answer, Landed):
            world.take_over(sent, self.answer)
        world.settle()
        world.pass_time(2 * 30 + 1)
        world.assert_nothing_is_left()
        assert not world.endpoints["P"].handler.session.open_transfers  # type: ignore[attr-defined]
        assert not world.endpoints["D"].handler.session.open_transfers  # type: ignore[attr-defined]


def steps_of_a_transfer(store: StoreLimits) -> int:
    walk = Walk(World(settings=SETTINGS, store=store))
    count = 0
    while walk.step():
        count += 1
    assert isinstance(walk.answer, Landed)
    walk.end()
    return count


def hang_up(walk: Walk) -> None:
    walk.world.hang_up()


def cancel_at_p(walk: Walk) -> None:
    walk.world.producer.cancel(walk.sent.key, "aborted")


def forget_at_d(walk: Walk) -> None:
    walk.world.consumer.forget(walk.sent.key)
    walk.answer = walk.answer or NoKv("forgotten")


def cancel_at_both(walk: Walk) -> None:
    cancel_at_p(walk)
    forget_at_d(walk)


def release_at_d(walk: Walk) -> None:
    walk.world.consumer.release(walk.sent.key.uuid, walk.world.clock.now)


def silence(walk: Walk) -> None:
    """Nothing moves for a long time, then all of it at once."""
    walk.world.pass_time(20, settle=False)


def repeat_control(walk: Walk) -> None:
    walk.world.step_control("D", twice=True)
    walk.world.step_control("P", twice=True)


def overtake(walk: Walk) -> None:
    while walk.world.step_control("D", overtake=True):
        pass


def corrupt_a_frame(walk: Walk) -> None:
    walk.world.read_frame(corrupt=True)


FAULTS = [
    hang_up,
    cancel_at_p,
    forget_at_d,
    cancel_at_both,
    release_at_d,
    silence,
    repeat_control,
    overtake,
    corrupt_a_frame,
]


@pytest.mark.parametrize("store", STORES[:4], ids=["direct", "buffer", "pool", "deferred"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_at_any_step_of_a_transfer_ends_it_cleanly(
    store: StoreLimits, fault: Callable[[Walk], None]
) -> None:
    for at in range(steps_of_a_transfer(store) + 1):
        walk = Walk(World(settings=SETTINGS, store=store))
        for _ in range(at):
            walk.step()
        fault(walk)
        walk.end()


@pytest.mark.parametrize("fault", [repeat_control, overtake, corrupt_a_frame])
def test_what_the_network_may_do_costs_no_transfer(fault: Callable[[Walk], None]) -> None:
    for at in range(steps_of_a_transfer(STORES[0]) + 1):
        walk = Walk(World(settings=SETTINGS))
        for _ in range(at):
            walk.step()
        fault(walk)
        walk.end()
        assert isinstance(walk.answer, Landed), at


class Chaos:
    """Many prompts, random order of everything, random faults."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.world = World(
            p_blocks=40,
            d_blocks=rng.choice([16, 40]),
            settings=KvSettings(
                limits=KvLimits(max_transfers=rng.choice([3, 4096])),
                frames=FrameLimits(rng.choice([1, 200, 10**6]), rng.choice([64, 200, 10**6])),
            ),
            store=rng.choice(STORES),
        )
        self.running: list[Sent] = []
        self.waiting: list[Sent] = []
        self.adopted: list[Sent] = []
        self.moves: list[tuple[float, Callable[[], object]]] = [
            (0.7, self.new_prompt),
            (2.0, self.forward),
            (1.5, self.admit),
            (6.0, lambda: self.call("P")),
            (6.0, lambda: self.call("D")),
            (1.0, lambda: self.world.dial(ok=rng.random() < 0.9)),
            (4.0, lambda: self.world.step_control("D", twice=self.rare(), overtake=self.rare())),
            (4.0, lambda: self.world.step_control("P", twice=self.rare())),
            (8.0, lambda: self.world.step_data(corrupt=self.rare(), overtake=self.rare())),
            (4.0, self.poll),
            (0.1, lambda: self.world.pass_time(rng.choice([0.1, 0.5, 1, 12]), settle=False)),
            (0.04, self.world.hang_up),
            (0.1, self.cancel),
            (0.1, self.preempt),
            (0.1, self.forget),
            (0.05, self.release),
        ]

    def rare(self) -> bool:
        return self.rng.random() < 0.08

    def call(self, name: str) -> None:
        endpoint = self.world.endpoints[name]
        if endpoint.calls:
            endpoint.calls.popleft()()
            endpoint.tick()
        self.world.close_what_was_asked()

    def poll(self) -> None:
        self.world.producer.poll(self.world.clock.now)
        self.world.consumer.poll(self.world.clock.now)

    def new_prompt(self) -> None:
        tokens = self.rng.randint(1, 30)
        if self.world.p_pool.num_free < 8:
            return
        chunks: list[int] = []
        cached = self.rng.choice([0, 0, (tokens - 1) // 4 * 4])
        while sum(chunks) < tokens - cached:
            chunks.append(self.rng.randint(1, tokens - cached - sum(chunks)))
        sent = self.world.prompt(tokens, chunks=chunks, cached_tokens=cached)
        if self.adopted and self.rng.random() < 0.5:
            shared = self.rng.choice(self.adopted).ids[:12]
            sent.ids = (*shared, *sent.ids[len(shared) :])[:tokens]
        self.world.offer(sent)
        self.running.append(sent)
        if self.rng.random() < 0.8:
            self.world.expect(sent, wait_s=self.rng.choice([1, 10]))
            self.waiting.append(sent)

    def forward(self) -> None:
        if self.running:
            sent = self.rng.choice(self.running)
            self.world.forward(sent, between=lambda layer: self.rare() and self.call("P"))
            if not sent.chunks:
                self.running.remove(sent)
                self.world.finish_request(sent)

    def admit(self) -> None:
        if self.waiting:
            sent = self.rng.choice(self.waiting)
            answer = self.world.admit(sent)
            if isinstance(answer, Landed):
                self.adopted.append(sent)
                self.world.take_over(sent, answer)
                self.world.d_pool.remember(sent.ids, answer.block_ids)
            if isinstance(answer, Landed | NoKv):
                self.waiting.remove(sent)

    def cancel(self) -> None:
        if self.running:
            self.world.producer.cancel(self.rng.choice(self.running).key, "aborted")

    def preempt(self) -> None:
        if not self.running:
            return
        sent = self.rng.choice(self.running)
        self.world.producer.cancel(sent.key, "preempted")
        if self.world.producer.is_settled(sent.key):
            left = len(sent.ids)
            sent.chunks, sent.computed, sent.cached_tokens = [left], 0, 0
            self.world.offer(sent)

    def forget(self) -> None:
        if self.waiting:
            sent = self.waiting.pop(self.rng.randrange(len(self.waiting)))
            self.world.consumer.forget(sent.key)

    def release(self) -> None:
        if self.waiting:
            self.world.consumer.release(
                self.rng.choice(self.waiting).key.uuid, self.world.clock.now
            )

    def run(self, steps: int) -> None:
        weights = [weight for weight, _ in self.moves]
        for _, move in self.rng.choices(self.moves, weights, k=steps):
            move()
        self.end()

    def end(self) -> None:
        world = self.world
        while self.running:
            self.forward()
        for _ in range(200):
            world.settle()
            for sent in list(self.waiting):
                answer = world.admit(sent)
                if isinstance(answer, Landed):
                    self.adopted.append(sent)
                    world.take_over(sent, answer)
                if isinstance(answer, Landed | NoKv):
                    self.waiting.remove(sent)
            if not self.waiting:
                break
            world.pass_time(1)
        assert not self.waiting, "a request waits past its deadline"
        world.settle()
        world.pass_time(2 * 30 + 1)
        world.assert_nothing_is_left()
        for endpoint in world.endpoints.values():
            assert not endpoint.handler.session.open_transfers  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(60))
def test_random_walks_leave_nothing_behind(seed: int) -> None:
    Chaos(seed).run(1000)


def test_the_walks_do_land_kv() -> None:
    landed = 0
    for seed in range(1000, 1010):
        chaos = Chaos(seed)
        chaos.run(1000)
        landed += len(chaos.adopted)
    assert landed > 10


@pytest.mark.soak
def test_many_more_random_walks() -> None:
    for seed in range(10_000, 13_000):
        Chaos(seed).run(1000)

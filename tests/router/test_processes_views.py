"""Workers know what the parent knows: the same fleet, the same health, whenever they came."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

import msgspec
import pytest

from xpyd_core.messages import Heartbeat, ReplicaBeat
from xpyd_router.fleet.health import HealthRules, ProbeResult
from xpyd_router.fleet.instances import Instance, InstanceKey
from xpyd_router.fleet.introductions import PairFound
from xpyd_router.fleet.poison import Break, fingerprint
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView
from xpyd_router.processes.events import (
    Failed,
    PoisonFound,
    Splitter,
    Succeeded,
    ToParent,
    ToWorker,
    frame,
    to_worker,
)
from xpyd_router.processes.parent_view import ParentView
from xpyd_router.processes.shared_loads import Rows, SharedLoadTable, size_bytes
from xpyd_router.processes.worker_view import WorkerView

RULES = HealthRules(slow_start_s=5.0)


class World:
    """A parent and workers on one clock. What a worker says reaches the parent at once."""

    def __init__(self, *, only_verified: bool = False) -> None:
        self.now_s = 1000.0
        self.only_verified = only_verified
        self.parent = ParentView(self.registry(), self.clock, RULES, self.publish, self)
        self.workers: list[WorkerView] = []
        self.published = 0
        self.pings = self.taken = 0
        """Of the parent, and up to which workers have taken them."""
        self.rows: list[Rows] = []

    def ping(self) -> int:
        self.pings += 1
        return self.pings

    def have_taken(self, ping: int) -> bool:
        return self.taken >= ping

    def requests_at(self, slot: int) -> int:
        return sum(rows.total(slot).requests for rows in self.rows)

    def clock(self) -> float:
        return self.now_s

    def publish(self, event: ToWorker) -> None:
        self.published += 1
        for worker in self.workers:
            tell(worker, event)

    def worker(self) -> WorkerView:
        self.rows.append(Rows(memoryview(bytearray(size_bytes(1))), 1))
        loads = SharedLoadTable(self.rows[-1], 0)

        def hear(event: ToParent) -> None:
            for stood in self.parent.take(event):
                tell(made, stood)

        made = WorkerView(
            *(self.registry(), self.clock, loads, RULES),
            secret=self.parent.secret,
            send=hear,
        )
        for event in self.parent.present():
            tell(made, event)
        self.workers.append(made)
        return made

    def registry(self) -> Registry:
        return Registry(period_s=3.0, missed_beats=3, only_verified=self.only_verified)


def tell(worker: WorkerView, event: ToWorker) -> None:
    for body in Splitter().feed(frame(event)):
        worker.take(to_worker.decode(body))


def shown(fleet: FleetView) -> object:
    """All that may differ between two views of one fleet."""
    weights = fleet.weights()
    return (
        [
            (i.key, i.beat, i.standing, i.is_cordoned, i.is_signed, i.expires_at_s, i.kv_text)
            for i in fleet.instances
        ],
        [rounded(fleet, i.key) for i in fleet.instances],
        {i.key: round(weights.get(i.key, 1.0), 6) for i in fleet.instances},
        [fleet.is_lost(i.key) for i in fleet.instances],
        fleet.snapshot.is_ready,
        fleet.snapshot.models,
        [
            ([p.place for p in group.prefill], [d.place for d in group.decode])
            for group in fleet.snapshot.of_model("m").groups
        ],
        fleet.pair_problems(),
    )


def rounded(fleet: FleetView, key: InstanceKey) -> object:
    found = fleet.report(key)
    return (found.cause, round(found.ejected_s, 1), found.breaker, round(found.open_s, 1))


def beat(number: int, incarnation: int = 0, **other: object) -> Heartbeat:
    kind = "P" if number % 2 else "D"
    return Heartbeat(
        type=kind,
        http_address=f"127.0.0.1:{100 + number}",
        zmq_address=f"127.0.0.1:{2000 + 10 * number}",
        incarnation=str(incarnation),
        models=("m",),
        compatibility="k",
        continuation=1,
        **other,  # pyright: ignore[reportArgumentType] - named by the tests
    )


class History:
    """What happens to a fleet by chance."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.draw = random.Random(seed)
        self.incarnations = [0] * 5
        self.sent_us = 1
        self.met: list[tuple[float, Break, Break]] = []
        """Breaks of workers, when they came, and the parent's."""
        self.actions: list[Callable[[], None]] = [
            *(self.beat, self.beat, self.fail, self.transfer),
            *(self.serve, self.probe, self.wait, self.prove),
        ]

    def step(self) -> None:
        """One event."""
        (self.cordon if self.draw.random() < 0.02 else self.draw.choice(self.actions))()
        self.world.parent.tick()

    def one(self, of: FleetView) -> Instance | None:
        return self.draw.choice(of.instances) if of.instances else None

    def beat(self) -> None:
        self.sent_us += 1
        number = self.draw.randrange(5)
        if self.draw.random() < 0.1:
            self.incarnations[number] += 1
        state = self.draw.choices(("Ready", "Draining", "Gone"), (20, 1, 1))[0]
        of = self.incarnations[number]
        signed_age_s = self.draw.choice((0.0, 1.0, None))
        said = beat(number, of, sent_us=self.sent_us, state=state, running=number)
        if number > 2:
            said = msgspec.structs.replace(said, replicas=self.replicas(number))
        self.world.parent.apply(said, signed_age_s)

    def replicas(self, number: int) -> tuple[ReplicaBeat, ...]:
        ports = (2000 + 10 * number + at for at in range(self.draw.randrange(4)))
        serving, draining = self.draw.choices((1, 0), (4, 1))[0], self.draw.choice((0, 0, 0, 1))
        return tuple(
            ReplicaBeat(zmq_address=f"127.0.0.1:{at}", serving=serving, draining=draining)
            for at in ports
        )

    def fail(self) -> None:
        worker = self.draw.choice(self.world.workers)
        if (found := self.one(worker)) is not None:
            cause = self.draw.choice(("connect", "reset", "lost", "status", "timeout", "refused"))
            met = worker.failed(found, cause, b"%d" % self.draw.randrange(4))
            theirs = last_break(self.world.parent, found.key)
            if met is not None and theirs is not None:
                self.met = [*self.met[-99:], (self.world.now_s, met, theirs)]

    def transfer(self) -> None:
        worker = self.draw.choice(self.world.workers)
        p, d = ([i for i in worker.instances if i.beat.type == kind] for kind in ("P", "D"))
        if p and d:
            worker.transfer_failed(self.draw.choice(p), self.draw.choice(d), b"x")

    def serve(self) -> None:
        worker = self.draw.choice(self.world.workers)
        if (found := self.one(worker)) is not None:
            worker.began([found])
            worker.succeeded(found)

    def probe(self) -> None:
        if (found := self.one(self.world.parent)) is not None:
            result = self.draw.choices(("ok", "connect", "timeout", "status"), (6, 1, 3, 1))[0]
            self.world.parent.probed(found, result, self.world.now_s)

    def wait(self) -> None:
        self.world.now_s += self.draw.choice((0.1, 1.0, 4.0))
        self.world.parent.expire()

    def prove(self) -> None:
        known = self.world.parent.instances
        p, d = ([i for i in known if i.beat.type == kind] for kind in ("P", "D"))
        if p and d:
            found = self.draw.choice((PairFound(), PairFound(), PairFound("timeout", "late")))
            pair = self.draw.choice(self.draw.choice(p).places), self.draw.choice(d).places[-1]
            self.world.parent.pair_found(*pair, found)

    def cordon(self) -> None:
        if (found := self.one(self.world.parent)) is not None:
            self.world.parent.cordon(found.key, is_cordoned=self.draw.random() < 0.5)


def last_break(fleet: FleetView, key: InstanceKey) -> Break | None:
    return fleet._health.poison._last.get(key)  # pyright: ignore[reportPrivateUsage] - both views'


@pytest.mark.parametrize("seed", range(12))
def test_after_any_history_all_workers_show_what_the_parent_shows(seed: int) -> None:
    world = World(only_verified=seed % 2 == 1)
    history = History(world, seed)
    world.worker()
    world.worker()
    fates: set[str] = set()
    for step in range(600):
        history.step()
        if step == 300:
            world.worker()
        for number, worker in enumerate(world.workers):
            assert shown(worker) == shown(world.parent), (step, number)
        for at_s, met, theirs in history.met:
            assert met.fate == theirs.fate, (step, at_s)
        fates |= {theirs.fate for _, _, theirs in history.met}
    assert fates == {"open", "dead", "alive"}
    assert world.published > 200


def test_an_instance_is_out_of_its_own_worker_before_the_parent_answers() -> None:
    world = World()
    world.parent.apply(beat(0))
    worker = world.worker()
    heard: list[ToParent] = []
    worker._send = heard.append  # pyright: ignore[reportPrivateUsage] - the parent is slow
    [found] = worker.instances
    worker.failed(found, "connect", b"x")
    assert [one.standing for one in worker.instances] == ["Ejected"]
    [event] = heard
    assert isinstance(event, Failed)
    assert [one.standing for one in world.parent.instances] == ["Good"]


def test_a_provisional_ejection_ends_where_the_parent_does_not_share_it() -> None:
    world = World()
    worker = world.worker()
    world.parent.apply(beat(0, state="Draining", sent_us=1))
    [found] = worker.instances
    # Of one that drains no health is kept: the parent says that it stands well.
    worker.failed(found, "reset", b"x")
    world.parent.apply(beat(0, sent_us=2))
    assert [one.standing for one in worker.instances] == ["Good"]


async def test_a_request_that_one_worker_had_convicted_all_refuse() -> None:
    world = World()
    worker, other = world.worker(), world.worker()
    for number in range(2):
        world.parent.apply(beat(2 * number))
    breaks = kill(world, worker, worker.instances)
    assert other.refused_s(b"poison") == 0.0
    assert await worker.convicts(breaks, b"poison")
    late = world.worker()
    for one in (worker, other, late):
        assert one.refused_s(b"poison") == pytest.approx(300.0)
        assert one.refused_s(b"another") == 0.0
    world.now_s += 301.0
    assert late.refused_s(b"poison") == 0.0
    assert not late.refused


def kill(world: World, worker: WorkerView, instances: Iterable[Instance]) -> list[Break]:
    """They die under a request of `worker`."""
    breaks: list[Break] = []
    for found in instances:
        met = worker.failed(found, "reset", b"poison")
        assert met is not None
        breaks.append(met)
        world.parent.probed(found, "connect", world.now_s)
    return breaks


def test_a_body_that_one_worker_serves_after_all_is_refused_by_none() -> None:
    world = World()
    worker, other = world.worker(), world.worker()
    heard = world.published
    worker.acquit(b"nobody refuses this")
    assert world.published == heard
    world.parent.take(PoisonFound(fingerprint(b"poison", world.parent.secret)))
    other.acquit(b"poison")
    assert not worker.refused
    assert not other.refused
    assert not world.parent.refused


@pytest.mark.parametrize(("result", "is_guilty"), [("connect", True), ("ok", False)])
async def test_a_worker_waits_for_the_probe_that_tells_what_broke_off(
    result: ProbeResult, is_guilty: bool
) -> None:
    world = World()
    worker = world.worker()
    for number in range(2):
        world.parent.apply(beat(2 * number))
    first, second = worker.instances
    breaks = kill(world, worker, [first])
    met = worker.failed(second, "reset", b"poison")
    assert met is not None
    judging = asyncio.create_task(worker.convicts([*breaks, met], b"poison"))
    await asyncio.sleep(0)
    assert not judging.done()
    world.parent.probed(second, result, world.now_s)
    async with asyncio.timeout(1.0):  # the rules allow it 2.5 s without the parent's word
        assert await judging is is_guilty
    assert bool(world.parent.refused) is is_guilty


def test_a_call_that_ends_because_its_instance_was_replaced_met_its_death() -> None:
    world = World()
    worker = world.worker()
    world.parent.apply(beat(0))
    [found] = worker.instances
    met: list[Break | None] = []
    worker.on_lost(lambda _: met.append(worker.failed(found, "lost", b"x")))
    world.parent.apply(beat(0, incarnation="the next", sent_us=1))
    assert {one and one.fate for one in met} == {"dead"}


def test_a_call_that_ends_because_its_instance_is_silent_met_no_death() -> None:
    world = World()
    worker = world.worker()
    world.parent.apply(beat(0))
    [found] = worker.instances
    met: list[Break | None] = []
    worker.on_lost(lambda _: met.append(worker.failed(found, "lost", b"x")))
    world.now_s += 60.0
    world.parent.expire()
    assert set(met) == {None}


def test_a_new_worker_knows_who_died_lately() -> None:
    world = World()
    world.parent.apply(beat(0))
    [found] = world.parent.instances
    world.parent.probed(found, "connect", world.now_s)
    met = world.worker().failed(found, "reset", b"x")
    assert met is not None
    assert met.fate == "dead"


def test_a_new_worker_knows_since_when_calls_break_off() -> None:
    world = World()
    world.parent.apply(beat(0))
    worker = world.worker()
    [found] = worker.instances
    worker.failed(found, "reset", b"x")
    world.now_s += 8.0
    late = world.worker()
    met = late.failed(found, "reset", b"x")
    assert met is not None
    world.now_s += 1.0
    world.parent.probed(found, "ok", world.now_s)
    world.now_s += 4.0
    # Too late for a restart that the probe did not tell: another matter than what `met`.
    world.parent.probed(found, "connect", world.now_s)
    assert met.fate == "alive"


def test_transfers_that_fail_in_several_workers_count_together() -> None:
    world = World()
    workers = [world.worker(), world.worker()]
    for number in range(3):
        world.parent.apply(beat(number))
    d, p, other = sorted(world.parent.instances, key=lambda one: one.name)
    assert (d.beat.type, p.beat.type, other.beat.type) == ("D", "P", "D")
    # No worker sees more than one partner fail: together they see what P's failures share.
    for number in range(3):
        for worker, partner in zip(workers, (d, other), strict=True):
            worker.transfer_failed(p, partner, b"%d" % number)
    for worker in workers:
        standings = {one.name: one.standing for one in worker.instances}
        assert standings == {d.name: "Good", p.name: "Open", other.name: "Good"}


def test_only_calls_of_instances_that_failed_lately_are_told_to_the_parent() -> None:
    world = World()
    world.parent.apply(beat(0))
    world.parent.apply(beat(2))
    worker = world.worker()
    first, second = worker.instances
    worker.failed(first, "status", b"x")
    heard: list[ToParent] = []
    worker._send = heard.append  # pyright: ignore[reportPrivateUsage] - to count what is told
    worker.succeeded(first)
    worker.succeeded(second)
    assert heard == [Succeeded(first.key)]


def test_a_router_acknowledges_a_drain_when_every_worker_has_its_beat_and_counts_all_calls() -> (
    None
):
    world = World()
    workers = [world.worker(), world.worker()]
    world.parent.apply(beat(1))
    (instance,) = world.parent.instances
    for worker in workers:
        worker.load(instance.key).begin(10)
    world.parent.apply(beat(1, state="Draining"))
    assert world.parent.in_flight(instance.places) is None
    assert world.pings == 1
    assert world.parent.in_flight(instance.places) is None
    assert world.pings == 1, "one question is enough"
    world.taken = 1
    assert world.parent.in_flight(instance.places) == 2
    workers[0].load(instance.key).end(10)
    assert world.parent.in_flight(instance.places) == 1


def test_each_replica_that_leaves_waits_for_all_processes_also_the_second_of_a_number() -> None:
    world = World()
    two = tuple(ReplicaBeat(zmq_address=f"127.0.0.1:{port}") for port in (2000, 2002))
    leaving = (two[0], msgspec.structs.replace(two[1], draining=1))
    worker = world.worker()
    for times in (1, 2):
        for sent_us, replicas in enumerate((two, leaving), 10 * times):
            world.parent.apply(beat(0, sent_us=sent_us, replicas=replicas))
        [instance] = world.parent.instances
        worker.load(instance.places[1]).begin(10)
        assert world.parent.in_flight(instance.places[1:]) is None
        assert world.pings == times
        world.taken = times
        assert world.parent.in_flight(instance.places[1:]) == 1
        worker.load(instance.places[1]).end(10)
        assert world.parent.in_flight(instance.places[1:]) == 0
        world.parent.apply(beat(0, sent_us=10 * times + 5, replicas=two[:1]))


def test_a_replica_that_stays_after_all_waits_for_all_processes_when_it_leaves_again() -> None:
    world = World()
    two = tuple(ReplicaBeat(zmq_address=f"127.0.0.1:{port}") for port in (2000, 2002))
    leaving = (two[0], msgspec.structs.replace(two[1], draining=1))
    for times in (1, 2):
        for sent_us, replicas in enumerate((two, leaving), 10 * times):
            world.parent.apply(beat(0, sent_us=sent_us, replicas=replicas))
        [instance] = world.parent.instances
        assert world.parent.in_flight(instance.places[1:]) is None
        assert world.pings == times
        world.taken = times
        assert world.parent.in_flight(instance.places[1:]) == 0


def test_what_all_replicas_have_in_flight_counts_for_their_instance() -> None:
    world = World()
    two = tuple(ReplicaBeat(zmq_address=f"127.0.0.1:{port}") for port in (2000, 2002))
    world.parent.apply(beat(0, replicas=two))
    workers = [world.worker() for _ in range(2)]
    [instance] = world.parent.instances
    for worker, place in zip(workers, instance.places, strict=True):
        worker.load(place).begin(10)
    world.parent.in_flight(instance.places)
    world.taken = world.pings
    assert world.parent.in_flight(instance.places) == 2
    assert workers[0].requests(instance) == (1, 0)

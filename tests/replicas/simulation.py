"""Replicas in lock step, their coordinator and their front ends, in fast-forward and from a seed.

What decides is the real code; loops, collectives, channels and models are played here. A channel
keeps its order, as a TCP connection does, and has delays of its own, so that messages of different
channels overtake each other. What is in a channel is lost when it is closed. `Faults` says what
goes wrong. `run` raises Hang where nothing more happens although something is open.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from xpyd_worker.replicas.choice import FrontEnd
from xpyd_worker.replicas.coordinator import PUBLISH_S, Coordinator
from xpyd_worker.replicas.waves import CHECK_EVERY, ReplicaWave, Report, Vote

T = TypeVar("T")
_BATCH = 4
_PATIENCE_S = 12.0
"""Longer than any fault lasts: what makes no progress for so long never will."""
_SILENCE_S = 15.0
"""Now and then no request comes for so long: the next one would set free replicas that hang."""


class HangError(AssertionError):
    """Requests or waves are open, and nothing changes any more."""


class LockStepError(AssertionError):
    """Replicas met in different collectives, or computed what the rule does not say."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong, and how often (a share of messages, or times per 1000 requests)."""

    lost_starts: float = 0.0
    lost_reports: float = 0.0
    killed_replicas: float = 0.0
    killed_coordinators: float = 0.0
    stalls: float = 0.0
    slow_replica: float = 1.0
    """How many times as long replica 0 takes for everything."""


@dataclass(frozen=True)
class Parts:
    """The classes under test; tests put defects in their place."""

    wave: Callable[[int], ReplicaWave] = ReplicaWave
    coordinator: Callable[[int], Coordinator] = Coordinator
    front_end: Callable[..., FrontEnd] = FrontEnd


@dataclass
class Request:
    """One request; KV of some comes only `kv_at`, and none of its tokens can be computed before."""

    number: int
    tokens: int
    kv_at: float = 0.0
    answers: int = 0


@dataclass
class Counted:
    """What a run has seen."""

    forwards: int = 0
    dummies: int = 0
    waves: int = 0
    answered: int = 0
    retried: int = 0
    fell: int = 0
    coordinators: int = 0


class World:
    """The clock, what is to happen, and channels between the parties."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._arrives: dict[tuple[object, object], float] = {}
        self._epochs: dict[object, int] = {}

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def send(self, source: object, target: object, what: Callable[[], None]) -> None:
        """`what` happens at `target`, unless one of the two closes its channels before."""
        rng = self.rng
        delay = rng.choice([0.0001, 0.001, rng.random() * 0.02, rng.random() * 0.15])
        when = self._arrives[source, target] = max(
            self.now + delay, self._arrives.get((source, target), 0.0)
        )
        epochs = self._epochs.get(source), self._epochs.get(target)

        def arrive() -> None:
            if epochs == (self._epochs.get(source), self._epochs.get(target)):
                what()

        self.at(when, arrive)

    def close(self, party: object) -> None:
        """All channels of `party` end, with what is in them."""
        self._epochs[party] = self._epochs.get(party, 0) + 1

    def step(self) -> None:
        self.now, _, what = heapq.heappop(self._events)
        what()


class Replica:
    """One replica's loop over a fake model: one token per request and forward."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.rank = rank
        self.wave = simulation.parts.wave(rank)
        self.inbox: list[Callable[[], None]] = []
        self.requests: dict[int, Request] = {}
        self.has_finished = False
        self.is_blocked = False
        self.has_ended = False
        self.forwards = 0
        self.stalled_until = 0.0
        self._simulation = simulation
        self._world = simulation.world
        self._is_alive = True

    def kill(self) -> None:
        self._is_alive = False

    def put(self, item: Callable[[], None]) -> None:
        self.inbox.append(item)
        if not self.is_blocked:
            self.turn()

    def report(self, *, is_now: bool = True) -> None:
        if is_now and self._is_alive:
            running = min(_BATCH, len(self.requests))
            waiting = len(self.requests) - running
            self._simulation.hear(self, self.wave.report(waiting=waiting, running=running))

    def start(self, wave: int) -> None:
        self.put(lambda: self.report(is_now=self.wave.take_start(wave)))

    def add(self, request: Request, wave: int) -> None:
        def take() -> None:
            self.requests[request.number] = request
            self.report(is_now=self.wave.take_request(wave))

        self.put(take)

    def end(self) -> None:
        def leave() -> None:
            self.has_ended = True

        self.put(leave)

    def turn(self) -> None:
        self.is_blocked = False
        if not self._is_alive or self.has_ended:
            return
        items, self.inbox = self.inbox, []
        for item in items:
            item()
        plan = self.wave.plan(has_unfinished=bool(self.requests), has_finished=self.has_finished)
        if plan.steps:
            self.has_finished = False
        if not plan.in_wave or self.has_ended:
            return
        now = self._world.now
        able = [one for one in self.requests.values() if one.kv_at <= now] if plan.steps else []
        batch = able[:_BATCH]
        self.is_blocked = True
        self._after_pause(
            lambda: self._simulation.forward.join(self.rank, batch, lambda _: self._computed(batch))
        )

    def _after_pause(self, what: Callable[[], None]) -> None:
        slow = self._simulation.faults.slow_replica if self.rank == 0 else 1.0
        until = max(self.stalled_until, self._world.now + 0.0005 * slow)
        self._world.at(until, lambda: what() if self._is_alive else None)

    def _computed(self, batch: list[Request]) -> None:
        self.forwards += 1
        for request in batch:
            request.tokens -= 1
            if not request.tokens:
                del self.requests[request.number]
                self.has_finished = True
                self._simulation.answer(self.rank, request)
        if self.wave.end_iteration():
            vote = self.wave.vote(has_unfinished=bool(self.requests))
            self._after_pause(lambda: self._simulation.check.join(self.rank, vote, self._checked))
        else:
            self.turn()

    def _checked(self, votes: list[Vote]) -> None:
        result = Vote(*map(max, zip(*votes, strict=True)))
        self.report(is_now=self.wave.settle(result))
        self.turn()


@dataclass
class Meeting(Generic[T]):
    """A collective: all replicas come, each with its part, and go on with all parts."""

    simulation: Simulation
    seconds: float
    parts: dict[int, T] = field(default_factory=dict[int, T])
    goes_on: list[Callable[[list[T]], None]] = field(
        default_factory=list[Callable[[list[T]], None]]
    )

    def join(self, rank: int, part: T, then: Callable[[list[T]], None]) -> None:
        self.parts[rank] = part
        self.goes_on.append(then)
        simulation = self.simulation
        if simulation.forward.parts and simulation.check.parts:
            raise LockStepError("some replicas are in a forward, some in the finish check")
        if len(self.parts) < len(simulation.replicas):
            return
        parts, goes_on = [self.parts[rank] for rank in sorted(self.parts)], self.goes_on
        self.parts, self.goes_on = {}, []
        simulation.progress_s = simulation.world.now
        if self is simulation.forward:
            simulation.count_forward([bool(one) for one in parts])
        group = simulation.group

        def end() -> None:
            for then in goes_on if group == simulation.group else ():
                then(parts)
            if self is simulation.check and group == simulation.group:
                simulation.count_check()

        simulation.world.after(self.seconds, end)


class Simulation:
    """All parties of one run."""

    def __init__(
        self,
        seed: int,
        replicas: int,
        *,
        front_ends: int = 2,
        faults: Faults | None = None,
        parts: Parts | None = None,
    ) -> None:
        self.world = World(seed)
        self.faults = faults or Faults()
        self.parts = parts or Parts()
        self.counted = Counted()
        self.group = 0
        self._size = replicas
        self.progress_s = 0.0
        self._tail = 0
        self._has_computed = False
        self.open: dict[int, tuple[Request, int]] = {}
        """Requests that were sent and not answered, with the replica that each is on."""
        self._held: list[Request] = []
        self._to_come = 0
        self._is_stopping = False
        self.front_ends = [
            self.parts.front_end(replicas, number=number, front_ends=front_ends)
            for number in range(front_ends)
        ]
        self.coordinator: Coordinator | None = self.parts.coordinator(replicas)
        self._begin_group()
        self._tick()

    def _begin_group(self) -> None:
        self.replicas = [Replica(self, rank) for rank in range(self._size)]
        self.forward: Meeting[list[Request]] = Meeting(self, 0.002)
        self.check: Meeting[Vote] = Meeting(self, 0.0005)
        self._tail, self._has_computed = 0, False
        self.has_fallen = False
        for replica in self.replicas:
            replica.report()

    # --- what is watched

    def count_forward(self, computes: list[bool]) -> None:
        """One forward of all replicas: it must have a request somewhere, or be of a wave's tail."""
        self.counted.forwards += 1
        self.counted.dummies += computes.count(False)
        unfinished = any(one.requests for one in self.replicas)
        self._has_computed = self._has_computed or any(computes)
        self._tail = 0 if unfinished else self._tail + 1
        if self._tail > CHECK_EVERY - self._has_computed:
            raise LockStepError(f"{self._tail} forwards with no request anywhere")

    def count_check(self) -> None:
        if len({replica.forwards for replica in self.replicas}) > 1:
            raise LockStepError("replicas made different numbers of forwards")
        if not any(replica.wave.is_running for replica in self.replicas):
            self.counted.waves += 1
            self._tail, self._has_computed = 0, False

    # --- messages

    def hear(self, replica: Replica, report: Report) -> None:
        if self.world.rng.random() < self.faults.lost_reports:
            return
        rank = replica.rank

        def take() -> None:
            if self.coordinator is not None:
                self._start(self.coordinator.heard(rank, report))

        self.world.send(("replica", rank), "coordinator", take)

    def _start(self, ranks: Sequence[int]) -> None:
        assert self.coordinator is not None, "it has just said whom to start"
        wave = self.coordinator.wave
        for rank in ranks:
            if self.world.rng.random() >= self.faults.lost_starts:
                replica = self.replicas[rank]
                self.world.send(
                    "coordinator", ("replica", rank), lambda replica=replica: replica.start(wave)
                )

    def _ask(self, number: int, wave: int) -> None:
        def take() -> None:
            if self.coordinator is not None:
                self._start(self.coordinator.asked(wave))

        self.world.send(("front end", number), "coordinator", take)

    def _tick(self) -> None:
        """Each 100 ms: replicas report, the coordinator publishes and starts who is missing."""
        self.world.after(PUBLISH_S, self._tick)
        for replica in () if self.has_fallen else self.replicas:
            if not replica.has_ended:
                replica.report()
        coordinator = self.coordinator
        if coordinator is None:
            return
        self._start(coordinator.missing())
        statistics = coordinator.statistics()
        for number, front_end in enumerate(self.front_ends):
            self.world.send(
                "coordinator",
                ("front end", number),
                lambda front_end=front_end: front_end.take(statistics),
            )
        if self._is_stopping and not (self.open or self._held) and coordinator.may_end():
            for replica in self.replicas:
                self.world.send("coordinator", ("replica", replica.rank), replica.end)

    def submit(self, request: Request) -> None:
        """One front end gets the request, a new one or one that is tried again."""
        if self.has_fallen:
            self._held.append(request)
            return
        number = self.world.rng.randrange(len(self.front_ends))
        front_end = self.front_ends[number]
        rank = front_end.pick()
        if rank is None:  # its statistics are of a time without replicas
            rank = self.world.rng.randrange(self._size)
        wave = front_end.wave
        replica = self.replicas[rank]
        self.open[request.number] = (request, rank)
        self.world.send(
            ("front end", number), ("replica", rank), lambda: replica.add(request, wave)
        )
        if front_end.send(rank):
            self._ask(number, wave)

    def answer(self, rank: int, request: Request) -> None:
        assert self.open.pop(request.number)[1] == rank, "answered by the replica that has it"
        request.answers += 1
        self.counted.answered += 1

    # --- faults

    def fall(self) -> None:
        """A replica dies; later the others are ended, too, all requests are tried again, and new
        replicas come."""
        self.replicas[self.world.rng.randrange(self._size)].kill()

        def end() -> None:
            self.has_fallen = True
            self.group += 1
            self.counted.fell += 1
            for replica in self.replicas:
                replica.kill()
                self.world.close(("replica", replica.rank))
                if self.coordinator is not None:
                    self.coordinator.lost(replica.rank)
            self._held += [request for request, _ in self.open.values()]
            self.open.clear()
            self.world.after(1.0, again)

        def again() -> None:
            self._begin_group()
            held, self._held = self._held, []
            self.counted.retried += len(held)
            for request in held:
                request.tokens = max(1, request.tokens)
                self.submit(request)

        self.world.after(self.world.rng.random() * 3, lambda: None if self.has_fallen else end())

    def lose_coordinator(self) -> None:
        """It dies with all it knows and what was on its way; a new one comes."""
        self.coordinator = None
        self.world.close("coordinator")
        self.counted.coordinators += 1

        def again() -> None:
            if self.coordinator is None:
                self.coordinator = self.parts.coordinator(self._size)

        self.world.after(self.world.rng.random() * 2, again)

    def stall(self) -> None:
        replica = self.world.rng.choice(self.replicas)
        replica.stalled_until = self.world.now + self.world.rng.random() * 5

    def stop(self) -> None:
        """No more requests are taken; replicas end when those that there are have been answered."""
        self._is_stopping = True

    # --- the run

    def _arrivals(self, requests: int) -> None:
        """Bursts and pauses: waves end in between, and requests come in their last moments."""
        rng, when = self.world.rng, 0.0
        self._to_come = requests

        def arrive(request: Request) -> None:
            self._to_come -= 1
            if not self._is_stopping:
                self.submit(request)

        for number in range(requests):
            when += rng.choice([0.0, 0.0005, 0.002, 0.01, 0.06, rng.random() * 0.3])
            when += _SILENCE_S if rng.random() < 0.01 else 0.0
            late = when + rng.random() * 0.3 if rng.random() < 0.05 else 0.0
            request = Request(number, rng.choice([1, 1, 2, 3, 8, 24, 40]), late)
            self.world.at(when, lambda request=request: arrive(request))
        faults = self.faults
        for share, what in (
            (faults.killed_replicas, self.fall),
            (faults.killed_coordinators, self.lose_coordinator),
            (faults.stalls, self.stall),
        ):
            for _ in range(round(share * requests / 1000)):
                self.world.at(rng.random() * when, what)

    def _is_quiet(self) -> bool:
        is_busy = self.open or self._held or self.has_fallen
        return not (is_busy or any(replica.wave.is_running for replica in self.replicas))

    def _is_over(self) -> bool:
        has_ended = all(replica.has_ended for replica in self.replicas)
        if self._is_stopping:
            return self._is_quiet() and has_ended
        return self._is_quiet() and not self._to_come

    def run(self, requests: int, *, stop_at_s: float | None = None) -> Counted:
        """Serve so many requests, and then come to rest."""
        self._arrivals(requests)
        if stop_at_s is not None:
            self.world.at(stop_at_s, self.stop)
        while not self._is_over():
            self.world.step()
            if self._is_quiet() and not self._is_stopping:
                self.progress_s = self.world.now
            if self.world.now > self.progress_s + _PATIENCE_S:
                raise HangError(self.describe())
        return self.counted

    def describe(self) -> str:
        """The state, for a test that failed."""
        replicas = [
            f"replica {one.rank}: {one.wave.report(waiting=len(one.requests), running=0)}, "
            f"{'in a collective' if one.is_blocked else 'waits for input'}"
            for one in self.replicas
        ]
        statistics = self.coordinator and self.coordinator.statistics()
        return f"{len(self.open)} requests open\n" + "\n".join([*replicas, f"{statistics}"])

"""The run: processes, connections between them, one schedule, one source of random numbers."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.kv.simulation.endpoint import SimEndpoint
from tests.kv.simulation.faults import FAULTS, TRICKS
from tests.kv.simulation.invariants import Watch
from tests.kv.simulation.link import Link, Open, Pipe
from tests.kv.simulation.plan import Plan, Strike, address_of
from tests.kv.simulation.prefill import PromptPlan
from tests.kv.simulation.process import Process
from tests.kv.simulation.schedule import START_S, Schedule
from tests.kv.simulation.stream import Checksum, SimStream
from xpyd_core.request_id import Address

# Connect 2 s, AUTH 2 s.
_DIAL_S = 4.0
# After that much virtual time a run that still moves is one that never ends.
_LONGEST_S = 600.0
_TRACE_LINES = 80
# More than all that a transfer may take without a sign.
_LONGEST_DEADLINES_S = 100.0
# Virtual time between two looks at what stands still.
_LOOK_S = 0.05


class World:
    """One plan being played."""

    def __init__(self, plan: Plan, *, keep_all: bool = False) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.schedule = Schedule()
        self.watch = Watch(self)
        self.outcomes: Counter[str] = Counter()
        # What happened on the way, for those who look at whether it does.
        self.seen: Counter[str] = Counter()
        self.boundaries = 0
        self.is_calm = True
        self.steps = 0
        self.trace: deque[tuple[Any, ...]] = deque(maxlen=None if keep_all else _TRACE_LINES)
        self._tags = 0
        self._links = 0
        self._starts: Counter[str] = Counter()
        self._blocked: dict[tuple[str, str], float] = {}
        self._processes: dict[str, Process] = {}
        self._live_links: list[Link] = []
        self._strikes: dict[tuple[int, str], list[str]] = defaultdict(list)
        self._looked_at = 0.0
        names = [f"P{i}" for i in range(plan.num_p)] + [f"D{i}" for i in range(plan.num_d)]
        for name in names:
            self._start(name)
        for prompt in plan.prompts:
            self._plan_prompt(prompt)
        for strike in plan.strikes:
            self._plan_strike(strike)

    # --- the run

    def run(self) -> None:
        """To the end, and past all deadlines."""
        self._play()
        # Nothing is to come. What is still open now will be for ever.
        self.schedule.now += _LONGEST_DEADLINES_S
        self.watch.look()
        if self.plan.is_ample:
            asked = sum(prompt.d_after_s is not None for prompt in self.plan.prompts)
            assert self.outcomes == Counter(landed=asked), f"KV was lost: {dict(self.outcomes)}"
        for process in self.alive():
            for stream in list(process.endpoint.streams):
                process.endpoint.end(stream, "closed")
        self._play()
        limits = self.plan.settings.limits
        self.schedule.now += limits.tombstone_s + limits.lease_s + 1
        for process in self.alive():
            process.session.tick(self.schedule.now)
            half = process.connector.producer or process.connector.consumer
            assert half is not None
            half.poll(self.schedule.now)
            self.watch.at_the_end(process)

    def _play(self) -> None:
        while self.schedule.step():
            self.steps += 1
            if self.schedule.now >= self._looked_at + _LOOK_S:
                self._looked_at = self.schedule.now
                self.watch.look()
            assert self.schedule.now < START_S + _LONGEST_S, "the run does not come to rest"

    def _plan_prompt(self, plan: PromptPlan) -> None:
        def at_p() -> None:
            process = self.process(plan.p_name)
            if process is not None and process.prefill is not None and not process.is_leaving:
                process.prefill.submit(plan)

        def at_d() -> None:
            process = self.process(plan.d_name)
            if process is not None and process.decode is not None:
                process.decode.submit(plan)

        self.schedule.after(plan.at_s, at_p)

        def abort() -> None:
            process = self.process(plan.d_name)
            if process is not None and process.decode is not None:
                process.decode.tell(partial(process.decode.forget, plan.key))

        if plan.d_after_s is not None:
            self.schedule.after(plan.at_s + plan.d_after_s, at_d)
            if plan.aborted_after_s is not None:
                self.schedule.after(plan.at_s + plan.d_after_s + plan.aborted_after_s, abort)

    def _plan_strike(self, strike: Strike) -> None:
        if strike.at_s is None:
            self._strikes[strike.boundary, strike.when].append(strike.fault)
        else:
            self.schedule.after(strike.at_s, partial(self._strike_somewhere, strike.fault))

    def _strike_somewhere(self, fault: str) -> None:
        links = [link for link in self._live_links if not all(p.is_cut for p in link.pipes)]
        if links:
            self._strike(fault, self.rng.choice(links), None)

    def _strike(self, fault: str, link: Link, pipe: Pipe | None) -> None:
        self.note("FATE", fault, link.name, f"at boundary {self.boundaries}")
        self.outcomes[f"strike:{fault}"] += 1
        self.is_calm = False
        (FAULTS.get(fault) or TRICKS[fault])(self, link, pipe)

    # --- for the parts

    def note(self, who: object, what: str, *details: object) -> None:
        """A line of the trace; made into text only when somebody reads it."""
        self.trace.append((self.schedule.now, str(who), what, *details))

    def jitter(self) -> float:
        return self.rng.random() * self.plan.jitter_s

    def latency(self) -> float:
        factor = 40.0 if self.rng.random() < 0.02 else 1.0
        return self.plan.latency_s * (0.5 + self.rng.random()) * factor

    def rare(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def new_tag(self) -> int:
        self._tags += 1
        return self._tags

    def is_intact(self, body: bytes, checksum: bytes) -> bool:
        found = Checksum()
        found.update(body)
        return self.plan.vouches or found.digest() == checksum

    def boundary(self, link: Link, pipe: Pipe, when: str) -> None:
        """Something is about to come out of `pipe`, or just came."""
        self.boundaries += when == "before"
        for fault in self._strikes.pop((self.boundaries, when), ()):
            self._strike(fault, link, pipe)

    # --- processes

    def process(self, name: str) -> Process | None:
        return self._processes.get(name)

    def alive(self) -> Iterator[Process]:
        return iter(list(self._processes.values()))

    def _start(self, name: str) -> None:
        self._starts[name] += 1
        self._processes[name] = Process(self, name, address_of(name), self._starts[name])

    def crash(self, name: str, *, silently: bool) -> None:
        """SIGKILL, or its host is gone: nobody hears of it."""
        process = self.process(name)
        if process is None:
            return
        for stream in list(process.endpoint.streams):
            keep = self.rng.randint(0, len(stream.pipe_out.items))
            stream.pipe_out.cut(keep, None if silently else "lost")
            stream.pipe_in.cut(0, None)
        self.gone(process)

    def gone(self, process: Process) -> None:
        """It runs no more; a new one will take its place."""
        process.is_alive = False
        del self._processes[process.name]
        for stream in list(process.endpoint.streams):
            self.listen_for_silence(stream.link)
        self.schedule.after(self.plan.restart_s, partial(self._start, process.name))

    def freeze(self, name: str, seconds: float) -> None:
        process = self.process(name)
        if process is not None:
            process.freeze(seconds)
            for stream in process.endpoint.streams:
                self.listen_for_silence(stream.link)

    def leave(self, name: str) -> None:
        """SIGTERM: refuse what is new; close when the transfers are done or time is up."""
        process = self.process(name)
        if process is not None and not process.is_leaving:
            process.is_leaving = True
            process.connector.drain()
            process.after(self.rng.choice([0.05, 2.0]), process.endpoint.begin_close)

    # --- connections

    def block(self, p_name: str, d_name: str, seconds: float) -> None:
        """Nothing passes between these two for so long."""
        until = max(self._blocked.get((p_name, d_name), 0.0), self.schedule.now + seconds)
        self._blocked[p_name, d_name] = until

    def listen_for_silence(self, link: Link) -> None:
        """Something has happened to `link`: its sides may not hear of each other any more."""
        for pipe in link.pipes:
            reader = pipe.reader
            if reader is not None and reader.closing is None:
                reader.endpoint.watch_silence(reader)

    def is_silent(self, stream: SimStream) -> bool:
        pipe = stream.pipe_in
        peer = pipe.writer and pipe.writer.endpoint.process
        gone = peer is None or not peer.is_alive or peer.is_frozen
        return pipe.is_mute or gone or (pipe.is_cut and not pipe.items)

    def dial(self, endpoint: SimEndpoint, address: Address) -> None:
        """Connect and shake hands; P hears of it after a while."""
        target = next((p for p in self.alive() if p.address == address), None)
        key = (endpoint.process.name, target.name) if target else ("", "")
        blocked = self._blocked.get(key, 0.0) > self.schedule.now
        if target is None or target.is_leaving:
            seconds, reason = self.latency(), "unreachable"
        elif blocked or target.is_frozen:
            seconds, reason = _DIAL_S, "timeout"
        else:
            seconds, reason = 3 * self.latency(), ""
        endpoint.process.after(seconds, partial(self._dialled, endpoint, address, target, reason))

    def _dialled(
        self, endpoint: SimEndpoint, address: Address, target: Process | None, reason: str
    ) -> None:
        if target is None or not target.is_alive:
            reason = reason or "unreachable"

        def report() -> None:
            endpoint.dialling.discard(address)
            self.note(endpoint.process, "cannot dial", reason)
            endpoint.handler.dial_failed(address, reason)

        def connect() -> None:
            endpoint.dialling.discard(address)
            assert target is not None
            self._connect(endpoint, target, address)

        endpoint.arrived.append(report if reason else connect)
        endpoint.wake()

    def _connect(self, endpoint: SimEndpoint, target: Process, address: Address) -> None:
        self._links += 1
        to_d, to_p = (Pipe(self.schedule, self.latency) for _ in range(2))
        p_name, d_name = endpoint.process.name, target.name
        link = Link(f"{p_name}-{d_name}#{self._links}", p_name, d_name, to_d, to_p)
        self._live_links.append(link)
        at_p = SimStream(endpoint, link, address=address, pipes=(to_p, to_d))
        at_d = SimStream(target.endpoint, link, address=None, pipes=(to_d, to_p))
        at_p.hello, at_p.is_up, at_p.part_s = target.hello, True, self.plan.part_s
        endpoint.streams[at_p] = None
        endpoint.by_address[address] = at_p
        endpoint.by_instance[target.name] = at_p
        if target.is_alive:
            target.endpoint.streams[at_d] = None
        else:
            to_p.cut(0, "lost")
        to_d.push(Open(endpoint.process.hello))
        self.note(endpoint.process, "has connected", link.name, target.incarnation)
        endpoint.handler.peer_up(at_p)

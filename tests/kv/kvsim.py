"""A P and a D over a network that is a list: one thread, one clock, every step chosen by the test.

Frames wait in queues until `step` moves one. A DATA frame has three steps, as on a socket: it is
read at P, it begins at D, its last byte lands at D; anything may happen in between.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import count
from typing import Any

from tests.kv.kvfakes import LAYOUT, FakeKvMemory, FakePool
from tests.kv.simulation.memory import TargetView, WatchedStore
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.connector.build import Connector, build
from xpyd_kv.memory.api import KvMemory, StoreMetrics
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.metrics import KvMetrics
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.plan.pairs import Pair
from xpyd_kv.ranks.engine import engine_of
from xpyd_kv.session.settings import KvSettings, SessionContext
from xpyd_kv.transport.api import Done, Handler
from xpyd_kv.values import KvLayout, Landed, NoKv
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.fit import pair_on, wire_layout

D_ADDRESS = Address("127.0.0.2", 21001)
WIRE_LAYOUT = wire_layout(LAYOUT, factors={}, max_tokens=4096)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class SessionDriver:
    """One session between an endpoint that writes down what was sent and an engine's side that
    writes down what was reported."""

    session: Any

    def __init__(self) -> None:
        self.clock = Clock()
        self.sent: list[wire.Message] = []
        self.bodies: list[bytes] = []
        self.disconnected: list[Any] = []
        self.events: list[Any] = []
        self.metrics = KvMetrics()

    def context(self, memory: KvMemory, *, on_device: bool = False) -> SessionContext:
        endpoint: Any = self
        return SessionContext(
            endpoint=endpoint,
            memory=memory,
            engine=engine_of(memory.layout),
            on_device=on_device,
            settings=KvSettings(frames=FrameLimits(0, 10**6)),
            clock=self.clock,
        )

    def send(self, peer: Any, message: wire.Message, body: bytes = b"") -> None:
        self.sent.append(message)
        self.bodies.append(body)

    def disconnect(self, peer: Any, reason: str) -> None:
        self.disconnected.append(peer)

    def said(self) -> list[str]:
        """Names of what was sent since the last call, CANCELs with their reason."""
        names = [
            f"CANCEL {m.reason}" if isinstance(m, wire.Cancel) else type(m).__name__.upper()
            for m in self.sent
        ]
        self.sent.clear()
        return names

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.session.tick(self.clock.now)


@dataclass(eq=False)
class SimPeer:
    address: Address | None
    hello: wire.Hello
    layout: wire.Layout = WIRE_LAYOUT
    transport: str = "tcp"
    ours: wire.Layout = WIRE_LAYOUT
    is_data: bool = False

    @cached_property
    def pair(self) -> Pair | None:
        """As the handshake makes it."""
        layouts = (self.layout, self.ours) if self.address is None else (self.ours, self.layout)
        return pair_on(*layouts, dialler=self.hello, acceptor=self.hello)


@dataclass
class Queued:
    make_header: Callable[[], wire.Data | None]
    views: Sequence[memoryview]
    done: Done


@dataclass
class Frame:
    order: int
    header: wire.Data
    body: bytes
    checksum: bytes
    views: Sequence[memoryview] | None = None


@dataclass(eq=False)
class Link:
    """One connection. `at_p` is D as P sees it."""

    at_p: SimPeer
    at_d: SimPeer
    is_up: bool = True
    to_d: deque[tuple[int, wire.Message, bytes]] = field(default_factory=deque)
    to_p: deque[tuple[int, wire.Message, bytes]] = field(default_factory=deque)
    queued: deque[Queued] = field(default_factory=deque)
    on_wire: deque[Frame] = field(default_factory=deque)
    landing: Frame | None = None
    orders: count[int] = field(default_factory=count)


class SteppedEndpoint:
    def __init__(self, handler: Handler, world: World, name: str) -> None:
        self.handler = handler
        self.world = world
        self.name = name
        self.calls: deque[Callable[[], None]] = deque()
        self.tick_at: float | None = None

    def start(self) -> None: ...

    def close(self, deadline_s: float) -> None: ...

    def call(self, function: Callable[[], None]) -> None:
        self.calls.append(function)

    def connect(self, address: Address, *, data: bool = False) -> SimPeer | None:
        link = self.world.link
        if link is not None and address == D_ADDRESS:
            return link.at_p
        self.world.dialling.add(address)
        return None

    def disconnect(self, peer: SimPeer, reason: str) -> None:
        self.world.to_close.append(peer)

    def send(self, peer: SimPeer, message: wire.Message, body: bytes = b"") -> None:
        link = self.world.link_of(peer)
        if link is not None:
            (link.to_d if self.name == "P" else link.to_p).append(
                (next(link.orders), message, body)
            )

    def send_data(
        self,
        peer: SimPeer,
        make_header: Callable[[], wire.Data | None],
        views: Sequence[memoryview],
        done: Done,
    ) -> None:
        link = self.world.link_of(peer)
        if link is None:
            self.calls.append(lambda: done(None))
        else:
            link.queued.append(Queued(make_header, views, done))

    def run_calls(self) -> None:
        for _ in range(len(self.calls)):
            self.calls.popleft()()
        self.tick()

    def tick(self) -> None:
        self.tick_at = self.handler.tick(self.world.clock.now)


def checksum(views: Sequence[memoryview]) -> bytes:
    return blake2b(b"".join(bytes(view) for view in views), digest_size=8).digest()


@dataclass
class Sent:
    """One prompt on P's side of the test."""

    key: TransferKey
    ids: tuple[int, ...]
    seed: int
    blocks: list[int]
    chunks: list[int]
    cached_tokens: int = 0
    computed: int = 0
    is_open: bool = True


class World:
    """Both sides and the network. `chaos` draws what is random; None: everything in order."""

    def __init__(
        self,
        *,
        p_blocks: int = 64,
        d_blocks: int = 64,
        settings: KvSettings | None = None,
        store: StoreLimits | None = None,
        d_layout: KvLayout = LAYOUT,
    ) -> None:
        self.clock = Clock()
        self.link: Link | None = None
        self.dialling: set[Address] = set()
        self.to_close: list[SimPeer] = []
        self.starts = 0
        base = settings or KvSettings()
        self.settings = KvSettings(base.limits, base.frames, store or base.store, base.mode)
        self.p_memory, self.p_pool = FakeKvMemory(p_blocks), FakePool(p_blocks)
        self.d_layout = d_layout
        self.d_memory = FakeKvMemory(d_blocks, d_layout)
        self.d_pool = FakePool(d_blocks, d_layout.block_size)
        self.endpoints: dict[str, SteppedEndpoint] = {}
        self.p = self._side("P", self.p_memory, self.p_pool)
        self.d = self._side("D", self.d_memory, self.d_pool)
        assert self.p.producer is not None
        assert self.d.consumer is not None
        self.producer, self.consumer = self.p.producer, self.d.consumer
        self.seed = 0

    def _side(self, role: Any, memory: KvMemory, pool: FakePool) -> Connector:
        def make(handler: Handler) -> Any:
            self.endpoints[role] = SteppedEndpoint(handler, self, role)
            return self.endpoints[role]

        return build(
            role,
            make_endpoint=make,
            memory=memory,
            pool=pool,
            wake=lambda: None,
            settings=self.settings,
            make_store=WatchedStore,
            clock=self.clock,
        )

    # --- network

    def link_of(self, peer: SimPeer) -> Link | None:
        link = self.link
        return link if link is not None and peer in (link.at_p, link.at_d) else None

    def handler(self, name: str) -> Handler:
        return self.endpoints[name].handler

    def dial(self, *, ok: bool = True, reason: str = "unreachable") -> None:
        for address in list(self.dialling):
            self.dialling.discard(address)
            if not ok or address != D_ADDRESS:
                self.handler("P").dial_failed(address, reason)
                continue
            self.starts += 1
            hello = {
                side: wire.Hello(
                    major=1, minor=0, engine_id=side, incarnation=f"{side}{self.starts}",
                    role=side, nonce=bytes(32),
                )
                for side in ("P", "D")
            }  # fmt: skip
            of_d = wire_layout(self.d_layout, factors={}, max_tokens=4096)
            self.link = Link(
                SimPeer(address, hello["D"], of_d), SimPeer(None, hello["P"], ours=of_d)
            )
            self.handler("P").peer_up(self.link.at_p)
            self.handler("D").peer_up(self.link.at_d)

    def hang_up(self, reason: str = "closed") -> None:
        link, self.link = self.link, None
        if link is None:
            return
        if link.landing is not None:
            self._writers(link.landing, -1)
        for queued in link.queued:
            queued.done(None)
        self.handler("P").peer_down(link.at_p, reason)
        self.handler("D").peer_down(link.at_d, reason)

    def step_control(self, to: str, *, twice: bool = False, overtake: bool = False) -> bool:
        """Deliver one control frame to P or D; with `overtake` before DATA that was sent
        earlier, as over several connections."""
        link = self.link
        queue = link and (link.to_d if to == "D" else link.to_p)
        if link is None or not queue:
            return False
        order = queue[0][0]
        data_first = link.landing or (link.on_wire and link.on_wire[0].order < order)
        if to == "D" and data_first and not overtake:
            return False
        _, message, body = queue.popleft()
        peer = link.at_d if to == "D" else link.at_p
        for _ in range(2 if twice else 1):
            self.handler(to).message(peer, message, body)
        return True

    def step_data(self, *, corrupt: bool = False, overtake: bool = False) -> bool:
        """Move the DATA of the link by one step; with `overtake` before earlier control frames."""
        link = self.link
        if link is None:
            return False
        if link.landing is not None:
            frame, link.landing = link.landing, None
            self._write(frame)
            return True
        if link.on_wire:
            if link.to_d and link.to_d[0][0] < link.on_wire[0].order and not overtake:
                return False
            frame = link.on_wire.popleft()
            frame.views = self.handler("D").data_begin(link.at_d, frame.header, len(frame.body))
            if frame.views is None:
                self._ended(frame, stored=False, intact=False)
            else:
                self._writers(frame, 1)
                link.landing = frame
            return True
        return self.read_frame(corrupt=corrupt)

    def read_frame(self, *, corrupt: bool = False) -> bool:
        link = self.link
        if link is None or not link.queued:
            return False
        queued = link.queued.popleft()
        header, digest = queued.make_header(), None
        if header is not None:
            body, digest = bytearray(b"".join(queued.views)), checksum(queued.views)
            if corrupt:
                body[len(body) // 2] ^= 0xFF
            link.on_wire.append(Frame(next(link.orders), header, bytes(body), digest))
        queued.done(digest)
        return True

    def _writers(self, frame: Frame, change: int) -> None:
        for view in frame.views or ():
            # What goes nowhere belongs to no landing.
            if isinstance(view, TargetView):
                view.landing.writers += change

    def _write(self, frame: Frame) -> None:
        assert frame.views is not None
        body = frame.body
        for view in frame.views:
            part, body = body[: len(view)], body[len(view) :]
            if isinstance(view, TargetView):
                assert not view.landing.is_over
                view.view[:] = part
        self._writers(frame, -1)
        intact = checksum([memoryview(frame.body)]) == frame.checksum
        self._ended(frame, stored=True, intact=intact)

    def _ended(self, frame: Frame, *, stored: bool, intact: bool) -> None:
        assert self.link is not None
        end = self.handler("D").data_end
        end(self.link.at_d, frame.header, frame.checksum, stored=stored, intact=intact)

    def close_what_was_asked(self) -> None:
        peers, self.to_close = self.to_close, []
        for peer in peers:
            if self.link_of(peer) is not None:
                self.hang_up("disconnected")

    # --- all in order

    def settle(self) -> None:
        """Run everything that can run without time passing."""
        while True:
            moved = bool(self.dialling)
            self.dial()
            for name in ("P", "D"):
                moved |= bool(self.endpoints[name].calls)
                self.endpoints[name].run_calls()
                moved |= self.step_control(name)
            moved |= self.step_data()
            self.close_what_was_asked()
            self.producer.poll(self.clock.now)
            self.consumer.poll(self.clock.now)
            if not moved and not any(e.calls for e in self.endpoints.values()):
                return

    def pass_time(self, seconds: float, *, settle: bool = True) -> None:
        """Time passes, deadline by deadline."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            times = [e.tick_at for e in self.endpoints.values() if e.tick_at is not None]
            wake = self.consumer.next_deadline()
            times += [wake] if wake is not None else []
            later = [time for time in times if time > self.clock.now]
            self.clock.now = min([until, *later])
            for endpoint in self.endpoints.values():
                endpoint.tick()
            self.close_what_was_asked()
            self.producer.poll(self.clock.now)
            self.consumer.poll(self.clock.now)
            if settle:
                self.settle()

    # --- engines

    def prompt(
        self,
        tokens: int,
        *,
        chunks: Sequence[int] | None = None,
        index: int = 0,
        cached_tokens: int = 0,
        uuid: str | None = None,
    ) -> Sent:
        """A prompt on P, its cached part in P's cache; nothing is offered yet."""
        self.seed += 1
        blocks = self.p_pool.take(-(-tokens // LAYOUT.block_size))
        assert blocks is not None, "the test gave P too few blocks"
        ids = tuple(random.Random(self.seed).randrange(5000) for _ in range(tokens))
        key = TransferKey(uuid or f"{self.seed:032x}", index)
        self.p_memory.fill(blocks[: cached_tokens // LAYOUT.block_size], self.seed)
        steps = list(chunks or [tokens - cached_tokens])
        assert sum(steps) == tokens - cached_tokens
        return Sent(key, ids, self.seed, blocks, steps, cached_tokens, cached_tokens)

    def offer(self, sent: Sent, *, address: Address = D_ADDRESS) -> None:
        self.producer.offer(
            sent.key, address, sent.ids, prompt_tokens=len(sent.ids), salt=b"", now=self.clock.now
        )
        if sent.cached_tokens:
            self.producer.cached(sent.key, sent.blocks, sent.cached_tokens)

    def forward(self, sent: Sent, *, between: Callable[[int], None] = lambda layer: None) -> None:
        """One step of P's engine: the next chunk, layer by layer. A block holds its bytes once its
        last token is computed, in this layer and not in later ones."""
        first = sent.computed // LAYOUT.block_size
        sent.computed += sent.chunks.pop(0)
        is_last = sent.computed == len(sent.ids)
        end = len(sent.blocks) if is_last else sent.computed // LAYOUT.block_size
        self.producer.stage(sent.key, sent.blocks, sent.computed)
        for layer in range(len(LAYOUT.layers)):
            self.p_memory.fill_layer(layer, sent.blocks[first:end], sent.seed, first)
            self.producer.layer_done(layer)
            between(layer)
        self.producer.step_done()

    def finish_request(self, sent: Sent) -> None:
        """P's engine drops its own references."""
        if sent.is_open:
            sent.is_open = False
            self.p_pool.release(sent.blocks)

    def send(self, sent: Sent) -> None:
        """The whole life on P."""
        self.offer(sent)
        while sent.chunks:
            self.forward(sent)
        self.finish_request(sent)

    def expect(self, sent: Sent, wait_s: float = 10.0) -> None:
        self.consumer.expect(sent.key, wait_s=wait_s, now=self.clock.now)

    def admit(self, sent: Sent, *, seats: int = 100) -> Any:
        return self.consumer.admit(sent.key, sent.ids, seats=seats, now=self.clock.now)

    def take_over(self, sent: Sent, answer: object) -> None:
        """D's request runs from landed KV and ends: the bytes must be P's."""
        assert isinstance(answer, Landed), answer
        skipped = answer.skipped_tokens // self.d_layout.block_size
        assert answer.tokens == len(sent.ids)
        assert self.d_memory.holds(
            answer.block_ids[skipped:], sent.seed, first=skipped, tokens=len(sent.ids)
        )
        self.d_pool.release(answer.block_ids)

    # --- the end of a test

    def assert_nothing_is_left(self) -> None:
        assert not self.producer.has_work()
        assert not self.consumer.has_work()
        assert self.p_pool.num_free == self.p_pool.num_blocks
        assert self.d_pool.num_free == self.d_pool.num_blocks
        for side in (self.p, self.d):
            metrics = side.store.metrics() if side.store else StoreMetrics()
            assert (metrics.leases, metrics.buffer_used_bytes, metrics.pool_used_bytes) == (0, 0, 0)


__all__ = ["D_ADDRESS", "NoKv", "World"]

"""The engines of tests.kv.rank_sim: endpoints, Channels and caches of their ranks, as fakes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tests.kv.kvfakes import FakeKvMemory
from tests.kv.rank_pods import RankedSide, layout_of
from xpyd_core.request_id import Address
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.plan.pairs import Pair
from xpyd_kv.ranks.build import build_rank
from xpyd_kv.session.settings import KvSettings
from xpyd_kv.transport.api import Handler
from xpyd_kv.wire import messages as wire

if TYPE_CHECKING:
    from tests.kv.rank_sim import Sim

Role = Literal["P", "D"]


@dataclass(eq=False)
class Peer:
    address: Address | None
    hello: wire.Hello
    layout: wire.Layout
    pair: Pair | None
    is_data: bool
    transport: str = "tcp"


@dataclass(eq=False)
class Link:
    """One connection: `at_p` is D as P sees it."""

    p: Node
    d: Node
    at_p: Peer
    at_d: Peer
    to_p: deque[tuple[wire.Message, bytes]] = field(default_factory=deque)
    to_d: deque[Any] = field(default_factory=deque)
    queued: deque[Any] = field(default_factory=deque)
    landing: Any = None


class Node:
    """The endpoint of an engine or of a rank."""

    def __init__(self, sim: Sim, side: SimSide, rank: int | None, address: Address) -> None:
        self.sim, self.side, self.rank, self.address = sim, side, rank, address
        self.handler: Handler
        self.layout: wire.Layout
        self.calls: deque[Callable[[], None]] = deque()
        self.dialling: dict[Address, bool] = {}
        self.links: dict[Address, Link] = {}
        self.tick_at: float | None = None

    def start(self) -> None: ...

    def close(self, deadline_s: float) -> bool:
        return True

    def call(self, function: Callable[[], None]) -> None:
        self.calls.append(function)

    def connect(self, address: Address, *, data: bool = False) -> Peer | None:
        link = self.links.get(address)
        if link is None:
            self.dialling[address] = data
        return None if link is None else link.at_p

    def disconnect(self, peer: Peer, reason: str) -> None:
        self.sim.to_cut.append(peer)

    def send(self, peer: Peer, message: wire.Message, body: bytes = b"") -> None:
        link = self.sim.link_of(peer)
        if link is not None:
            (link.to_d if self.side.role == "P" else link.to_p).append((message, body))

    def send_data(self, peer: Peer, make_header: Any, views: Sequence[Any], done: Any) -> None:
        link = self.sim.link_of(peer)
        if link is None:
            self.call(lambda: done(None))
        else:
            link.queued.append((make_header, views, done))

    def hello(self, *, data: bool) -> wire.Hello:
        role = self.side.role
        return wire.Hello(
            major=1, minor=0, engine_id=role, incarnation=f"{role}1", role=role,
            nonce=bytes(32), rank=self.rank or 0, data=data,
        )  # fmt: skip

    def tick(self) -> None:
        self.tick_at = self.handler.tick(self.sim.now)


class End:
    """One end of a Channel whose messages wait to be moved."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.other: End
        self.come: deque[bytes] = deque()
        self.handle: Callable[[bytes], None]

    def post(self, message: bytes) -> None:
        self.other.come.append(message)

    def listen(self, handle: Callable[[bytes], None]) -> None:
        self.handle = handle


def _no_device(reason: str) -> None:
    raise AssertionError(f"a rank on a CPU gives up: {reason}")


class SimSide(RankedSide):
    """A P or a D."""

    def __init__(
        self, sim: Sim, role: Role, engine: EngineLayout, settings: KvSettings, blocks: int
    ) -> None:
        super().__init__(role, engine, blocks)
        self.sim = sim
        self.memories = [
            FakeKvMemory(blocks, layout_of(engine, rank)) for rank in range(engine.num_ranks)
        ]
        self.nodes: list[Node] = []
        self.ends: list[tuple[End, End]] = []
        host = "127.0.0.1" if role == "P" else "127.0.0.2"
        self.address = Address(host, 21001)
        ranks = [Address(host, 21002 + rank) for rank in range(engine.num_ranks)]
        for rank in range(engine.num_ranks if self.is_ranked else 0):
            self._add_rank(rank, ranks[rank], settings)
        self.kv = self.connector(
            [end for end, _ in self.ends],
            lambda handler, layout: self._node(None, self.address, handler, layout),
            lambda: tuple(ranks) if role == "D" else (),
            settings=settings,
            clock=sim.clock,
        )

    def _node(
        self, rank: int | None, address: Address, handler: Handler, layout: wire.Layout
    ) -> Any:
        node = Node(self.sim, self, rank, address)
        node.handler, node.layout = handler, layout
        self.nodes.append(node)
        self.sim.by_address[address] = node
        return node

    def _add_rank(self, rank: int, address: Address, settings: KvSettings) -> None:
        ends = End(self.sim), End(self.sim)
        ends[0].other, ends[1].other = ends[1], ends[0]

        self.ends.append(ends)
        self.parts.append(
            build_rank(
                self.role,
                channel=ends[1],
                make_endpoint=lambda handler: self._node(
                    rank, address, handler, self.layout_of(rank)
                ),
                memory=self.memories[rank],
                engine=self.engine,
                settings=settings,
                give_up=_no_device,
                clock=self.sim.clock,
            )
        )

    def check_held(self, views: Sequence[Any], what: str) -> None:
        """Whoever touches a block of a cache does it while somebody holds that block."""
        for view in views:
            at = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
            for memory in self.memories:
                size = memory.layout.block_bytes
                for layer in range(len(memory.layout.layers)):
                    whole = memory.block_view(layer, 0).obj
                    first = memory.block_view(layer, 0)
                    base = np.frombuffer(first, np.uint8).__array_interface__["data"][0]
                    assert whole is not None
                    block, rest = divmod(at - base, size)
                    if 0 <= block < self.pool.num_blocks:
                        assert self.pool.references[block] > 0, (
                            f"{what} block {block}, held by none"
                        )
                        assert rest + len(view) <= size * self.pool.num_blocks

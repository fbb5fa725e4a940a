"""Engines of any layout with real endpoints, ranks and all, in one process: the test is the engine.

Each rank has an endpoint, an I/O thread and a cache of its own. A Channel is a pair of function
calls. What stands in a cache says whose it is: prompt, layer, head, token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tests.kv.kvfakes import FakeKvMemory, FakePool
from tests.kv.pods import KEY, MAX_TOKENS
from xpyd_core.blocks import blocks_for
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.connector.build import Connector, build
from xpyd_kv.metrics import EndpointCounters
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.ranks.build import RankPart, build_rank
from xpyd_kv.ranks.engine import RankedEngine, RankedMemory, engine_wire_layout
from xpyd_kv.session.settings import KvSettings
from xpyd_kv.transport.api import Handler
from xpyd_kv.transport.endpoint import TcpEndpoint
from xpyd_kv.transport.host.shared_memory import SharedMemory, SharedMemoryPath
from xpyd_kv.transport.settings import Identity
from xpyd_kv.values import KvLayout, Landed, NoKv
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.fit import wire_layout

HOST = "127.0.0.1"
ROW_BYTES = 8


def engine_of(
    tp: int, stages: Sequence[Sequence[int]], *, kv_heads: int = 2, block_size: int = 4
) -> EngineLayout:
    """A small model's cache."""
    return EngineLayout(
        kv_heads=kv_heads,
        tp=tp,
        stages=tuple(map(tuple, stages)),
        block_size=block_size,
        row_bytes=ROW_BYTES,
    )


def layout_of(engine: EngineLayout, rank: int) -> KvLayout:
    """Of one rank's cache."""
    return KvLayout(
        layers=engine.layers_of(rank),
        kv_heads=engine.heads_per_rank,
        head_dim=1,
        block_size=engine.block_size,
        dtype="float32",
        block_bytes=engine.block_bytes,
    )


class Pipe:
    """One Channel, both of its ends. What is posted before anybody listens waits."""

    def __init__(self) -> None:
        self.of_engine, self.of_rank = _End(), _End()
        self.of_engine.other, self.of_rank.other = self.of_rank, self.of_engine


class _End:
    other: _End

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[bytes] = []
        self._handle: Callable[[bytes], None] | None = None
        self.is_cut = False

    def post(self, message: bytes) -> None:
        if not self.is_cut:
            self.other.take(message)

    def listen(self, handle: Callable[[bytes], None]) -> None:
        with self._lock:
            self._handle = handle
            waiting, self._waiting = self._waiting, []
            for message in waiting:
                handle(message)

    def take(self, message: bytes) -> None:
        with self._lock:
            if self._handle is None:
                self._waiting.append(message)
            else:
                self._handle(message)


class RankedSide:
    """A P or a D of any layout, whose caches say whose KV they hold."""

    def __init__(
        self,
        role: Literal["P", "D"],
        engine: EngineLayout,
        blocks: int,
        *,
        is_ranked: bool = False,
    ) -> None:
        """`is_ranked`: an only rank is not the engine's own process, either."""
        self.role: Literal["P", "D"] = role
        self.engine = engine
        self.pool = FakePool(blocks, engine.block_size)
        self.is_ranked = is_ranked or engine.num_ranks > 1
        self.memories: list[FakeKvMemory] = []
        self.parts: list[RankPart] = []

    def connector(
        self,
        channels: Sequence[Any],
        make: Callable[[Handler, wire.Layout], Any],
        addresses: Callable[[], tuple[Address, ...]],
        **options: Any,
    ) -> Connector:
        """The engine's half. `make` makes its endpoint, given what its LAYOUT says; `addresses`: of
        a D's ranks."""
        ranked = RankedEngine(layout=self.engine, channels=channels, dtype="float32", head_dim=1)

        def make_endpoint(handler: Handler) -> Any:
            said: dict[str, Any] = {"factors": {"model": "m"}, "max_tokens": MAX_TOKENS}
            if self.is_ranked:
                layout = engine_wire_layout(ranked, ranks=addresses(), **said)
            else:
                layout = wire_layout(self.memories[0].layout, **said)
            return make(handler, layout)

        return build(
            self.role,
            make_endpoint=make_endpoint,
            memory=RankedMemory(ranked) if self.is_ranked else self.memories[0],
            pool=self.pool,
            wake=lambda: None,
            ranks=ranked if self.is_ranked else None,
            **options,
        )

    def layout_of(self, rank: int) -> wire.Layout:
        """What a rank's endpoint says of its cache."""
        cache = layout_of(self.engine, rank)
        factors = {"model": "m"}
        return wire_layout(cache, factors=factors, max_tokens=MAX_TOKENS, engine=self.engine)

    def wanted(self, rank: int, layer: int, seed: int, index: int) -> bytes:
        """What a prompt's `index`-th block holds in this layer of the rank."""
        engine, size = self.engine, self.engine.block_size
        absolute = engine.layers_of(rank)[layer]
        return b"".join(
            row_of(seed, absolute, head, token)
            for head in engine.heads_of(rank)
            for token in range(index * size, (index + 1) * size)
        )

    def holds(self, blocks: Sequence[int], seed: int, tokens: int) -> bool:
        """Whether every rank's blocks hold the prompt's KV, as far as it reaches."""
        size = self.engine.block_size
        for rank, memory in enumerate(self.memories):
            for layer in range(len(memory.layout.layers)):
                for index, block in enumerate(blocks):
                    found = self._read(rank, memory.block_view(layer, block))
                    wanted = self.wanted(rank, layer, seed, index)
                    used = min(size, tokens - index * size) * ROW_BYTES
                    for at in range(0, len(found), size * ROW_BYTES):
                        if found[at : at + used] != wanted[at : at + used]:
                            return False
        return True

    def _read(self, rank: int, view: Any) -> Any:
        return view


class Side(RankedSide):
    """With real endpoints, each rank's with an I/O thread of its own."""

    def __init__(
        self,
        role: Literal["P", "D"],
        engine: EngineLayout,
        *,
        settings: KvSettings | None = None,
        blocks: int = 64,
        transports: tuple[str, ...] = ("tcp",),
        folder: Path | None = None,
        is_ranked: bool = False,
    ) -> None:
        super().__init__(role, engine, blocks, is_ranked=is_ranked)
        self.settings = settings or KvSettings()
        self._options: dict[str, Any] = {"transports": transports, "socket_dir": folder}
        self.shared = [self._share(rank, blocks) for rank in range(engine.num_ranks)]
        self.memories = [
            FakeKvMemory(blocks, layout_of(engine, rank), shared and shared.buffer)
            for rank, shared in enumerate(self.shared)
        ]
        self.given_up: list[str] = []
        self.pipes: list[Pipe] = []
        for rank in range(engine.num_ranks if self.is_ranked else 0):
            self._start_rank(rank)
        self.kv = self.connector(
            [pipe.of_engine for pipe in self.pipes],
            partial(self._endpoint, takes="engines" if self.is_ranked else "both"),
            lambda: self.addresses,
            settings=self.settings,
        )
        self.kv.endpoint.start()

    def _endpoint(
        self, handler: Handler, layout: wire.Layout, rank: int = 0, **options: Any
    ) -> TcpEndpoint:
        return TcpEndpoint(
            handler,
            identity=Identity(f"pod-{self.role}", f"incarnation-{self.role}", self.role, rank),
            layout=layout,
            keys=(KEY,),
            listen=Address(HOST, 0) if self.role == "D" else None,
            paths=(SharedMemoryPath(self.shared[rank]),),
            **self._options,
            **options,
        )

    def _share(self, rank: int, blocks: int) -> SharedMemory | None:
        if self.role != "P" or "shm" not in self._options["transports"]:
            return None
        return SharedMemory(blocks * layout_of(self.engine, rank).bytes_per_block)

    def _start_rank(self, rank: int) -> None:
        pipe = Pipe()
        counters = EndpointCounters()
        part = build_rank(
            self.role,
            channel=pipe.of_rank,
            make_endpoint=lambda handler: self._endpoint(
                handler, self.layout_of(rank), rank, takes="ranks", counters=counters
            ),
            memory=self.memories[rank],
            engine=self.engine,
            settings=self.settings,
            give_up=self.given_up.append,
            counters=counters,
        )
        part.endpoint.start()
        self.pipes.append(pipe)
        self.parts.append(part)

    @property
    def addresses(self) -> tuple[Address, ...]:
        found = (address_of(part.endpoint) for part in self.parts)
        return tuple(found) if self.role == "D" else ()

    def close(self) -> None:
        self.kv.endpoint.close(2.0)
        for part in self.parts:
            part.endpoint.close(2.0)
            part.space.close(1.0)
        for shared in self.shared:
            if shared is not None:
                shared.close()

    # --- P's engine

    def compute(
        self,
        key: TransferKey,
        ids: Sequence[int],
        peer: Address,
        *,
        chunk: int = 100,
        cached: int = 0,
        on_layer: Callable[[], None] = lambda: None,
    ) -> list[int]:
        """Offer and prefill a prompt; its blocks, the engine's references on them kept."""
        producer = self.kv.producer
        assert producer is not None
        blocks = self.pool.take(blocks_for(len(ids), self.engine.block_size))
        assert blocks is not None
        now = time.monotonic()
        producer.offer(key, peer, ids, prompt_tokens=len(ids), salt=b"", now=now)
        if cached:
            self._fill(blocks, ids[0], range(cached // self.engine.block_size))
            producer.cached(key, blocks, cached)
        for start in range(cached, len(ids), chunk):
            end = min(start + chunk, len(ids))
            producer.stage(key, blocks, end)
            size = self.engine.block_size
            self._step(blocks, ids[0], range(start // size, blocks_for(end, size)), on_layer)
        return blocks

    def _step(
        self, blocks: list[int], seed: int, indices: range, on_layer: Callable[[], None]
    ) -> None:
        producer = self.kv.producer
        assert producer is not None
        message = producer.step_chunks()
        assert bool(message) <= self.is_ranked
        for rank, memory in enumerate(self.memories):
            sender = self.parts[rank].sender if self.parts else None
            if sender is not None:
                sender.begin_step(message)
            for layer in range(len(memory.layout.layers)):
                self._fill_layer(rank, layer, blocks, seed, indices)
                on_layer()
                (producer if sender is None else sender).layer_done(layer)
            if sender is not None:
                sender.step_done(failed=False)
        producer.step_done()

    def _fill(self, blocks: list[int], seed: int, indices: range) -> None:
        for rank, memory in enumerate(self.memories):
            for layer in range(len(memory.layout.layers)):
                self._fill_layer(rank, layer, blocks, seed, indices)

    def _fill_layer(
        self, rank: int, layer: int, blocks: list[int], seed: int, indices: range
    ) -> None:
        for index in indices:
            view = self.memories[rank].block_view(layer, blocks[index])
            self._write(rank, view, self.wanted(rank, layer, seed, index))

    def _write(self, rank: int, view: Any, data: bytes) -> None:
        """The model of that rank writes it."""
        view[:] = data

    # --- D's engine

    def admit(self, key: TransferKey, ids: Sequence[int]) -> Landed | NoKv | None:
        consumer = self.kv.consumer
        assert consumer is not None
        answer = consumer.admit(key, ids, seats=8, now=time.monotonic())
        return answer if isinstance(answer, Landed | NoKv) else None


def row_of(seed: int, layer: int, head: int, token: int) -> bytes:
    """K and V of one token of one head of one layer."""
    return bytes((seed % 251, layer + 1, head + 1, token % 256, token // 256, 7, 7, 7))


def address_of(endpoint: Any) -> Address:
    assert endpoint.listen_address is not None
    return endpoint.listen_address


@contextmanager
def sides(p: EngineLayout, d: EngineLayout, **options: Any) -> Iterator[tuple[Side, Side]]:
    """One of each, closed at the end. `of_p` and `of_d` of the options are of one side."""
    of_p, of_d = options.pop("of_p", {}), options.pop("of_d", {})
    at_d = Side("D", d, **{**options, **of_d})
    try:
        at_p = Side("P", p, **{**options, **of_p})
        try:
            yield at_p, at_d
        finally:
            at_p.close()
    finally:
        at_d.close()

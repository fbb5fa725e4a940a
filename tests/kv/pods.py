"""P and D as processes have them: a connector over TCP with its I/O thread; the test is the engine.

`pods` makes one of each here; tests.kv.pod_process puts one into a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.kv.kvfakes import LAYOUT, FakeKvMemory, FakePool
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.connector.build import Connector, build
from xpyd_kv.session.settings import KvSettings
from xpyd_kv.transport.api import Handler, Peer
from xpyd_kv.transport.endpoint import TcpEndpoint
from xpyd_kv.transport.host.shared_memory import SharedMemory, SharedMemoryPath
from xpyd_kv.transport.settings import Identity
from xpyd_kv.values import KvLayout, Landed, NoKv, Wait
from xpyd_kv.wire.fit import wire_layout

PATIENCE_S = 20.0
KEY = b"the fleet's key, long enough"
MAX_TOKENS = 1000
WIRE_LAYOUT = wire_layout(LAYOUT, factors={"model": "m"}, max_tokens=MAX_TOKENS)


class Pod:
    """One process's worth: connector, pool and memory. `lost` keeps why peers went."""

    def __init__(
        self,
        role: Any,
        settings: KvSettings | None = None,
        blocks: int = 64,
        name: str = "",
        *,
        layout: KvLayout = LAYOUT,
        shared: SharedMemory | None = None,
        factors: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.memory = FakeKvMemory(blocks, layout, shared.buffer if shared is not None else None)
        self.pool = FakePool(blocks, layout.block_size)
        self.lost: list[str] = []
        name = name or f"pod-{role}"

        def make(handler: Handler) -> TcpEndpoint:
            return TcpEndpoint(
                _Watched(handler, self.lost),  # pyright: ignore[reportArgumentType]
                identity=Identity(name, f"incarnation-{role}", role),
                layout=wire_layout(
                    layout, factors=dict(factors or {"model": "m"}), max_tokens=MAX_TOKENS
                ),
                listen=Address("127.0.0.1", 0) if role == "D" else None,
                paths=(SharedMemoryPath(shared),),
                **{"keys": (KEY,), **options},
            )

        self.kv: Connector = build(
            role,
            make_endpoint=make,
            memory=self.memory,
            pool=self.pool,
            wake=lambda: None,
            settings=settings,
        )
        self.kv.endpoint.start()

    @property
    def endpoint(self) -> TcpEndpoint:
        assert isinstance(self.kv.endpoint, TcpEndpoint)
        return self.kv.endpoint

    @property
    def address(self) -> Address:
        assert self.endpoint.listen_address is not None
        return self.endpoint.listen_address


class _Watched:
    """A Handler, and a list of why its peers went."""

    def __init__(self, handler: Handler, lost: list[str]) -> None:
        self._handler, self._lost = handler, lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def peer_down(self, peer: Peer, reason: str) -> None:
        self._lost.append(reason)
        self._handler.peer_down(peer, reason)


@contextmanager
def pod(role: str, settings: KvSettings | None = None, **options: Any) -> Iterator[Pod]:
    started = Pod(role, settings, **options)
    try:
        yield started
    finally:
        started.kv.endpoint.close(2.0)


@contextmanager
def pods(settings: KvSettings | None = None) -> Iterator[tuple[Pod, Pod]]:
    with pod("P", settings) as p, pod("D", settings) as d:
        yield p, d


def until(condition: Callable[[], Any], what: str = "it") -> Any:
    """What `condition` gives once it gives something: what another thread does."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen in time"
        time.sleep(0.001)
    return value


def key_of(seed: int) -> TransferKey:
    return TransferKey(f"{seed:032x}", 0)


def ids_of(seed: int, tokens: int) -> tuple[int, ...]:
    """The prompt that both processes know by its number."""
    return tuple(range(seed * 100, seed * 100 + tokens))


def send(p: Pod, address: Address, ids: tuple[int, ...], seed: int, chunk: int) -> TransferKey:
    assert p.kv.producer is not None
    producer = p.kv.producer
    key = key_of(seed)
    blocks = p.pool.take(-(-len(ids) // p.pool.block_size))
    assert blocks is not None
    p.memory.fill(blocks, seed)
    producer.offer(key, address, ids, prompt_tokens=len(ids), salt=b"", now=time.monotonic())
    for end in [*range(chunk, len(ids), chunk), len(ids)]:
        producer.stage(key, blocks, end)
        for layer in range(len(LAYOUT.layers)):
            producer.layer_done(layer)
        producer.step_done()
    p.pool.release(blocks)
    return key


def admitted(d: Pod, key: TransferKey, ids: tuple[int, ...]) -> Landed | NoKv:
    assert d.kv.consumer is not None
    consumer = d.kv.consumer

    def asked() -> tuple[Landed | NoKv] | None:
        answer = consumer.admit(key, ids, seats=100, now=time.monotonic())
        return None if isinstance(answer, Wait) else (answer,)

    return until(asked)[0]


def settled(p: Pod, key: TransferKey) -> bool:
    """Whether P holds nothing more for `key`."""
    assert p.kv.producer is not None
    p.kv.producer.poll(time.monotonic())
    return p.kv.producer.is_settled(key)

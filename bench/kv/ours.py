"""The product: a connector of each role with its endpoint and I/O thread; the caller's thread is
the engine.

P's prompt is computed before; its layers are handed over one after another as a forward pass does.
The clock runs from OFFER wanted to DONE taken in, both on the engine's thread.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from bench.kv.contender import WAIT_S, Place
from bench.kv.memory import Ring
from bench.kv.shape import BLOCK_TOKENS, LAYERS, Case
from xpyd_core.keys import INSECURE_KEYS
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.connector.build import Connector, build
from xpyd_kv.memory.api import KvMemory
from xpyd_kv.memory.paged import PagedMemory
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.session.settings import KvSettings
from xpyd_kv.transport.api import Handler
from xpyd_kv.transport.endpoint import TcpEndpoint
from xpyd_kv.transport.host.shared_memory import SharedMemory, SharedMemoryPath
from xpyd_kv.transport.settings import Identity
from xpyd_kv.values import Landed, Wait
from xpyd_kv.wire.fit import wire_layout

_KEYS = (b"the key of a benchmark",)
_MAX_TOKENS = 1 << 20
Protection = Literal["none", "key", "tls"]
"""Nothing; the fleet's key in the handshake, as usual; the key, and TLS behind it."""


class RingPool:
    """A BlockPool whose blocks are the ring's: all of them are free, none is cached."""

    def __init__(self, ring: Ring, blocks: int) -> None:
        self.layout = "whole"
        self.block_size = BLOCK_TOKENS
        self.num_blocks = self.num_free = blocks
        self._ring = ring

    def match_prefix(self, token_ids: Sequence[int], *, salt: bytes, max_tokens: int) -> list[int]:
        return []

    def take(self, count: int) -> list[int] | None:
        return self._ring.take(count, self.layout)

    def retain(self, block_ids: Sequence[int]) -> None:
        """Nothing is counted."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Nothing is counted."""


class _End:
    """One role's half, started."""

    def __init__(
        self,
        role: Any,
        transport: str,
        *,
        memory: KvMemory,
        pool: RingPool,
        folder: Path,
        shared: SharedMemory | None,
        connections: int = 0,
        protection: Protection = "key",
    ) -> None:
        def make(handler: Handler) -> TcpEndpoint:
            return TcpEndpoint(
                handler,
                identity=Identity(f"{role}-{transport}", f"{role}-1", role),
                layout=wire_layout(memory.layout, factors={}, max_tokens=_MAX_TOKENS),
                keys=INSECURE_KEYS if protection == "none" else _KEYS,
                encrypted=protection == "tls",
                listen=Address("127.0.0.1", 0) if role == "D" else None,
                transports=(transport,),
                socket_dir=None if transport == "tcp" else folder / "sockets",
                paths=(SharedMemoryPath(shared),) if transport == "shm" else (),
                connections=connections,
            )

        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self.pool = pool
        self.layers = len(memory.layout.layers)
        self.kv: Connector = build(
            role,
            make_endpoint=make,
            memory=memory,
            pool=pool,
            wake=lambda: self._news.put(None),
            settings=KvSettings(store=StoreLimits(direct_free=0.0)),
        )
        self.kv.endpoint.start()

    @property
    def endpoint(self) -> TcpEndpoint:
        assert isinstance(self.kv.endpoint, TcpEndpoint)
        return self.kv.endpoint

    def next_key(self) -> TransferKey:
        return TransferKey(f"{next(self._numbers):032x}", 0)

    def sleep(self) -> None:
        """Until the I/O thread has something to say."""
        self._news.get(timeout=WAIT_S)

    def close(self) -> None:
        self.kv.endpoint.close(5.0)


class OurReceiver:
    def __init__(self, end: _End) -> None:
        self._end = end
        self.address = end.endpoint.listen_address

    def accept(self) -> None:
        """The endpoint's own business."""

    def receive(self, case: Case) -> list[int]:
        consumer = self._end.kv.consumer
        assert consumer is not None
        self._end.pool.layout = case.layout
        key = self._end.next_key()
        consumer.expect(key, wait_s=WAIT_S, now=time.monotonic())
        ids = _ids(case.tokens)
        while isinstance(answer := consumer.admit(key, ids, seats=1, now=time.monotonic()), Wait):
            self._end.sleep()
        if not isinstance(answer, Landed):
            raise RuntimeError(f"the KV did not come: {answer.reason}")
        self._end.pool.release(answer.block_ids)
        return list(answer.block_ids)

    def close(self) -> None:
        self._end.close()


class OurSender:
    def __init__(self, end: _End, address: Any) -> None:
        self._end = end
        self._address = Address(*address)

    def send(self, case: Case) -> list[int]:
        end, producer = self._end, self._end.kv.producer
        assert producer is not None
        end.pool.layout = case.layout
        blocks = end.pool.take(case.blocks)
        assert blocks is not None
        key, ids = end.next_key(), _ids(case.tokens)
        now = time.monotonic()
        producer.offer(key, self._address, ids, prompt_tokens=case.tokens, salt=b"", now=now)
        producer.stage(key, blocks, case.tokens)
        for layer in range(end.layers):
            producer.layer_done(layer)
        producer.step_done()
        while not producer.is_settled(key):
            end.sleep()
        state = producer.status(key).state
        if state != "granted":
            raise RuntimeError(f"the KV was not sent: {state}")
        return blocks

    def close(self) -> None:
        self._end.close()


_prompts: dict[int, tuple[int, ...]] = {}


def _ids(tokens: int) -> tuple[int, ...]:
    return _prompts.setdefault(tokens, tuple(range(tokens)))


def _end(role: str, place: Place, transport: str, connections: int, protection: Protection) -> _End:
    tensor = torch.from_numpy(place.arena.array)
    shape = (place.arena.blocks, 8, BLOCK_TOKENS, 256)
    layers = [tensor[n].view(torch.bfloat16).view(shape) for n in range(LAYERS)]
    return _End(
        role,
        transport,
        memory=PagedMemory(layers, layers=range(LAYERS)),
        pool=RingPool(place.ring, place.arena.blocks),
        folder=place.folder,
        shared=place.shared,
        connections=connections,
        protection=protection,
    )


def make_receiver(
    place: Place, *, transport: str, connections: int = 0, protection: Protection = "key"
) -> OurReceiver:
    return OurReceiver(_end("D", place, transport, connections, protection))


def make_sender(
    place: Place,
    address: Any,
    *,
    transport: str,
    connections: int = 0,
    protection: Protection = "key",
) -> OurSender:
    return OurSender(_end("P", place, transport, connections, protection), address)

"""A SendSession and its endpoint, which keeps frames until the test lets them go."""

from __future__ import annotations

from typing import Any

from tests.kv.kvfakes import LAYOUT, FakeKvMemory
from tests.kv.kvsim import SessionDriver, SimPeer
from xpyd_core.blocks import token_bytes
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.plan.frames import Area
from xpyd_kv.session.outgoing import OfferRequest, ReadyArea
from xpyd_kv.session.sending import SendSession
from xpyd_kv.transport.api import Done
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.messages import Mode

UUID = "b" * 32
KEY = TransferKey(UUID, 2)
REF: dict[str, Any] = {"uuid": UUID, "prompt_index": 2, "epoch": 0}
ADDRESS = Address("127.0.0.9", 21001)
TOKENS = 10
BLOCKS = (5, 3, 7)
LAYERS = len(LAYOUT.layers)
HELLO = wire.Hello(
    major=1, minor=0, engine_id="d", incarnation="d1", role="D", nonce=bytes(32)
)  # fmt: skip


class Driver(SessionDriver):
    """The session with an endpoint that keeps frames until the test lets them go."""

    def __init__(self, *, connected: bool = True, mode: Mode = "put_async") -> None:
        super().__init__()
        self.mode: Mode = mode
        self.peer: Any = SimPeer(ADDRESS, HELLO)
        self.connected = connected
        self.dialled: list[Address] = []
        self.queue: list[tuple[Any, list[memoryview], Done]] = []
        self.headers: list[wire.Data] = []
        self.memory = FakeKvMemory(8)
        self.memory.fill(BLOCKS, 1)
        self.session = SendSession(
            self.context(self.memory), self.events.append, metrics=self.metrics
        )
        if connected:
            self.session.peer_up(self.peer)

    # What the session uses of an Endpoint.
    def connect(self, address: Address, *, data: bool = False) -> Any:
        self.dialled.append(address)
        return self.peer if self.connected else None

    def send_data(self, peer: Any, make_header: Any, views: Any, done: Any) -> None:
        self.queue.append((make_header, list(views), done))

    # What the engine's side and D do.
    def offer(self, key: TransferKey = KEY) -> None:
        body = token_bytes(range(TOKENS))
        self.session.offer(OfferRequest(key, 0, ADDRESS, TOKENS, TOKENS, b"", body, self.mode))

    def ready(self, first_layer: int = 0, end_layer: int = LAYERS) -> None:
        areas = [
            ReadyArea(Area(layer, layer + 1, 0, len(BLOCKS)), BLOCKS)
            for layer in range(first_layer, end_layer)
        ]
        self.session.ready(KEY, 0, areas)

    def answer(self, message: wire.Message, body: bytes = b"") -> None:
        self.session.message(self.peer, message, body)

    def grant(self, skip_tokens: int = 0) -> None:
        self.answer(wire.Grant(**REF, skip_tokens=skip_tokens))

    def pull(self, skip_tokens: int = 0) -> None:
        self.answer(wire.Pull(**REF, skip_tokens=skip_tokens))

    def defer(self, ttl_ms: int = 30_000) -> None:
        self.answer(wire.Lease(**REF, ttl_ms=ttl_ms))

    def send_one(self, checksum: bytes = b"01234567") -> bool:
        make_header, _, done = self.queue.pop(0)
        header = make_header()
        if header is not None:
            self.headers.append(header)
        done(None if header is None else checksum)
        return header is not None

    def committed(self) -> None:
        self.offer()
        self.grant()
        self.ready()
        self.session.complete(KEY, 0)
        for _ in range(LAYERS):
            assert self.send_one()

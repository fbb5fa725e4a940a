"""Which connections an Endpoint has: strangers, dials, peers, and who refused our key lately."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from xpyd_core.request_id import Address
from xpyd_kv.transport.stream import Stream
from xpyd_kv.wire.messages import Hello

_MAX_REMEMBERED = 4096
V = TypeVar("V")


class _Memory(Generic[V]):
    """Values by address that are forgotten after `ttl_s`; the oldest where there are too many."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._values: dict[Address, tuple[float, V]] = {}

    def set(self, address: Address, value: V, now: float) -> None:
        values = self._values
        for other in [a for a, (until, _) in values.items() if until <= now]:
            del values[other]
        values.pop(address, None)
        while len(values) >= _MAX_REMEMBERED:
            del values[next(iter(values))]
        values[address] = (now + self._ttl_s, value)

    def get(self, address: Address, now: float) -> V | None:
        until, value = self._values.get(address, (now, None))
        return value if now < until else None


class Registry:
    """Every Stream is in exactly one of: strangers (accepted, not open), dials (dialled, not open),
    further ones of a peer (the same), peers (open); or nowhere. Insertion order is age."""

    def __init__(self, failed_auth_s: float, path_retry_s: float) -> None:
        self._strangers: dict[Stream, None] = {}
        self._dials: dict[Address, Stream] = {}
        self._further: dict[Stream, None] = {}
        self._peers: dict[Stream, None] = {}
        self._by_address: dict[Address, Stream] = {}
        self._by_instance: dict[tuple[str, int, bool], Stream] = {}
        self._refusals: _Memory[str] = _Memory(failed_auth_s)
        self._avoided: _Memory[frozenset[str]] = _Memory(path_retry_s)

    def __iter__(self) -> Iterator[Stream]:
        """All of them; the registry may be changed meanwhile."""
        return iter([*self._strangers, *self._dials.values(), *self._further, *self._peers])

    @property
    def strangers(self) -> int:
        return len(self._strangers)

    @property
    def peers(self) -> list[Stream]:
        return list(self._peers)

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    def oldest_stranger(self) -> Stream:
        return next(iter(self._strangers))

    def peer_at(self, address: Address) -> Stream | None:
        return self._by_address.get(address)

    def peer_of(self, hello: Hello) -> Stream | None:
        """The peer that is this instance, or this rank of it: a dialler's HELLO."""
        return self._by_instance.get((hello.engine_id, hello.rank, hello.data))

    def is_dialling(self, address: Address) -> bool:
        return address in self._dials

    def add(self, stream: Stream) -> None:
        """A new connection, accepted or dialled."""
        if stream.main is not None:
            self._further[stream] = None
        elif stream.address is None:
            self._strangers[stream] = None
        else:
            self._dials[stream.address] = stream

    def open(self, stream: Stream) -> Stream | None:
        """`stream` has become a peer; the older connection of the same instance, if there is."""
        self.remove(stream)
        self._peers[stream] = None
        if stream.address is not None:
            self._by_address[stream.address] = stream
        instance = (stream.hello.engine_id, stream.hello.rank, stream.is_data)
        older = self._by_instance.get(instance)
        self._by_instance[instance] = stream
        return older

    def remove(self, stream: Stream) -> None:
        """Forget `stream`, wherever it is."""
        self._strangers.pop(stream, None)
        self._further.pop(stream, None)
        address = stream.address
        if address is not None and self._dials.get(address) is stream:
            del self._dials[address]
        if stream not in self._peers:
            return
        del self._peers[stream]
        if address is not None and self._by_address.get(address) is stream:
            del self._by_address[address]
        instance = (stream.hello.engine_id, stream.hello.rank, stream.is_data)
        if self._by_instance.get(instance) is stream:
            del self._by_instance[instance]

    def remember_refusal(self, address: Address, reason: str, now: float) -> None:
        """Do not dial `address` for a while: it would refuse us again."""
        self._refusals.set(address, reason, now)

    def refusal(self, address: Address, now: float) -> str:
        """Why `address` is not to be dialled; '' when it may be."""
        return self._refusals.get(address, now) or ""

    def avoid(self, address: Address, transport: str, now: float) -> None:
        """Do without `transport` towards `address` for a while: it did not work."""
        self._avoided.set(address, self.avoided(address, now) | {transport}, now)

    def avoided(self, address: Address, now: float) -> frozenset[str]:
        """Transports to do without."""
        return self._avoided.get(address, now) or frozenset()

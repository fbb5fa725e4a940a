"""Which connections an Endpoint has, who refused our key lately, which P is in quarantine."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, TypeVar

import msgspec

from xpyd_core.request_id import Address
from xpyd_kv.transport.stream.stream import ClosedByPeerError, Stream
from xpyd_kv.wire import errors
from xpyd_kv.wire.handshake import Terms
from xpyd_kv.wire.messages import Hello

MISMATCHES = 3
"""The number of frames with a wrong checksum within the window that begins a quarantine."""
_MAX_PEERS = 4096


class Quarantine:
    """By engine_id, so that a new connection does not end it; time does."""

    def __init__(self, *, window_s: float, for_s: float) -> None:
        self._window_s = window_s
        self._for_s = for_s
        self._seen: dict[str, deque[float]] = {}
        self._until: dict[str, float] = {}

    def mismatch(self, engine_id: str, now: float) -> bool:
        """Count a broken frame of this P; True when its quarantine begins now."""
        times = self._seen.pop(engine_id, None) or deque(maxlen=MISMATCHES)
        times.append(now)
        if len(times) == MISMATCHES and times[0] > now - self._window_s:
            self._until.pop(engine_id, None)
            _make_room(self._until)
            self._until[engine_id] = now + self._for_s
            return True
        _make_room(self._seen)
        self._seen[engine_id] = times
        return False

    def holds(self, engine_id: str, now: float) -> bool:
        """Whether connections of this P are refused."""
        return now < self._until.get(engine_id, now)


def _make_room(peers: dict[str, float] | dict[str, deque[float]]) -> None:
    while len(peers) >= _MAX_PEERS:
        del peers[next(iter(peers))]


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
        """Iterate over all connections; the registry may be changed meanwhile."""
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


NAME = "striped"
_GROUP_BYTES = 16


def of_group(terms: Terms, main: Stream | None, number: int) -> Terms:
    """P's, with its group: a new one, or that of `main`."""
    if NAME not in terms.hello.transports:
        return terms
    if main is None:
        hello = msgspec.structs.replace(terms.hello, group=os.urandom(_GROUP_BYTES).hex())
    else:
        hello = msgspec.structs.replace(terms.hello, group=main.protocol.ours.group, link=number)
    return replace(terms, hello=hello)


def is_further(stream: Stream) -> bool:
    """Whether this open connection is one for DATA only."""
    if stream.address is not None:
        return stream.main is not None
    return stream.hello.link > 0


def number_of(stream: Stream) -> int:
    """By which number both sides know it."""
    return (stream.hello if stream.main is None else stream.protocol.ours).link


def main_of(stream: Stream, peer: Stream | None) -> Stream:
    """The peer that it belongs to; D: `peer` is that of its HELLO's instance. Raises when there is
    none."""
    if stream.main is not None:
        if stream.main.closing is not None:
            raise ClosedByPeerError("its first connection has ended")
        return stream.main
    theirs = stream.hello
    if (
        peer is None
        or not theirs.group
        or stream.transport != NAME
        or peer.transport != NAME
        or (peer.hello.group, peer.hello.incarnation) != (theirs.group, theirs.incarnation)
    ):
        raise stream.protocol.refuse(errors.GROUP)
    return peer

"""Ranks in processes of their own: their messages on a Channel, and the memory that they hold.

The engine's process keeps the books of that memory: a unit is one block of all layers of all ranks,
the same place in each rank's arena, as a block is in each rank's cache. So a Room there is only a
Place, which each rank resolves in its own memory (`memory.space`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from xpyd_core.errors import XpydError
from xpyd_kv.memory.api import Deviation, Place, Room, SpillKind
from xpyd_kv.memory.buddy import Extent
from xpyd_kv.memory.device import View
from xpyd_kv.memory.paged import farthest
from xpyd_kv.memory.store import DirectLanding, StagedLanding
from xpyd_kv.ranks.engine import Channel
from xpyd_kv.session import pairs

# --- messages


def _place_of(room: object) -> Place:
    """Return the place that a Channel carries for a lease of the engine's store."""
    leased = room.room if isinstance(room, DirectLanding | StagedLanding) else room
    if not isinstance(leased, _RankedRoom):
        raise XpydError("a room that ranks know nothing of")
    return leased.place


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_place_of)
_FROM_RANK: msgspec.msgpack.Decoder[pairs.FromRank] = msgspec.msgpack.Decoder(pairs.FromRank)


def encode(message: pairs.ToRank | pairs.FromRank) -> bytes:
    """Encode a message for the Channel."""
    return _ENCODER.encode(message)


def to_rank_decoder(room: Callable[[Place], Room]) -> Callable[[bytes], pairs.ToRank]:
    """Decodes what the engine says. `room`: what a place is on this rank."""

    def resolve(_type: type, place: object) -> Room:
        return room(msgspec.convert(place, Place))

    decoder: msgspec.msgpack.Decoder[pairs.ToRank] = msgspec.msgpack.Decoder(
        pairs.ToRank, dec_hook=resolve
    )
    return decoder.decode


def post_to(channel: Channel) -> pairs.Post:
    """Posts messages to the rank at the other end, whose runner says itself what is in its
    cache."""

    def post(message: pairs.ToRank) -> None:
        if not isinstance(message, pairs.Ready | pairs.Complete):
            channel.post(encode(message))

    return post


def listen(
    channels: Sequence[Channel],
    hear: Callable[[int, pairs.FromRank], None],
    on_copied: Callable[[pairs.Copied | pairs.Compared], None],
) -> None:
    """Pass on each message of each rank, on its Channel's thread: Copied and Compared to
    `on_copied`, all others to `hear` with the rank's number."""

    def receive(rank: int, encoded: bytes) -> None:
        message = _FROM_RANK.decode(encoded)
        if isinstance(message, pairs.Copied | pairs.Compared):
            on_copied(message)
        else:
            hear(rank, message)

    for rank, channel in enumerate(channels):
        channel.listen(partial(receive, rank))


# --- memory


class _Ticket:
    """An Event: one copy on all ranks; or a Comparison on all of them."""

    def __init__(self, ranks: int) -> None:
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._left = ranks
        self._found: list[Deviation] = []

    def one_done(self, found: Deviation | None = None) -> None:
        """Any thread: one rank is through."""
        with self._lock:
            if found is not None:
                self._found.append(found)
            self._left -= 1
            if not self._left:
                self._done.set()

    def is_done(self) -> bool:
        """See Event. Never, where a rank's device fails: the instance ends then."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """See Event."""
        return self._done.wait(timeout_s)

    @property
    def worst(self) -> Deviation:
        """See Comparison."""
        return farthest(self._found)


class RankedCopies:
    """Copies between the cache and other memory, on every rank. `wake` is called when a rank has
    finished a copy."""

    def __init__(self, channels: Sequence[Channel], wake: Callable[[], None]) -> None:
        self._posts = [post_to(channel) for channel in channels]
        self._wake = wake
        self._tickets: dict[int, _Ticket] = {}
        self._number = 0

    def begin(
        self, place: Place, block_ids: Sequence[int], *, into_cache: bool, first_block: int
    ) -> _Ticket:
        """Engine thread. What is copied stays as it is until the ticket is done."""
        self._number += 1
        copy = pairs.Copy(
            number=self._number,
            place=place,
            block_ids=tuple(block_ids),
            into_cache=into_cache,
            first_block=first_block,
        )
        return self._post(copy)

    def compare(self, place: Place, block_ids: Sequence[int], tokens: int) -> _Ticket:
        """Engine thread: see StagingRoom."""
        self._number += 1
        compare = pairs.Compare(
            number=self._number, place=place, block_ids=tuple(block_ids), tokens=tokens
        )
        return self._post(compare)

    def _post(self, message: pairs.Copy | pairs.Compare) -> _Ticket:
        ticket = self._tickets[message.number] = _Ticket(len(self._posts))
        for post in self._posts:
            post(message)
        # Those that are through were taken by those who waited for them.
        self._tickets = {n: t for n, t in self._tickets.items() if not t.is_done()}
        return ticket

    def on_copied(self, message: pairs.Copied | pairs.Compared) -> None:
        """Any thread: a rank is through."""
        ticket = self._tickets.get(message.number)
        if ticket is not None:
            ticket.one_done(message.worst if isinstance(message, pairs.Compared) else None)
            self._wake()


class _RankedRoom:
    """See StagingRoom: the same place on each rank."""

    def __init__(self, place: Place, copies: RankedCopies) -> None:
        self.place = place
        self._copies = copies

    def views(
        self, first_layer: int, end_layer: int, first_block: int, end_block: int
    ) -> Sequence[View]:
        """Raise XpydError: the bytes are in the processes of the ranks."""
        raise XpydError("the bytes are on the ranks")

    def copy(self, block_ids: Sequence[int], *, into_cache: bool, first_block: int = 0) -> _Ticket:
        """See StagingRoom."""
        return self._copies.begin(
            self.place, block_ids, into_cache=into_cache, first_block=first_block
        )

    def compare(self, block_ids: Sequence[int], tokens: int) -> _Ticket:
        """See StagingRoom."""
        return self._copies.compare(self.place, block_ids, tokens)


class RankedSpace:
    """See Space. Engine thread only."""

    def __init__(self, unit_bytes: int, copies: RankedCopies) -> None:
        self.unit_bytes = unit_bytes
        self._copies = copies

    def blocks(self, block_ids: Sequence[int]) -> Room:
        """See Space."""
        return _RankedRoom(Place("blocks", blocks=tuple(block_ids)), self._copies)

    def staging_room(self, kind: SpillKind, extents: Sequence[Extent]) -> _RankedRoom:
        """See Space."""
        place = Place(kind, extents=tuple((e.offset, e.units) for e in extents))
        return _RankedRoom(place, self._copies)

    @property
    def regions(self) -> Sequence[View]:
        """Return no region: the ranks have the memory."""
        return ()

    def close(self, deadline_s: float) -> None:
        """Do nothing: the ranks have the memory."""

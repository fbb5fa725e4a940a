"""The ranks of an engine, as its process talks to them: each over a Channel.

Messages to them are encoded here and posted; their reports go to the I/O thread. Copies
(`RankedCopies`) are begun on the engine's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from xpyd_core.request_id import TransferKey
from xpyd_kv import metrics as figures
from xpyd_kv.memory.api import Place
from xpyd_kv.metrics import Counters, KvMetrics, RankCounts
from xpyd_kv.ranks.engine import Channel
from xpyd_kv.ranks.store import place_of
from xpyd_kv.session import pairs
from xpyd_kv.session.outgoing import ReadyArea
from xpyd_kv.session.pairs import (
    Opened,
    Opening,
    PairEnded,
    PairFlushed,
    PairLanded,
    PairLost,
    PairQuiet,
    ReceiveReport,
    Sending,
    SendReport,
    Target,
)
from xpyd_kv.session.probing import ProbeResult

Call = Callable[[Callable[[], None]], None]
"""Endpoint.call."""
OnSent = Callable[[int, TransferKey, int, SendReport], None]
"""Fanout.on_report."""
OnProbed = Callable[[int, tuple[int, int], ProbeResult], None]
"""Probes.pair_probed."""
OnReceived = Callable[[int, TransferKey, int, ReceiveReport], None]
"""Fanin.on_report."""


class RemoteSendingRank:
    """See SendingRank. Its runner tells it what stands in its cache."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, sending: Sending) -> None:
        stash = None if sending.stash is None else place_of(sending.stash)
        self._post(
            pairs.Send(
                **pairs.names_of(sending.key, sending.epoch),
                tokens=sending.tokens,
                skip_tokens=sending.skip_tokens,
                mode=sending.mode,
                incarnation=sending.incarnation,
                targets=_written(sending.targets),
                stash=stash,
            )
        )

    def ready(self, key: TransferKey, epoch: int, areas: Sequence[ReadyArea]) -> None:
        """Nothing."""

    def complete(self, key: TransferKey, epoch: int) -> None:
        """Nothing."""

    def cancel(self, key: TransferKey, epoch: int, reason: str) -> None:
        self._post(pairs.Cancel(**pairs.names_of(key, epoch), reason=reason))

    def forget(self, key: TransferKey, epoch: int) -> None:
        self._post(pairs.Forget(**pairs.names_of(key, epoch)))

    def probe(self, number: int, targets: Sequence[Target]) -> None:
        self._post(pairs.Probe(number=number, targets=_written(targets)))

    def _post(self, message: pairs.ToRank) -> None:
        self._channel.post(pairs.encode(message))


def _written(targets: Sequence[Target]) -> tuple[tuple[int, str, int], ...]:
    return tuple((each.rank, each.address.host, each.address.port) for each in targets)


class RemoteReceivingRank:
    """See ReceivingRank."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def open(self, opening: Opening) -> None:
        message = pairs.Open(
            **pairs.names_of(opening.key, opening.epoch),
            engine_id=opening.engine_id,
            incarnation=opening.incarnation,
            tokens=opening.tokens,
            skip_tokens=opening.skip_tokens,
            sources=opening.sources,
            place=place_of(opening.room),
        )
        self._channel.post(pairs.encode(message))

    def stop(self, key: TransferKey, epoch: int, reason: str) -> None:
        self._channel.post(pairs.encode(pairs.Stop(**pairs.names_of(key, epoch), reason=reason)))


class _Ticket:
    """One copy on all ranks: an Event."""

    def __init__(self, ranks: int) -> None:
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._left = ranks

    def one_done(self) -> None:
        """Any thread: one rank is through."""
        with self._lock:
            self._left -= 1
            if not self._left:
                self._done.set()

    def is_done(self) -> bool:
        """See Event. Never, where a rank's device fails: the instance ends then."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """See Event."""
        return self._done.wait(timeout_s)


class RankedCopies:
    """Copies between the cache and what stands beside it, on every rank. `wake`: one is through."""

    def __init__(self, channels: Sequence[Channel], wake: Callable[[], None]) -> None:
        self._channels = channels
        self._wake = wake
        self._tickets: dict[int, _Ticket] = {}
        self._number = 0

    def begin(self, place: Place, block_ids: Sequence[int], *, into_cache: bool) -> _Ticket:
        """Engine thread. What is copied stays as it is until the ticket is done."""
        self._number += 1
        ticket = self._tickets[self._number] = _Ticket(len(self._channels))
        message = pairs.encode(
            pairs.Copy(
                number=self._number, place=place, block_ids=tuple(block_ids), into_cache=into_cache
            )
        )
        for channel in self._channels:
            channel.post(message)
        # Those that are through were taken by whoever waited for them.
        self._tickets = {n: t for n, t in self._tickets.items() if not t.is_done()}
        return ticket

    def on_copied(self, copied: pairs.Copied) -> None:
        """Any thread: a rank is through."""
        ticket = self._tickets.get(copied.number)
        if ticket is not None:
            ticket.one_done()
            self._wake()


class RankReports:
    """Hears all ranks of one engine. On each Channel's thread, and on to the I/O thread."""

    def __init__(
        self,
        channels: Sequence[Channel],
        *,
        call: Call,
        metrics: KvMetrics,
        counters: Counters,
        copies: RankedCopies,
        on_sent: OnSent | None = None,
        on_probed: OnProbed | None = None,
        on_received: OnReceived | None = None,
    ) -> None:
        """`metrics` and `counters`: what the ranks count is added there."""
        self._call = call
        self._metrics = metrics
        self._counters = counters
        self._copies = copies
        self._on_sent = on_sent
        self._on_probed = on_probed
        self._on_received = on_received
        for rank, channel in enumerate(channels):
            channel.listen(partial(self._heard, rank))

    def _heard(self, rank: int, message: bytes) -> None:
        said = pairs.decode_from_rank(message)
        if isinstance(said, pairs.Copied):
            self._copies.on_copied(said)
        else:
            self._call(partial(self._report, rank, said))

    def _report(self, rank: int, said: pairs.FromRank) -> None:
        assert not isinstance(said, pairs.Copied)
        counted = getattr(said, "figures", None)
        if isinstance(counted, RankCounts):
            figures.add(self._metrics, counted)
        if isinstance(said, pairs.Counted):
            self._counters.add(said.endpoint.numbers, said.endpoint.named)
            return
        if isinstance(said, pairs.Probed):
            if self._on_probed is not None:
                self._on_probed(said.number, (rank, said.destination), _result_of(said))
            return
        key = TransferKey(said.uuid, said.prompt_index)
        match said:
            case pairs.Flushed() | pairs.Ended() if self._on_sent is not None:
                self._on_sent(rank, key, said.epoch, _sent(said))
            case pairs.Taking() | pairs.Landed() | pairs.Lost() | pairs.Quiet() if (
                self._on_received is not None
            ):
                self._on_received(rank, key, said.epoch, _received(said))
            case _:
                return


def _result_of(said: pairs.Probed) -> ProbeResult:
    return ProbeResult(
        ok=said.ok,
        transport=said.transport,
        num_bytes=said.num_bytes,
        seconds=said.seconds,
        digest_matches=said.digest_matches,
        reason=said.reason,
    )


def _sent(said: pairs.Flushed | pairs.Ended) -> SendReport:
    if isinstance(said, pairs.Flushed):
        return PairFlushed(said.destination, said.areas)
    return PairEnded(said.destination, said.reason, said.transport)


def _received(said: pairs.Taking | pairs.Landed | pairs.Lost | pairs.Quiet) -> ReceiveReport:
    match said:
        case pairs.Taking():
            return Opened()
        case pairs.Landed():
            return PairLanded(said.source, said.transport)
        case pairs.Lost():
            return PairLost(said.source, said.reason)
        case pairs.Quiet():
            return PairQuiet(said.source)

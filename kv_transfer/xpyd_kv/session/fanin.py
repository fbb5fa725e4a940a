"""One transfer of D's engine, taken in by its ranks: each pair of ranks is a transfer by itself.

Between ReceiveSession, which speaks with P's engine, and the ranks (`pairs`): it tells them of
a landing before P hears of it, and counts the pairs until all have landed or are quiet. Pure; the
I/O thread of the engine's process owns it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from xpyd_core.request_id import TransferKey
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.plan.transfers import pairs_between, transfer_salt
from xpyd_kv.session.incoming import Incoming, ReceiveState
from xpyd_kv.session.pairs import (
    Opened,
    Opening,
    PairLanded,
    PairLost,
    PairQuiet,
    ReceiveReport,
    ReceivingRank,
)
from xpyd_kv.wire.fit import engine_layout_of


class Owner(Protocol):
    """The session, as the pairs' ends see it."""

    def find(self, key: TransferKey, epoch: int) -> Incoming | None:
        """The transfer, live or quiescing."""
        ...

    def opened(self, transfer: Incoming) -> None:
        """All ranks take what comes: GRANT."""
        ...

    def landed(self, transfer: Incoming, transport: str) -> None:
        """All of it is here."""
        ...

    def give_up(self, transfer: Incoming, reason: str) -> None:
        """It cannot go on."""
        ...

    def settle(self, transfer: Incoming) -> None:
        """One that is given up has a pair less that is not quiet."""
        ...


class Fanin:
    """Our ranks, of which a rank itself has none. `engine` is how the cache is divided over them;
    `owner` is set by the session."""

    owner: Owner

    def __init__(self, ranks: Sequence[ReceivingRank], engine: EngineLayout) -> None:
        self._ranks = tuple(ranks)
        self._engine = engine

    def open(self, transfer: Incoming) -> None:
        """It has a landing: tell the ranks."""
        assert transfer.landing is not None
        peer = transfer.peer
        theirs = engine_layout_of(peer.layout)
        salt = transfer_salt(transfer.key) % theirs.replicas
        transfer.pairs = set(pairs_between(theirs, self._engine, salt))
        sources: dict[int, list[int]] = defaultdict(list)
        for source, destination in sorted(transfer.pairs):
            sources[destination].append(source)
        transfer.unopened = set(sources)
        for rank, its in sources.items():
            self._ranks[rank].open(
                Opening(
                    key=transfer.key,
                    epoch=transfer.epoch,
                    engine_id=peer.hello.engine_id,
                    incarnation=peer.hello.incarnation,
                    tokens=transfer.tokens,
                    skip_tokens=transfer.skip_tokens,
                    sources=tuple(its),
                    room=transfer.landing,
                )
            )

    def stop(self, transfer: Incoming, reason: str) -> None:
        """Nothing more is taken; the pairs that are open say when they are quiet."""
        for rank in sorted({destination for _, destination in transfer.pairs}):
            self._ranks[rank].stop(transfer.key, transfer.epoch, reason)

    def on_report(self, rank: int, key: TransferKey, epoch: int, report: ReceiveReport) -> None:
        """What a rank says of a transfer."""
        transfer = self.owner.find(key, epoch)
        if transfer is None:
            return
        match report:
            case Opened():
                self._on_opened(transfer, rank)
            case PairLanded():
                self._on_landed(transfer, (report.source, rank), report.transport)
            case PairLost():
                is_open = (report.source, rank) in transfer.pairs
                if is_open and transfer.state is not ReceiveState.CANCELLING:
                    self.owner.give_up(transfer, report.reason)
            case PairQuiet():
                transfer.pairs.discard((report.source, rank))
                if transfer.state is ReceiveState.CANCELLING:
                    self.owner.settle(transfer)

    def _on_opened(self, transfer: Incoming, rank: int) -> None:
        if rank not in transfer.unopened:
            return
        transfer.unopened.discard(rank)
        if not transfer.unopened and transfer.state is not ReceiveState.CANCELLING:
            self.owner.opened(transfer)

    def _on_landed(self, transfer: Incoming, pair: tuple[int, int], transport: str) -> None:
        if pair not in transfer.pairs:
            return
        transfer.pairs.discard(pair)
        transfer.transports.add(transport)
        if transfer.state is ReceiveState.CANCELLING:
            self.owner.settle(transfer)
        elif not transfer.pairs:
            self.owner.landed(transfer, min(transfer.transports))

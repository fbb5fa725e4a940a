"""One transfer of P's engine, carried out by its ranks: each pair of ranks is a transfer by itself.

Between SendSession, which speaks with D's engine, and the ranks (`pairs`): it tells them when D
has room, and counts the pairs until all have ended. Pure; the I/O thread of the engine's process
owns it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from xpyd_core.errors import UserError
from xpyd_core.request_id import Address, TransferKey, is_dialable, parse_address
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.plan.transfers import pairs_between, transfer_salt
from xpyd_kv.session.events import SendFlushed
from xpyd_kv.session.outgoing import Outgoing, ReadyArea, SendState
from xpyd_kv.session.pairs import PairEnded, PairFlushed, Sending, SendingRank, SendReport, Target
from xpyd_kv.session.probing import ProbeResult
from xpyd_kv.transport.api import Peer
from xpyd_kv.wire.fit import engine_layout_of


class Owner(Protocol):
    """The session, as the pairs' ends see it."""

    def find(self, key: TransferKey, epoch: int) -> Outgoing | None:
        """The transfer, while it is not over."""
        ...

    def delivered(self, transfer: Outgoing, transport: str) -> None:
        """D has all of it."""
        ...

    def give_up(self, transfer: Outgoing, reason: str) -> None:
        """It cannot go on."""
        ...

    def settle(self, transfer: Outgoing) -> None:
        """One that is given up has a pair less."""
        ...

    def report(self, event: SendFlushed, /) -> None:
        """To the engine's side."""
        ...

    def pair_probed(self, number: int, pair: tuple[int, int], result: ProbeResult) -> None:
        """See Probes."""
        ...


class Fanout:
    """Our ranks, of which a rank itself has none. `engine` is how the cache is divided over them;
    `owner` is set by the session."""

    owner: Owner

    def __init__(self, ranks: Sequence[SendingRank], engine: EngineLayout) -> None:
        self._ranks = tuple(ranks)
        self._engine = engine

    def start(self, transfer: Outgoing, skip_tokens: int) -> None:
        """D has room: each rank sends its part."""
        peer, request = transfer.peer, transfer.request
        assert peer is not None
        addresses = _addresses_of(peer)
        if addresses is None:
            self.owner.give_up(transfer, "address")
            return
        salt = transfer_salt(request.key) % self._engine.replicas
        transfer.pairs = set(pairs_between(self._engine, engine_layout_of(peer.layout), salt))
        transfer.flushed_by = dict.fromkeys(transfer.pairs, 0)
        targets: dict[int, list[Target]] = defaultdict(list)
        for source, destination in sorted(transfer.pairs):
            targets[source].append(Target(destination, addresses[destination]))
        for source, its in targets.items():
            self._ranks[source].send(
                Sending(
                    key=request.key,
                    epoch=request.epoch,
                    tokens=request.tokens,
                    skip_tokens=skip_tokens,
                    mode=request.mode,
                    incarnation=peer.hello.incarnation,
                    targets=tuple(its),
                    stash=transfer.stash,
                )
            )
        areas, transfer.waiting = transfer.waiting, []
        self.ready(transfer, areas)
        if transfer.complete:
            self.complete(transfer)

    def ready(self, transfer: Outgoing, areas: Sequence[ReadyArea]) -> None:
        """These stand in the cache."""
        request = transfer.request
        for rank in self._ranks:
            rank.ready(request.key, request.epoch, areas)

    def complete(self, transfer: Outgoing) -> None:
        """Nothing more follows."""
        for rank in self._ranks:
            rank.complete(transfer.request.key, transfer.request.epoch)

    def cancel(self, transfer: Outgoing) -> None:
        """Stop the pairs that are not over."""
        request = transfer.request
        for source in sorted({source for source, _ in transfer.pairs}):
            self._ranks[source].cancel(request.key, request.epoch, transfer.reason)

    def forget(self, key: TransferKey, epoch: int) -> None:
        """The transfer is over."""
        for rank in self._ranks:
            rank.forget(key, epoch)

    def probe(self, number: int, peer: Peer) -> dict[tuple[int, int], Address] | None:
        """See ProbeRanks: whatever the salt of a transfer."""
        addresses = _addresses_of(peer)
        if addresses is None:
            return None
        theirs = engine_layout_of(peer.layout)
        salts = range(self._engine.replicas)
        pairs = {pair for salt in salts for pair in pairs_between(self._engine, theirs, salt)}
        for source, rank in enumerate(self._ranks):
            its = sorted(destination for one, destination in pairs if one == source)
            rank.probe(number, tuple(Target(one, addresses[one]) for one in its))
        return {(source, one): addresses[one] for source, one in pairs}

    def on_probed(self, number: int, pair: tuple[int, int], result: ProbeResult) -> None:
        """What a rank says of the way to one of D's."""
        self.owner.pair_probed(number, pair, result)

    def on_report(self, rank: int, key: TransferKey, epoch: int, report: SendReport) -> None:
        """What a rank says of one of its pairs."""
        transfer = self.owner.find(key, epoch)
        pair = (rank, report.destination)
        if transfer is None or pair not in transfer.pairs:
            return
        match report:
            case PairFlushed():
                transfer.flushed_by[pair] = report.areas
                self._report_flushed(transfer)
            case PairEnded():
                self._on_ended(transfer, pair, report)

    def _on_ended(self, transfer: Outgoing, pair: tuple[int, int], ended: PairEnded) -> None:
        transfer.pairs.discard(pair)
        transfer.transports.add(ended.transport)
        if transfer.state is SendState.CANCELLING:
            self.owner.settle(transfer)
        elif ended.reason:
            self.owner.give_up(transfer, ended.reason)
        elif not transfer.pairs:
            self.owner.delivered(transfer, min(transfer.transports))

    def _report_flushed(self, transfer: Outgoing) -> None:
        least = min(transfer.flushed_by.values())
        if least > transfer.flushed:
            transfer.flushed = least
            self.owner.report(SendFlushed(transfer.request.key, transfer.request.epoch, least))


def _addresses_of(peer: Peer) -> Sequence[Address] | None:
    """Where D's ranks are; None where that is nothing to dial."""
    if not peer.layout.ranks:
        return None if peer.address is None else [peer.address]
    try:
        addresses = [parse_address(text) for text in peer.layout.ranks]
    except UserError:
        return None
    return addresses if all(map(is_dialable, addresses)) else None

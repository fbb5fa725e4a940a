"""The transfers that a D has open: their moves, their deadlines, and when a landing is quiet.

The part of ReceiveSession that knows no frame. There is one live transfer for a key; those that
wait until no write can land are apart and keep their landing. What our ranks take in is counted
here: each pair of ranks is a transfer by itself (`pairs`); the whole has landed or is quiet when
all pairs are. Pure; the I/O thread owns it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from xpyd_core.errors import XpydError
from xpyd_core.request_id import TransferKey
from xpyd_kv.metrics import KvMetrics
from xpyd_kv.plan.transfers import pairs_between, transfer_salt
from xpyd_kv.session import pairs
from xpyd_kv.session.deadlines import Alarm, Deadlines, Tombstones
from xpyd_kv.session.events import ReceiveEnded, ReceiveEvent, ReceiveLanded, ReceiveQuiet
from xpyd_kv.session.incoming import (
    RECEIVE_MOVES,
    RECEIVING,
    Incoming,
    ReceiveState,
    done_of,
    grant_of,
    lease_of,
)
from xpyd_kv.session.outgoing import cancel_of, cancelled_of
from xpyd_kv.session.settings import SessionContext
from xpyd_kv.transport.api import Peer
from xpyd_kv.wire.fit import engine_layout_of


class Awaited:
    """Openings whose P rank has sent no frame yet. They expire `lease_s` after they came."""

    def __init__(self, lease_s: float, alarm: Alarm) -> None:
        self._lease_s = lease_s
        self._openings: dict[TransferKey, pairs.Open] = {}
        self._deadlines: Deadlines[TransferKey] = Deadlines(alarm)

    def __len__(self) -> int:
        return len(self._openings)

    def add(self, opening: pairs.Open, now: float) -> pairs.Open | None:
        """Add an opening; return the older one of the same key, if there is one."""
        older = self._openings.get(opening.key)
        self._openings[opening.key] = opening
        self._deadlines.set(opening.key, now + self._lease_s)
        return older

    def take(self, key: TransferKey, epoch: int, peer: Peer | None = None) -> pairs.Open | None:
        """Remove and return the opening if it is of this epoch and (where a peer is given) for this
        peer."""
        opening = self._openings.get(key)
        if opening is None or opening.epoch != epoch:
            return None
        who = (opening.engine_id, opening.incarnation)
        if peer is not None and (peer.hello.engine_id, peer.hello.incarnation) != who:
            return None
        self._deadlines.clear(key)
        return self._openings.pop(key)

    def due(self, now: float) -> list[pairs.Open]:
        """Remove and return the openings that have expired."""
        return [self._openings.pop(key) for key in self._deadlines.due(now)]

    def next(self) -> float | None:
        """Return the time at which the next opening expires."""
        return self._deadlines.next()


_Ref = tuple[TransferKey, int]
_UNANSWERED = frozenset({ReceiveState.OFFERED, ReceiveState.DEFERRED})


class Arrivals:
    """Live and quiescing transfers of one D."""

    def __init__(
        self,
        context: SessionContext,
        report: Callable[[ReceiveEvent], None],
        *,
        metrics: KvMetrics,
        tombstones: Tombstones,
        ranks: Sequence[pairs.Post],
    ) -> None:
        """`ranks`: the ranks of this engine."""
        self._endpoint = context.endpoint
        self._limits = context.settings.limits
        self._clock = context.clock
        self._engine = context.engine
        self._report = report
        self._metrics = metrics
        self._over = tombstones
        self._ranks = tuple(ranks)
        self.live: dict[TransferKey, Incoming] = {}
        """The transfer of a key that is not over."""
        self._quiescing: dict[_Ref, Incoming] = {}
        self._deadlines: Deadlines[_Ref] = Deadlines(context.alarm)

    def __len__(self) -> int:
        return len(self.live) + len(self._quiescing)

    def quiescing(self, key: TransferKey, epoch: int) -> Incoming | None:
        """The given-up transfer into whose landing a write may still come."""
        return self._quiescing.get((key, epoch))

    def find(self, key: TransferKey, epoch: int) -> Incoming | None:
        """The transfer, live or quiescing."""
        live = self.live.get(key)
        if live is not None and live.epoch == epoch:
            return live
        return self._quiescing.get((key, epoch))

    def add(self, transfer: Incoming) -> None:
        """Add a new transfer; its key must have no live one."""
        self.live[transfer.key] = transfer
        self._metrics.open_transfers += 1
        self.arm(transfer)

    # --- moves

    def move(self, transfer: Incoming, state: ReceiveState) -> None:
        """Change the state; XpydError for a move that the table does not have."""
        if state not in RECEIVE_MOVES[transfer.state]:
            raise XpydError(f"{transfer.key}: {transfer.state.name} -> {state.name}")
        transfer.state = state

    def opened(self, transfer: Incoming) -> None:
        """Send GRANT: all processes that receive the bytes are ready."""
        self.move(transfer, ReceiveState.GRANTED)
        transfer.granted_s = transfer.activity_s = self._clock()
        self.arm(transfer)
        self._endpoint.send(transfer.peer, grant_of(transfer))

    def landed(self, transfer: Incoming, transport: str) -> None:
        """Finish a transfer whose bytes have all arrived and agree with COMMIT."""
        self.move(transfer, ReceiveState.LANDED)
        self.arm(transfer)
        self._metrics.ended("")
        self._metrics.transferred(transport, self._clock() - transfer.granted_s)
        if transfer.placing is not None:
            self._endpoint.send(transfer.peer, done_of(transfer))
        if transfer.is_of_rank:
            self.drop(transfer)
        self._report(ReceiveLanded(transfer.key, transfer.epoch, transport))

    def touch(self, transfer: Incoming) -> None:
        """Restart the lease: a frame came."""
        transfer.activity_s = self._clock()
        self.arm(transfer)

    def drop(self, transfer: Incoming) -> None:
        """End a live transfer without a report and without a message."""
        del self.live[transfer.key]
        self._metrics.open_transfers -= 1
        self._deadlines.clear((transfer.key, transfer.epoch))
        self._over.end(transfer.key, transfer.epoch, self._clock())

    def withdraw(self, transfer: Incoming, reason: str) -> None:
        """End a live transfer whose landing no write can reach: P said so, P is gone, or all had
        landed."""
        self._end(transfer, reason)
        if transfer.landing is not None:
            self._report(ReceiveQuiet(transfer.key, transfer.epoch))

    def give_up(self, transfer: Incoming, reason: str) -> None:
        """End a live transfer and send CANCEL to P, whose frames may still land until it
        answers."""
        if transfer.landing is None:
            self._end(transfer, reason)
        else:
            self.begin_quiescing(transfer, reason)
        cancel = cancel_of(transfer.key, transfer.epoch, reason)
        self._endpoint.send(transfer.peer, cancel)

    def end(self, transfer: Incoming, reason: str) -> None:
        """End a live transfer in any state."""
        if transfer.state is ReceiveState.LANDED:
            self.withdraw(transfer, reason)
        else:
            self.give_up(transfer, reason)

    def begin_quiescing(self, transfer: Incoming, reason: str) -> None:
        """Refuse the KV from now on; the landing waits until it is quiet."""
        self._end(transfer, reason)
        self.move(transfer, ReceiveState.CANCELLING)
        self._quiescing[transfer.key, transfer.epoch] = transfer
        self.arm(transfer)
        for rank in sorted({destination for _, destination in transfer.pairs}):
            stop = pairs.Stop(key=transfer.key, epoch=transfer.epoch, reason=reason)
            self._ranks[rank](stop)

    def settle(self, transfer: Incoming) -> None:
        """Answer CANCEL and free the landing as soon as no frame is being written."""
        if transfer.writing or transfer.pairs:
            return
        if transfer.owes_cancelled:
            transfer.owes_cancelled = False
            self._endpoint.send(transfer.peer, cancelled_of(transfer.key, transfer.epoch))
        if transfer.peer_quiet:
            self._quiet(transfer)

    def peer_down(self, peer: Peer) -> None:
        """End the transfers of a closed connection. Only bytes that our ranks still receive may
        land."""
        for transfer in [t for t in self._quiescing.values() if t.peer is peer]:
            self._peer_is_gone(transfer)
            self.settle(transfer)
        for transfer in [t for t in self.live.values() if t.peer is peer]:
            if transfer.state is ReceiveState.LANDED:
                continue
            self._peer_is_gone(transfer)
            if transfer.pairs:
                self.begin_quiescing(transfer, "peer_lost")
            else:
                self.withdraw(transfer, "peer_lost")

    def _peer_is_gone(self, transfer: Incoming) -> None:
        transfer.writing = 0
        transfer.peer_quiet = True
        transfer.owes_cancelled = False

    def _end(self, transfer: Incoming, reason: str) -> None:
        self.drop(transfer)
        if transfer.state is not ReceiveState.LANDED:
            self._metrics.ended(reason)
        self._report(ReceiveEnded(transfer.key, transfer.epoch, reason))

    def _quiet(self, transfer: Incoming) -> None:
        ref = (transfer.key, transfer.epoch)
        del self._quiescing[ref]
        self._deadlines.clear(ref)
        self._report(ReceiveQuiet(*ref))

    # --- what our ranks take in

    def open_ranks(self, transfer: Incoming) -> None:
        """Send Open to our ranks, before GRANT goes to P."""
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
            self._ranks[rank](
                pairs.Open(
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

    def hear(self, rank: int, message: pairs.FromRank) -> None:
        """Handle a message of one of our ranks."""
        if not isinstance(message, pairs.Opened | pairs.Landed | pairs.Lost | pairs.Quiet):
            return
        transfer = self.find(message.key, message.epoch)
        if transfer is None:
            return
        is_over = transfer.state is ReceiveState.CANCELLING
        if isinstance(message, pairs.Opened):
            is_last = transfer.unopened == {rank}
            transfer.unopened.discard(rank)
            if is_last and not is_over:
                self.opened(transfer)
            return
        pair = (message.source, rank)
        if pair not in transfer.pairs:
            return
        if isinstance(message, pairs.Lost):
            if not is_over:
                self.give_up(transfer, message.reason)
            return
        transfer.pairs.discard(pair)
        if isinstance(message, pairs.Landed):
            transfer.transports.add(message.transport)
        if is_over:
            self.settle(transfer)
        elif isinstance(message, pairs.Landed) and not transfer.pairs:
            self.landed(transfer, min(transfer.transports))

    # --- deadlines

    def arm(self, transfer: Incoming) -> None:
        """Set the deadline that the state asks for."""
        ref = (transfer.key, transfer.epoch)
        expiry = transfer.activity_s + self._limits.lease_s
        if transfer.state is ReceiveState.CANCELLING:
            self._deadlines.set(ref, self._clock() + self._limits.cancel_s)
        elif transfer.state is ReceiveState.LANDED and transfer.expected:
            self._deadlines.clear(ref)
        elif transfer.state in _UNANSWERED:
            at = transfer.next_renewal_s
            self._deadlines.set(ref, at if _is_kept(transfer) else min(at, expiry))
        elif transfer.placing is None and transfer.state in RECEIVING:
            # Our ranks have the leases of what they take.
            self._deadlines.clear(ref)
        else:
            self._deadlines.set(ref, expiry)

    def renew(self, transfer: Incoming) -> None:
        """LEASE: P keeps the blocks of an OFFER that waits."""
        transfer.next_renewal_s = self._clock() + self._limits.lease_s / 3
        self.arm(transfer)
        self._endpoint.send(transfer.peer, lease_of(transfer, self._limits.lease_s))

    def tick(self, now: float) -> float | None:
        """Act on what is due; the next deadline."""
        for ref in self._deadlines.due(now):
            quiescing = self._quiescing.get(ref)
            if quiescing is not None:
                self.arm(quiescing)
                if not quiescing.peer_quiet or quiescing.writing:
                    # Only a closed connection proves that no write can land.
                    self._endpoint.disconnect(quiescing.peer, "CANCEL was not answered")
                continue
            transfer = self.live[ref[0]]
            waits = transfer.state in _UNANSWERED
            if waits and (_is_kept(transfer) or now < transfer.activity_s + self._limits.lease_s):
                self.renew(transfer)
            else:
                self._metrics.leases_expired += 1
                self.end(transfer, "lease_expired")
        return self._deadlines.next()


def _is_kept(transfer: Incoming) -> bool:
    """Whether a deferred OFFER stays, because its request waits. One that the engine has not even
    looked at does not: that engine does not run."""
    return transfer.expected and transfer.state is ReceiveState.DEFERRED

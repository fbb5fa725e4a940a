"""The only rank of an engine: in its engine's process, on the same endpoint and I/O thread.

Used with peers that have several ranks. Reports go through Endpoint.call, since a session must not
be called inside one of its own calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from xpyd_core.request_id import TransferKey
from xpyd_kv import metrics as figures
from xpyd_kv.metrics import KvMetrics, RankMetricsDelta
from xpyd_kv.ranks.receives import RankReceives
from xpyd_kv.ranks.sends import RankSends
from xpyd_kv.session.events import ReceiveEvent, SendEvent
from xpyd_kv.session.pairs import Opened, Opening, ReceiveReport, SendReport
from xpyd_kv.session.probing import ProbeResult
from xpyd_kv.session.receiving import ReceiveSession
from xpyd_kv.session.sending import SendSession

Call = Callable[[Callable[[], None]], None]


class MakeSend(Protocol):
    """A session for the transfers to one rank of D."""

    def __call__(
        self, report: Callable[[SendEvent], None], *, metrics: KvMetrics
    ) -> SendSession: ...


class MakeReceive(Protocol):
    """A session for the transfers from one rank of P."""

    def __call__(
        self, report: Callable[[ReceiveEvent], None], *, metrics: KvMetrics
    ) -> ReceiveSession: ...


class LocalSendingRank:
    """`rank` is the SendingRank; `on_report` and `on_probed` are set before it is used."""

    on_report: Callable[[int, TransferKey, int, SendReport], None]
    on_probed: Callable[[int, tuple[int, int], ProbeResult], None]

    def __init__(
        self,
        make_session: MakeSend,
        *,
        call: Call,
        metrics: KvMetrics,
        tombstone_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._call = call
        self._metrics = metrics
        own = KvMetrics()
        self._figures = RankMetricsDelta(own)
        self.rank = RankSends(
            partial(make_session, metrics=own),
            report=self._report,
            on_probed=self._probed,
            tombstone_s=tombstone_s,
            clock=clock,
        )

    def _probed(self, number: int, destination: int, result: ProbeResult) -> None:
        self._call(partial(self.on_probed, number, (0, destination), result))

    def _report(self, key: TransferKey, epoch: int, report: SendReport) -> None:
        figures.add(self._metrics, self._figures.take())
        self._call(partial(self.on_report, 0, key, epoch, report))


class LocalReceivingRank:
    """See ReceivingRank; `rank` takes the frames; `on_report` is set before it is used."""

    on_report: Callable[[int, TransferKey, int, ReceiveReport], None]

    def __init__(self, make_session: MakeReceive, *, call: Call, metrics: KvMetrics) -> None:
        self._call = call
        self._metrics = metrics
        own = KvMetrics()
        self._figures = RankMetricsDelta(own)
        self.rank = RankReceives(partial(make_session, metrics=own), report=self._report)

    def open(self, opening: Opening) -> None:
        self.rank.open(opening)
        self._report(opening.key, opening.epoch, Opened())

    def stop(self, key: TransferKey, epoch: int, reason: str) -> None:
        self.rank.stop(key, epoch, reason)

    def _report(self, key: TransferKey, epoch: int, report: ReceiveReport) -> None:
        figures.add(self._metrics, self._figures.take())
        self._call(partial(self.on_report, 0, key, epoch, report))

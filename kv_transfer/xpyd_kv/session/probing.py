"""Self-tests of a P: does this D answer, and does it read the bytes that we send?

`POST /kv/probe` asks, an operator shows the answer. A probe dials like a transfer, sends one PROBE
the way DATA goes, and compares D's digest. Where DATA goes between ranks, that was the way of the
two engines' words, and each rank of P then probes those of D that it would send to. The SendSession
owns it and hands on what concerns it. Pure; the I/O thread's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from xpyd_core.request_id import Address
from xpyd_kv.metrics import Names
from xpyd_kv.session.deadlines import Alarm, Deadlines
from xpyd_kv.transport.api import Endpoint, Peer
from xpyd_kv.wire import messages as wire

BUSY = "busy"
# Ten in a second, in whatever rhythm.
INTERVAL_S = 0.1
BURST_S = 1.0
MAX_OPEN = 16
_TOKENS = 2**32
# For what ranks say to come here: over `probe_s`, after which each of them gives up.
_REPORT_S = 1.0


@dataclass(frozen=True)
class ProbeResult:
    """`transport`: what moved the `num_bytes` to D and '' where none arrived; `seconds` from the
    asking on, so with the connecting where that was needed. `reason` is '' where it went well,
    else a word: `busy` (not tried: another one to this address runs, or too many lately),
    `timeout` (connected, and nothing came), `digest`, `address` (D's ranks name none), or why there
    was no connection. `pairs`: between ranks; the first of them that failed gives `reason`."""

    ok: bool = False
    transport: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    digest_matches: bool = False
    reason: str = ""
    pairs: tuple[PairProbe, ...] = ()
    detail: str = ""
    """More of `reason`, for people."""

    def document(self) -> dict[str, Any]:
        """As `POST /kv/probe` answers."""
        written: dict[str, Any] = {
            "ok": self.ok,
            "transport": self.transport,
            "bytes": self.num_bytes,
            "seconds": round(self.seconds, 6),
            "digest_matches": self.digest_matches,
            "reason": self.reason,
        }
        if self.detail:
            written["detail"] = self.detail
        if self.pairs:
            written["pairs"] = [
                {
                    "from_rank": pair.source,
                    "to_rank": pair.destination,
                    "address": str(pair.address),
                    **pair.result.document(),
                }
                for pair in self.pairs
            ]
        return written


@dataclass(frozen=True)
class PairProbe:
    """From rank `source` of P to rank `destination` of D, which listens at `address`."""

    source: int
    destination: int
    address: Address
    result: ProbeResult


AskRanks = Callable[[int, Peer], Mapping[tuple[int, int], Address] | None]
"""Asks each of our ranks to probe all ranks of the peer to which it may send, under a probe's
number. Returns their pairs, whose results come later to `pair_probed`; None where D's addresses
cannot be dialled."""
Done = Callable[[ProbeResult], None]


@dataclass
class _Probe:
    done: Done
    since_s: float
    token: int
    peer: Peer | None = None
    # Of the bytes sent.
    digest: bytes = b""
    # What came of the connection itself, where pairs of ranks follow.
    result: ProbeResult | None = None
    waiting: dict[tuple[int, int], Address] = field(default_factory=dict[tuple[int, int], Address])
    pairs: list[PairProbe] = field(default_factory=list[PairProbe])


class Probes:
    """The open probes: at most one for each address."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        probe_s: float,
        clock: Callable[[], float],
        outcomes: Names,
        ask_ranks: AskRanks,
        alarm: Alarm | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._probe_s = probe_s
        self._clock = clock
        self._outcomes = outcomes
        self._ask_our_ranks = ask_ranks
        self._open: dict[Address, _Probe] = {}
        self._deadlines: Deadlines[Address] = Deadlines(alarm)
        self._next_s = float("-inf")
        self._token = 0

    def ask(self, address: Address, done: Done, *, data: bool = False) -> None:
        """Probe `address`, `data`: as a rank does another. `done` is called once, within `probe_s`,
        or twice that and a second where ranks follow."""
        now = self._clock()
        is_often = self._next_s > now + BURST_S - INTERVAL_S / 2
        if address in self._open or len(self._open) >= MAX_OPEN or is_often:
            done(ProbeResult(reason=BUSY))
            return
        self._next_s = max(self._next_s, now) + INTERVAL_S
        self._token = (self._token + 1) % _TOKENS
        self._open[address] = _Probe(done, now, self._token)
        self._deadlines.set(address, now + self._probe_s)
        peer = self._endpoint.connect(address, data=data)
        if peer is not None:
            self.peer_up(peer)

    def peer_up(self, peer: Peer) -> None:
        """A connection is up: send what waited for it."""
        probe = None if peer.address is None else self._open.get(peer.address)
        if probe is not None and probe.peer is None:
            probe.peer = peer
            probe.digest = self._endpoint.send_probe(peer, probe.token)

    def dial_failed(self, address: Address, reason: str, detail: str = "") -> None:
        """End a probe that got no connection."""
        self._end(address, ProbeResult(reason=reason, detail=detail))

    def peer_down(self, peer: Peer, reason: str) -> None:
        """End a probe whose connection is closed."""
        if peer.address is not None and self._of(peer) is not None:
            self._end(peer.address, ProbeResult(reason=reason))

    def probed(self, peer: Peer, answer: wire.Probed) -> None:
        """Handle D's answer. A late answer changes nothing."""
        probe = self._of(peer)
        if probe is None or probe.token != answer.token or peer.address is None:
            return
        if probe.result is not None:
            return
        matches = answer.digest == probe.digest
        result = ProbeResult(
            ok=matches,
            transport=answer.transport,
            num_bytes=self._endpoint.probe_bytes,
            digest_matches=matches,
            reason="" if matches else "digest",
        )
        if matches and peer.pair is None:
            self._ask_ranks(probe, peer, result)
        else:
            self._end(peer.address, result)

    def pair_probed(self, number: int, pair: tuple[int, int], result: ProbeResult) -> None:
        """Handle the result of one of our ranks for probe `number`."""
        for address, probe in list(self._open.items()):
            if probe.token == number and pair in probe.waiting:
                self._pair_ended(probe, pair, result)
                if not probe.waiting:
                    self._end_pairs(address, probe)

    def tick(self, now: float) -> float | None:
        """Deadlines."""
        late = ProbeResult(reason="timeout")
        for address in self._deadlines.due(now):
            probe = self._open[address]
            if probe.result is None:
                self._end(address, late)
                continue
            for pair in list(probe.waiting):
                self._pair_ended(probe, pair, late)
            self._end_pairs(address, probe)
        return self._deadlines.next()

    def _ask_ranks(self, probe: _Probe, peer: Peer, result: ProbeResult) -> None:
        assert peer.address is not None
        pairs = self._ask_our_ranks(probe.token, peer)
        if not pairs:
            self._end(peer.address, replace(result, ok=False, reason="address"))
            return
        probe.result, probe.waiting = result, dict(pairs)
        self._deadlines.set(peer.address, self._clock() + self._probe_s + _REPORT_S)

    def _pair_ended(self, probe: _Probe, pair: tuple[int, int], result: ProbeResult) -> None:
        probe.pairs.append(PairProbe(*pair, probe.waiting.pop(pair), result))

    def _end_pairs(self, address: Address, probe: _Probe) -> None:
        assert probe.result is not None
        pairs = tuple(sorted(probe.pairs, key=lambda one: (one.source, one.destination)))
        reason = next((one.result.reason for one in pairs if not one.result.ok), "")
        self._end(address, replace(probe.result, ok=not reason, reason=reason, pairs=pairs))

    def _of(self, peer: Peer) -> _Probe | None:
        probe = None if peer.address is None else self._open.get(peer.address)
        return probe if probe is not None and probe.peer is peer else None

    def _end(self, address: Address, result: ProbeResult) -> None:
        probe = self._open.pop(address, None)
        if probe is None:
            return
        self._deadlines.clear(address)
        self._outcomes.add(result.reason or "ok")
        probe.done(replace(result, seconds=self._clock() - probe.since_s))

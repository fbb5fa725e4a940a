"""Self-tests of a P: does this D answer, and does it read the bytes that we send?

`POST /kv/probe` asks, an operator shows the answer. A probe dials like a transfer, sends one PROBE
the way DATA goes, and compares D's digest. The SendSession owns it and hands on what concerns it.
Pure; the I/O thread's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from xpyd_core.request_id import Address
from xpyd_kv.figures import Names
from xpyd_kv.session.deadlines import Deadlines
from xpyd_kv.transport.api import Endpoint, Peer
from xpyd_kv.wire import messages as wire

BUSY = "busy"
# Ten in a second, in whatever rhythm.
INTERVAL_S = 0.1
BURST_S = 1.0
MAX_OPEN = 16
_TOKENS = 2**32


@dataclass(frozen=True)
class ProbeResult:
    """`transport`: what moved the `num_bytes` to D and '' where none arrived; `seconds` from the
    asking on, so with the connecting where that was needed. `reason` is '' where it went well,
    else a word: `busy` (not tried: another one to this address runs, or too many lately),
    `timeout`, `digest`, or why there was no connection."""

    ok: bool = False
    transport: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    digest_matches: bool = False
    reason: str = ""


Done = Callable[[ProbeResult], None]


@dataclass
class _Probe:
    done: Done
    since_s: float
    token: int
    peer: Peer | None = None
    # Of the bytes sent.
    digest: bytes = b""


class Probes:
    """At most one at a time for each address."""

    def __init__(
        self, endpoint: Endpoint, *, probe_s: float, clock: Callable[[], float], outcomes: Names
    ) -> None:
        self._endpoint = endpoint
        self._probe_s = probe_s
        self._clock = clock
        self._outcomes = outcomes
        self._open: dict[Address, _Probe] = {}
        self._deadlines: Deadlines[Address] = Deadlines()
        self._next_s = float("-inf")
        self._token = 0

    def ask(self, address: Address, done: Done) -> None:
        """Probe `address`; `done` is called once, within `probe_s`."""
        now = self._clock()
        is_often = self._next_s > now + BURST_S - INTERVAL_S / 2
        if address in self._open or len(self._open) >= MAX_OPEN or is_often:
            done(ProbeResult(reason=BUSY))
            return
        self._next_s = max(self._next_s, now) + INTERVAL_S
        self._token = (self._token + 1) % _TOKENS
        self._open[address] = _Probe(done, now, self._token)
        self._deadlines.set(address, now + self._probe_s)
        peer = self._endpoint.connect(address)
        if peer is not None:
            self.peer_up(peer)

    def peer_up(self, peer: Peer) -> None:
        """A connection stands: send what waited for it."""
        probe = None if peer.address is None else self._open.get(peer.address)
        if probe is not None and probe.peer is None:
            probe.peer = peer
            probe.digest = self._endpoint.send_probe(peer, probe.token)

    def dial_failed(self, address: Address, reason: str) -> None:
        """No connection."""
        self._end(address, ProbeResult(reason=reason))

    def peer_down(self, peer: Peer, reason: str) -> None:
        """No answer will come."""
        if peer.address is not None and self._of(peer) is not None:
            self._end(peer.address, ProbeResult(reason=reason))

    def probed(self, peer: Peer, answer: wire.Probed) -> None:
        """D has read something. Late answers change nothing."""
        probe = self._of(peer)
        if probe is None or probe.token != answer.token or peer.address is None:
            return
        matches = answer.digest == probe.digest
        result = ProbeResult(
            ok=matches,
            transport=answer.transport,
            num_bytes=self._endpoint.probe_bytes,
            digest_matches=matches,
            reason="" if matches else "digest",
        )
        self._end(peer.address, result)

    def tick(self, now: float) -> float | None:
        """Deadlines."""
        for address in self._deadlines.due(now):
            self._end(address, ProbeResult(reason="timeout"))
        return self._deadlines.next()

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

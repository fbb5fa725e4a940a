"""What became of a request's KV: the words by which engines, routers and the operator say it. Pure.

D knows whether the KV of a prompt came, P knows why it sent none. D says it in the header
`X-Xpyd-Kv` of its answer, P in `kv_transfer_params.reason`, both in their heartbeats, each with the
words of its own log. `cause_of` makes of them one of a few causes, which are labels of metrics. See
docs/adr/0043.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec

HEADER = "X-Xpyd-Kv"
Outcome = Literal["moved", "recomputed", "failed", "alone", "unreported"]
"""moved: D began from P's KV. recomputed: D computed the prompt although P had. failed: the call to
D failed because the KV did not come. alone: one instance served the request. unreported: a pair
whose D does not say it (a vLLM without xpyd's plugin)."""
LostCause = Literal[
    "unreachable", "no_answer", "no_socket", "key", "incompatible", "no_offer", "timeout", "lost",
    "broken", "no_room", "cancelled", "restarted", "prompt_logprobs", "not_sent", "unverified",
    "other",
]  # fmt: skip
"""Why KV did not come: see docs/kv-transfer.md."""
AloneCause = Literal[
    "one_token", "echo", "first_token", "short_prompt", "several", "no_prefill",
    "no_decode", "aggregated",
]  # fmt: skip
"""Why one instance served a request: see docs/router.md."""
Cause = LostCause | AloneCause | Literal[""]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
LOST_CAUSES: tuple[LostCause, ...] = get_args(LostCause)
PATH_CAUSES: frozenset[str] = frozenset(
    {"unreachable", "no_answer", "no_socket", "key", "incompatible", "no_offer", "timeout", "lost"}
    | {"broken", "not_sent"}
)
"""Causes that say something about the way between P and D. The others are of one request, or of an
engine that is short of blocks or leaves; or, of `unverified`, of a D that has not compared the KV
of another engine yet: routers send such a pair no requests."""

_CAUSES: dict[str, LostCause] = {
    "address": "unreachable",
    "auth": "key",
    "unsigned": "key",
    "peer_lost": "lost",
    "closed_by_peer": "lost",
    "closed": "lost",
    "slow_reader": "lost",
    "protocol": "broken",
    "corrupt": "broken",
    "digest": "broken",
    "refused:quarantine": "broken",
    "too_long": "no_room",
    "prefix_evicted": "no_room",
    "pressure": "no_room",
    "aborted": "cancelled",
    "stopped": "cancelled",
    "preempted": "cancelled",
    "draining": "cancelled",
    "released": "cancelled",
    "forgotten": "cancelled",
    "lease_expired": "cancelled",
    "cancelled_by_peer": "cancelled",
}


def cause_of(reason: str) -> LostCause:
    """The cause that an engine's own word means; `other` for words that are not known."""
    found = _CAUSES.get(reason)
    if found is not None:
        return found
    if reason in LOST_CAUSES:
        return reason
    if reason.startswith(("incompatible:", "refused:")):
        return "incompatible"
    return "other"


MOVED = "moved"
_REASON = "; reason="


def header_of(reason: str, *, fails: bool = False) -> str:
    """The header's value: `reason` is the engine's word for why the KV did not come; '' where it
    did. `fails`: D does not compute the prompt, the call fails for it."""
    if not reason:
        return MOVED
    return ("failed" if fails else "recomputed") + _REASON + reason


class Said(NamedTuple):
    """What a D said of a request."""

    outcome: Outcome
    reason: str = ""
    """D's word."""


_UNREPORTED = Said("unreported")
_MOVED = Said("moved")


def read_header(value: str) -> Said:
    """What the header says; a value that is not known says nothing."""
    if value == MOVED:
        return _MOVED
    outcome, _, reason = value.partition(_REASON)
    if reason and (outcome == "recomputed" or outcome == "failed"):
        return Said(outcome, reason)
    return _UNREPORTED


# --- in heartbeats

MAX_PEERS = 16
"""Peers of one heartbeat: those whose counts changed last. A P of a large fleet has more, and all
of them in its metrics."""
_KNOWN_PEERS = 256
_USUAL = frozenset({"stopped", "aborted"})
"""How a request's own end ends a transfer."""
_PeerText = Annotated[str, msgspec.Meta(max_length=300)]
_CauseText = Annotated[str, msgspec.Meta(max_length=64)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class KvPeer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an instance counted with one peer since its start. `peer`: the peer's KV address.
    `failed`: KV that did not come, by cause. `last`: the cause of the last one; '' if it came."""

    peer: _PeerText
    last: _CauseText = ""
    moved: _Count = 0
    failed: Annotated[dict[_CauseText, _Count], msgspec.Meta(max_length=32)] = {}


class PeerCounts:
    """The counts of one engine by peer: of the last 256 peers. One thread writes, any may read."""

    def __init__(self) -> None:
        self._peers: dict[str, tuple[str, Counter[str]]] = {}
        """The last cause, and counts by cause."""

    def count(self, peer: str, reason: str) -> None:
        """KV came from or went to `peer`, or did not, for `reason`."""
        if reason in _USUAL:
            return
        # The last used is the youngest.
        cause = cause_of(reason) if reason else ""
        _, counts = self._peers.pop(peer, None) or ("", Counter[str]())
        while len(self._peers) >= _KNOWN_PEERS:
            del self._peers[next(iter(self._peers))]
        counts[cause] += 1
        self._peers[peer] = cause, counts

    def latest(self) -> tuple[KvPeer, ...]:
        """The peers that were counted last, the last one first."""
        found: list[KvPeer] = []
        for peer, (last, counts) in list(self._peers.items())[: -MAX_PEERS - 1 : -1]:
            failed = dict(counts)
            moved = failed.pop("", 0)
            found.append(KvPeer(peer=peer, last=last, moved=moved, failed=failed))
        return tuple(found)

    def add(self, other: PeerCounts) -> None:
        """Count what `other` has counted. A failure that was the last one there stays the last."""
        for peer, (last, counts) in list(other._peers.items()):
            known, sums = self._peers.pop(peer, None) or ("", Counter[str]())
            while len(self._peers) >= _KNOWN_PEERS:
                del self._peers[next(iter(self._peers))]
            self._peers[peer] = last or known, sums + counts

"""Who is at fault on a connection, and what it is called in refusals and counters. Pure.

XpydError
|-- ProtocolError          the peer's fault: close this connection
|   |-- RefusedError       one side will not talk to the other: `reason`, `factor`
|   `-- SilentPeerError    the handshake's or the PINGs' deadline has passed
`-- IllegalMoveError       our own code's fault: nothing was sent
"""

from __future__ import annotations

import re

from xpyd_core.errors import ProtocolError, XpydError

# Reasons of a refusal, as they are in REFUSE.
AUTH = "auth"
VERSION = "version"
ROLE = "role"
SELF = "self"
INCOMPATIBLE = "incompatible"
LIMIT = "limit"
TRANSPORT = "transport"
QUARANTINE = "quarantine"
GROUP = "group"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_REASONS = frozenset((AUTH, VERSION, ROLE, SELF, INCOMPATIBLE, LIMIT, TRANSPORT, QUARANTINE, GROUP))


class IllegalMoveError(XpydError):
    """We asked to send what the protocol, our role or the peer's limits forbid."""


class RefusedError(ProtocolError):
    """The connection is refused. `reason` is one of this module's, `factor` what differs, `detail`
    our own words on it for the log.

    `by_peer`: it came in a REFUSE. What is not a known reason or a plain name becomes `other`,
    since it goes into log lines and labels.
    """

    def __init__(
        self, reason: str, *, factor: str = "", detail: str = "", by_peer: bool = False
    ) -> None:
        self.reason = reason if reason in _REASONS else "other"
        self.factor = factor if not factor or _NAME.fullmatch(factor) else "other"
        self.by_peer = by_peer
        self.detail = detail
        who = "the peer refuses" if by_peer else "refused"
        what = f"{self.reason} ({self.factor})" if factor else self.reason
        super().__init__(f"{who}: {what}{detail and ': ' + detail}")


class SilentPeerError(ProtocolError):
    """The peer has not said in time what it had to say."""

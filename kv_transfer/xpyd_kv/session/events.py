"""What the sessions tell the engine's side. Values, made on the I/O thread, read on the
engine's."""

from __future__ import annotations

from dataclasses import dataclass, field

from xpyd_core.request_id import TransferKey
from xpyd_kv.values import OfferedPrompt
from xpyd_kv.wire.messages import Mode

# --- P


@dataclass(frozen=True)
class SendGranted:
    """D made room; `incarnation` names the D process that did."""

    key: TransferKey
    epoch: int
    incarnation: str


@dataclass(frozen=True)
class SendDeferred:
    """D waits with its GRANT or PULL, and keeps the OFFER; `incarnation` names that process."""

    key: TransferKey
    epoch: int
    incarnation: str


@dataclass(frozen=True)
class SendFlushed:
    """PUT: of what was handed over, the first `areas` areas are sent."""

    key: TransferKey
    epoch: int
    areas: int


@dataclass(frozen=True)
class SendSpilled:
    """The answer to `spill`. `taken`: everything is read from there, no block any more; else from
    the blocks as before, and nothing from the spill."""

    key: TransferKey
    epoch: int
    taken: bool


@dataclass(frozen=True)
class SendEnded:
    """Nothing of this transfer is in flight: its blocks may go. `reason` is '' when D has the
    KV."""

    key: TransferKey
    epoch: int
    reason: str


SendEvent = SendGranted | SendDeferred | SendFlushed | SendSpilled | SendEnded

# --- D


@dataclass(frozen=True)
class ReceiveOffered:
    """P announced a prompt: grant, defer or finish it. With mode get: defer, and grant when its
    request runs. What a grant skips is a multiple of `alignment_tokens`."""

    key: TransferKey
    epoch: int
    prompt: OfferedPrompt
    salt: bytes
    alignment_tokens: int
    mode: Mode = "put_async"


@dataclass(frozen=True)
class ReceiveLanded:
    """All bytes stand in the landing and agree with COMMIT. No write follows. `transport` has moved
    them."""

    key: TransferKey
    epoch: int
    transport: str = field(default="", compare=False)


@dataclass(frozen=True)
class ReceiveEnded:
    """The KV will not come, or is withdrawn. Writes may still land: see ReceiveQuiet."""

    key: TransferKey
    epoch: int
    reason: str


@dataclass(frozen=True)
class ReceiveQuiet:
    """No write can land any more: a landing granted to this transfer may be freed."""

    key: TransferKey
    epoch: int


ReceiveEvent = ReceiveOffered | ReceiveLanded | ReceiveEnded | ReceiveQuiet

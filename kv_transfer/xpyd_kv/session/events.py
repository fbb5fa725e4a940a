"""Events that the sessions report to the engine's side. Values, made on the I/O thread, read on the
engine's."""

from __future__ import annotations

import msgspec

from xpyd_core.request_id import TransferKey
from xpyd_kv.values import OfferedPrompt
from xpyd_kv.wire.messages import Mode


class _OfTransfer(msgspec.Struct, frozen=True):
    key: TransferKey
    epoch: int


# --- P


class SendGranted(_OfTransfer, frozen=True):
    """D made room; `incarnation` names the D process that did."""

    incarnation: str


class SendDeferred(_OfTransfer, frozen=True):
    """D waits with its GRANT or PULL, and keeps the OFFER; `incarnation` names that process."""

    incarnation: str


class SendFlushed(_OfTransfer, frozen=True):
    """PUT: of what was handed over, the first `areas` areas are sent."""

    areas: int


class SendSpilled(_OfTransfer, frozen=True):
    """The answer to `spill`. `taken`: everything is read from there, no block any more; else from
    the blocks as before, and nothing from the spill."""

    taken: bool


class SendEnded(_OfTransfer, frozen=True):
    """No frame of this transfer is in flight: its blocks may go. `reason` is '' when D has the
    KV."""

    reason: str


SendEvent = SendGranted | SendDeferred | SendFlushed | SendSpilled | SendEnded

# --- D


class ReceiveOffered(_OfTransfer, frozen=True):
    """P announced a prompt: grant, defer or finish it. With mode get: defer, and grant when its
    request runs. What a grant skips is a multiple of `alignment_tokens`. `engine` and `incarnation`
    are P's."""

    prompt: OfferedPrompt
    salt: bytes
    alignment_tokens: int
    mode: Mode = "put_async"
    engine: str = ""
    incarnation: str = ""


class ReceiveLanded(_OfTransfer, frozen=True):
    """All bytes are in the landing and agree with COMMIT. No write follows. `transport` has moved
    them."""

    transport: str = ""


class ReceiveEnded(_OfTransfer, frozen=True):
    """The KV will not come, or is withdrawn. Writes may still land: see ReceiveQuiet."""

    reason: str


class ReceiveQuiet(_OfTransfer, frozen=True):
    """No write can land any more: a landing granted to this transfer may be freed."""


ReceiveEvent = ReceiveOffered | ReceiveLanded | ReceiveEnded | ReceiveQuiet

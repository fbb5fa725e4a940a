"""What the sessions tell the engine's side. Values, made on the I/O thread, read on the
engine's."""

from __future__ import annotations

import msgspec

from xpyd_core.request_id import TransferKey
from xpyd_kv.values import OfferedPrompt
from xpyd_kv.wire.messages import Mode

# --- P


class SendGranted(msgspec.Struct, frozen=True):
    """D made room; `incarnation` names the D process that did."""

    key: TransferKey
    epoch: int
    incarnation: str


class SendDeferred(msgspec.Struct, frozen=True):
    """D waits with its GRANT or PULL, and keeps the OFFER; `incarnation` names that process."""

    key: TransferKey
    epoch: int
    incarnation: str


class SendFlushed(msgspec.Struct, frozen=True):
    """PUT: of what was handed over, the first `areas` areas are sent."""

    key: TransferKey
    epoch: int
    areas: int


class SendSpilled(msgspec.Struct, frozen=True):
    """The answer to `spill`. `taken`: everything is read from there, no block any more; else from
    the blocks as before, and nothing from the spill."""

    key: TransferKey
    epoch: int
    taken: bool


class SendEnded(msgspec.Struct, frozen=True):
    """Nothing of this transfer is in flight: its blocks may go. `reason` is '' when D has the
    KV."""

    key: TransferKey
    epoch: int
    reason: str


SendEvent = SendGranted | SendDeferred | SendFlushed | SendSpilled | SendEnded

# --- D


class ReceiveOffered(msgspec.Struct, frozen=True):
    """P announced a prompt: grant, defer or finish it. With mode get: defer, and grant when its
    request runs. What a grant skips is a multiple of `alignment_tokens`."""

    key: TransferKey
    epoch: int
    prompt: OfferedPrompt
    salt: bytes
    alignment_tokens: int
    mode: Mode = "put_async"


class ReceiveLanded(msgspec.Struct, frozen=True):
    """All bytes stand in the landing and agree with COMMIT. No write follows. `transport` has moved
    them."""

    key: TransferKey
    epoch: int
    transport: str = ""


class ReceiveEnded(msgspec.Struct, frozen=True):
    """The KV will not come, or is withdrawn. Writes may still land: see ReceiveQuiet."""

    key: TransferKey
    epoch: int
    reason: str


class ReceiveQuiet(msgspec.Struct, frozen=True):
    """No write can land any more: a landing granted to this transfer may be freed."""

    key: TransferKey
    epoch: int


ReceiveEvent = ReceiveOffered | ReceiveLanded | ReceiveEnded | ReceiveQuiet

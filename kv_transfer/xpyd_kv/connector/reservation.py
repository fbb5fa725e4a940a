"""The values behind the Consumer: what a request expects, what was offered, what is reserved."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.api import OfferedPrompt
from xpyd_kv.store.api import Landing


class OfferState(StrEnum):
    """Where an offered prompt stands for the engine."""

    DEFERRED = "no room yet, or no request to make room for"
    GRANTED = "on its way"
    LANDED = "all there"


@dataclass
class Expectation:
    """A request in the queue that waits for KV at most `wait_s` from `since_s` or from GRANT."""

    wait_s: float
    since_s: float
    # The offered ids were compared with the request's own.
    is_verified: bool = False


@dataclass
class Offer:
    """One prompt that P offered and that is not adopted."""

    key: TransferKey
    epoch: int
    prompt: OfferedPrompt
    salt: bytes
    # D's own prefix is used up to a multiple of this.
    alignment_tokens: int
    # Mode get: room is taken when the request runs, not before.
    is_pulled: bool = False
    state: OfferState = OfferState.DEFERRED
    granted_at_s: float = 0.0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All offered ids."""
        return self.prompt.token_ids


@dataclass
class Held:
    """A landing, and the blocks of D's own prefix cache that stand before it.

    `prefix` is None when its references were given back because others needed the blocks: then the
    `skip_tokens` tokens must be found in the cache again.
    """

    landing: Landing
    prefix: list[int] | None
    skip_tokens: int

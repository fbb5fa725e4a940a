"""What D keeps of each prompt that a P offered, and of each request that waits for one. Values of
KvConsumer, which alone changes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.memory.api import Landing
from xpyd_kv.values import OfferedPrompt


class OfferState(StrEnum):
    """The state of an offered prompt for the engine."""

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
    # A router has said that a P at that address is dead: its OFFER is awaited so long at most.
    offer_by_s: float = math.inf
    # The KV address of its P, where that is known.
    source: Address | None = None


@dataclass
class OpenOffer:
    """An offered prompt that no request has adopted yet."""

    key: TransferKey
    epoch: int
    prompt: OfferedPrompt
    salt: bytes
    # D's own prefix is used up to a multiple of this.
    alignment_tokens: int
    # Mode get: room is taken when the request runs, not before.
    is_pulled: bool = False
    # Of another engine's P that is not known yet: to be compared, not to be used.
    is_contact: bool = False
    state: OfferState = OfferState.DEFERRED
    granted_at_s: float = 0.0
    token_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = self.prompt.token_ids


@dataclass
class Held:
    """A landing, and the blocks of D's own prefix cache that come before it.

    `prefix` is None when its references were given back because others needed the blocks: then the
    `skip_tokens` tokens, behind which the landing begins, must be found in the cache again. It is
    of these tokens; or of more, where the request is to run and the landing lies beside the cache.
    """

    landing: Landing
    prefix: list[int] | None
    skip_tokens: int
    # The cache was asked again when the request was to run.
    is_matched: bool = False

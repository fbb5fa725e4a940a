"""The values behind the Producer: the prompts that are offered, and what a step makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from xpyd_core.request_id import TransferKey
from xpyd_kv.store.api import Stash


@dataclass(eq=False)
class Prompt:
    """One offered prompt that is not settled."""

    key: TransferKey
    epoch: int
    tokens: int
    num_blocks: int
    # The blocks we hold a reference on: the first len(held) of the prompt, or none once all of it
    # stands in the stash.
    held: list[int] = field(default_factory=list[int])
    stash: Stash | None = None
    # It must not be moved: the session is sending it, or giving it up.
    stays: bool = False
    computed: bool = False
    cancelled: bool = False
    # D sent GRANT or PULL; or LEASE before; and the incarnation of the D that did.
    granted: bool = False
    deferred: bool = False
    incarnation: str = ""
    # Areas that the session got, and how many of them it has sent (PUT).
    handed: int = 0
    flushed: int = 0
    is_over: bool = False

    @property
    def holds_up(self) -> bool:
        """PUT: whether the step that has just ended must wait for this prompt's KV to be with D.

        A prompt that is computed waits for DONE, one that is not until its areas are sent. Where D
        defers there is nothing to wait for: it grants when the request comes, which P's own
        answer has to bring about.
        """
        if self.is_over or self.cancelled:
            return False
        if self.granted:
            return self.computed or self.flushed < self.handed
        return self.computed and not self.deferred


@dataclass(frozen=True)
class Hold:
    """A step that has ended and waits for D (PUT), at most until `until_s`."""

    prompts: tuple[Prompt, ...]
    since_s: float
    until_s: float


@dataclass(frozen=True)
class Settled:
    """What is remembered of a prompt that is over."""

    epoch: int
    state: str
    incarnation: str

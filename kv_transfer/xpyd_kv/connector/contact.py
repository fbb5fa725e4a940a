"""The first contact of D with a P of another engine: D compares P's KV of one prompt with its own.

Two engines that agree on every compatibility factor may still mean different bytes: a layout that a
name does not tell, a kernel that is wrong. Until one prompt has shown that they do not, KV of that
P lands beside the cache and D computes. The verdict holds for P's incarnation as long as D lives.
Engine thread only. See docs/adr/0055.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from xpyd_core.request_id import TransferKey
from xpyd_kv.memory.api import Comparison
from xpyd_kv.memory.store import LandingStore, StagedLanding
from xpyd_kv.session.events import ReceiveOffered

UNVERIFIED = "unverified"
REFUSED = "incompatible:kv_values"
TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
"""By the cache's dtype: how far a token's K or V of one head may be from D's own, as a part of the
length that such a row usually has. Two engines on CPUs differ by 2e-5 in float32; bytes in another
order by 1 and more."""
MIN_TOKENS = 16
"""Of a prompt that is compared: the first positions alone say little of the rotary embedding."""
MAX_TOKENS = 512
"""So many tokens of it are compared."""
_KNOWN = 1024
_COMPARE_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Contact:
    """A comparison that is under way with one P. `own` are D's blocks, kept until `release`."""

    key: TransferKey
    engine: str
    incarnation: str
    tokens: int
    own: Sequence[int] = ()
    release: Callable[[], None] = lambda: None
    landing: StagedLanding | None = None
    comparison: Comparison | None = None
    until_s: float = 0.0


class Contacts:
    """What D knows of Ps whose engine has another name than `engine`. `dtype`: the cache's."""

    def __init__(self, engine: str, dtype: str) -> None:
        self._engine = engine
        self._dtype = dtype
        self._tolerance = TOLERANCES.get(dtype, 0.0)
        # By P's incarnation: '' where its KV is used, else why not. The last used is the youngest.
        self._verdicts: dict[str, str] = {}
        self._open: dict[TransferKey, Contact] = {}

    @property
    def is_comparing(self) -> bool:
        return any(contact.comparison for contact in self._open.values())

    def meet(
        self, offered: ReceiveOffered, num_blocks: int, store: LandingStore
    ) -> StagedLanding | str | None:
        """What to do with KV that a P offers. None: it is used. Else D computes the prompt: a
        landing is where the KV goes to be compared, a text says why it is not even that."""
        if offered.engine == self._engine:
            return None
        engine = offered.engine or "xpyd"
        verdict = self._verdicts.pop(offered.incarnation, None)
        if verdict is not None:
            self._verdicts[offered.incarnation] = verdict
            return verdict or None
        return self._begin(offered, engine, num_blocks, store) or UNVERIFIED

    def _begin(
        self, offered: ReceiveOffered, engine: str, num_blocks: int, store: LandingStore
    ) -> StagedLanding | None:
        key, tokens = offered.key, len(offered.prompt.token_ids)
        is_busy = any(one.incarnation == offered.incarnation for one in self._open.values())
        if is_busy or key in self._open or tokens < MIN_TOKENS:
            return None
        landing = store.take_staged(key, num_blocks)
        if landing is None:
            _log.warning(
                "KV of a P of engine %r cannot be compared with our own: no room beside the cache; "
                "such pairs need a device buffer or a host pool",
                engine,
            )
            return None
        tokens = min(tokens, MAX_TOKENS)
        self._open[key] = Contact(key, engine, offered.incarnation, tokens)
        return landing

    def find(self, key: TransferKey) -> Contact | None:
        """Return the comparison of this prompt, if it has not begun."""
        contact = self._open.get(key)
        return contact if contact is not None and contact.comparison is None else None

    def abandon(self, key: TransferKey) -> None:
        """The KV did not come, or its request did not compute: the next prompt is tried."""
        contact = self.find(key)
        if contact is not None:
            del self._open[key]
            contact.release()

    def compare(self, contact: Contact, landing: StagedLanding, now: float) -> None:
        """Both are there. The landing is the contact's from now on."""
        contact.landing, contact.until_s = landing, now + _COMPARE_S
        try:
            contact.comparison = landing.compare(contact.own, contact.tokens)
        except Exception:
            # A defect. What the engine serves goes on without it: D computes, as before.
            _log.exception("KV of a P of engine %r could not be compared", contact.engine)
            self._end(contact, landing)

    def poll(self, now: float) -> None:
        """Take in what comparisons have found."""
        for contact in list(self._open.values()):
            comparison, landing = contact.comparison, contact.landing
            if comparison is None or landing is None:
                continue
            is_done = comparison.is_done()
            if not is_done and now < contact.until_s:
                continue
            self._end(contact, landing)
            if is_done:
                self._judge(contact, comparison)
            else:
                _log.error("KV of a P of engine %r was not compared in time", contact.engine)

    def next_deadline(self) -> float | None:
        """When `poll` must be called even if nothing happens."""
        times = [contact.until_s for contact in self._open.values() if contact.comparison]
        return min(times, default=None)

    def _end(self, contact: Contact, landing: StagedLanding) -> None:
        del self._open[contact.key]
        contact.release()
        landing.free()

    def _judge(self, contact: Contact, comparison: Comparison) -> None:
        found = comparison.worst
        # A NaN is refused.
        is_well = found.deviation <= self._tolerance
        while len(self._verdicts) >= _KNOWN:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[contact.incarnation] = "" if is_well else REFUSED
        _log.log(
            logging.INFO if is_well else logging.ERROR,
            "first contact with a P of engine %r (this is %r, incarnation %s): its KV of %d tokens "
            "%s; worst: %s of layer %d deviates by %.2g, allowed in %s are %.2g",
            contact.engine,
            self._engine or "xpyd",
            contact.incarnation,
            contact.tokens,
            "is ours, and is used" if is_well else "is not ours, and is never used",
            found.part,
            found.layer,
            found.deviation,
            self._dtype,
            self._tolerance,
        )

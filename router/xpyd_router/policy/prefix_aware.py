"""PrefixAware: the instance whose cache has the most of the prompt, weighed against its work. Pure.

The router notes which prompts it sent where, as marks (`Want.marks`), and takes the cache to have
them: in the order of use, as far as the instance's KV blocks reach. What it knows is a guess, which
other routers' requests make worse; nothing depends on it but speed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from xpyd_core.blocks import DEFAULT_BLOCK_SIZE
from xpyd_router.fleet.instances import Instance, InstanceKey
from xpyd_router.fleet.loads import TOKENS_PER_SLOT
from xpyd_router.policy.base import Candidate, PolicyContext, PrefixMark, Side, SidePolicy, Want

MAX_MARKS = 262_144
"""Marks of all instances of one side: about 35 MB."""
_MAX_MARKS_OF_ONE = 8192
"""Some hundred prompts of a thousand tokens."""


class _Cache:
    """What one instance has: digests in the order of use, each with the tokens since the one before
    it.
    """

    __slots__ = ("_marks", "_tokens")

    def __init__(self) -> None:
        self._marks: OrderedDict[bytes, int] = OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._marks)

    def length(self, marks: Sequence[PrefixMark]) -> int:
        """Tokens of the longest mark that is in it. An instance with a mark has those before it:
        the shorter one was used later.
        """
        if not marks or marks[0][1] not in self._marks:
            return 0
        known, unknown = 0, len(marks)
        while unknown - known > 1:
            middle = (known + unknown) // 2
            if marks[middle][1] in self._marks:
                known = middle
            else:
                unknown = middle
        return marks[known][0]

    def use(self, marks: Sequence[PrefixMark]) -> None:
        """A prompt is computed there; its shortest mark is the last to go."""
        for place in range(len(marks) - 1, -1, -1):
            length, digest = marks[place]
            if digest in self._marks:
                self._marks.move_to_end(digest)
            else:
                tokens = length - marks[place - 1][0] if place else length
                self._marks[digest] = tokens
                self._tokens += tokens

    def trim(self, most_marks: int, most_tokens: int | None = None) -> None:
        """Drop what was used longest ago."""
        marks = self._marks
        while len(marks) > most_marks or (most_tokens is not None and self._tokens > most_tokens):
            self._tokens -= marks.popitem(last=False)[1]


class PrefixAware(SidePolicy):
    """The least loaded, where what its cache has of the prompt is no work. Equals take turns.

    So a prompt that many begin with spreads when its instance has as much to do as computing it
    again takes. On P that is counted in tokens; on D and aggregated instances in requests, as whose
    KV need not come.
    """

    needs_marks = True

    def __init__(self, context: PolicyContext) -> None:
        self._caches: dict[InstanceKey, _Cache] = {}
        self._most_marks = _MAX_MARKS_OF_ONE
        self._turns = [context.first_turn, context.first_turn]
        """The turns of first and of second tries (see LeastLoaded)."""

    @property
    def marks(self) -> int:
        """The number of marks that are kept."""
        return sum(map(len, self._caches.values()))

    def choose(self, side: Side, want: Want) -> Candidate:
        """See the class."""
        among, caches, marks, tokens = side.candidates, self._caches, want.marks, want.prompt_tokens
        is_prefill = side.kind == "P"
        again = bool(want.exclude)
        self._turns[again] += 1
        start = self._turns[again] % len(among)
        best, least = among[start], float("inf")
        for place in range(start - len(among), start):  # below 0 counts from the end
            one = among[place]
            load, cache = one.load, caches.get(one.instance.place)
            cached = min(cache.length(marks), tokens) if cache else 0
            if is_prefill:
                cost = (load.queued_tokens + tokens - cached) * load.scale
            else:
                cost = load.decode_cost - cached / TOKENS_PER_SLOT * load.scale
            if cost < least:
                best, least = one, cost
        return best

    def placed(self, instance: Instance, want: Want) -> None:
        """The instance's cache will have the prompt."""
        if not want.marks:
            return
        cache = self._caches.get(instance.place)
        if cache is None:
            cache = self._caches[instance.place] = _Cache()
            self._share_out()
        cache.use(want.marks)
        beat = instance.beat
        room = beat.total_blocks * (beat.block_tokens or DEFAULT_BLOCK_SIZE)
        cache.trim(self._most_marks, room or None)

    def cached_tokens(self, key: InstanceKey, want: Want) -> int:
        """Tokens of the longest mark that the instance has."""
        cache = self._caches.get(key)
        return min(cache.length(want.marks), want.prompt_tokens) if cache else 0

    def forget(self, key: InstanceKey) -> None:
        """Drop its cache."""
        if self._caches.pop(key, None) is not None:
            self._share_out()

    def _share_out(self) -> None:
        """All instances together stay below MAX_MARKS."""
        self._most_marks = min(_MAX_MARKS_OF_ONE, MAX_MARKS // max(len(self._caches), 1))
        for cache in self._caches.values():
            cache.trim(self._most_marks)

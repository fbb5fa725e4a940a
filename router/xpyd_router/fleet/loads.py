"""What each instance has to do now, as far as this router knows, and how fast it works. Pure.

`request` counts its own calls (`begin`, `end`), beats bring what the engine itself reports, and
policies compare. Entries live as long as their instances: `fleet.view` adds and removes them. A
reader only reads plain attributes, because a policy reads every candidate for every request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from xpyd_core.messages import Heartbeat
from xpyd_router.fleet.instances import InstanceKey

_MEMORY = 0.98
"""What an observation still counts when the next one comes: about the last fifty make the line."""
_LEAST_SPREAD = 0.01
"""Below a tenth of their mean, the spread of the loads that were seen says little about a slope."""
GAP_OFFSET = 16.0
"""As long as no more is known, this many requests more in a batch double the gap between tokens: a
step reads the weights once for all of them."""


@dataclass(slots=True, eq=False)
class FittedLine:
    """y over x by least squares, in which old observations fade.

    Where the x that were seen hardly differ, the slope is that of a y that grows with x + `offset`:
    without it a line learned at one load would promise the same time at any other.
    """

    _offset: float = 0.0
    _weight: float = 0.0
    _mean_x: float = 0.0
    _mean_y: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0
    base: float = 0.0
    """y at x = 0, never below 0."""
    slope: float = 0.0
    """What each unit of x adds to y, never below 0."""

    @property
    def is_known(self) -> bool:
        """Whether anything was observed."""
        return self._weight > 0.0

    def observe(self, x: float, y: float) -> None:
        """Take one observation: x above 0, y not below."""
        self._weight = self._weight * _MEMORY + 1.0
        part = 1.0 / self._weight
        dx, dy = x - self._mean_x, y - self._mean_y
        self._mean_x += part * dx
        self._mean_y += part * dy
        rest = 1.0 - part
        self._variance = rest * (self._variance + part * dx * dx)
        self._covariance = rest * (self._covariance + part * dx * dy)
        usual = self._mean_y / (self._mean_x + self._offset)
        doubt = _LEAST_SPREAD * self._mean_x * self._mean_x
        slope = (self._covariance + doubt * usual) / (self._variance + doubt)
        # A base below 0 would make the slope too steep for light loads: then through the origin.
        self.slope = min(max(slope, 0.0), self._mean_y / self._mean_x)
        self.base = max(self._mean_y - self.slope * self._mean_x, 0.0)

    def at(self, x: float) -> float:
        """y as it is expected at x."""
        return self.base + self.slope * x


@dataclass(slots=True, eq=False)
class Pace:
    """How fast one instance works, learned from what its calls took: two straight lines.

    The slope of `first` is the inverse of the prefill rate; each prompt also takes its base. A Pace
    ends with its instance, so a restarted engine is unknown. One writer, the event loop.
    """

    first: FittedLine = field(default_factory=FittedLine)
    """Seconds to the first token over prompt tokens."""
    gap: FittedLine = field(default_factory=lambda: FittedLine(GAP_OFFSET))
    """Seconds between two tokens over requests."""


_LEAST_ROOM = 0.05
"""Free part of the KV cache below which an instance counts as this full: costs stay finite."""
TOKENS_PER_SLOT = 2048
"""Context that costs a decode step about as much as one more request in its batch does: an 8B
model reads 128 KiB of KV per token, and a sequence's own share of a step is some 0.1 ms."""
_LEAST_WEIGHT = 0.01
_MEAN_STEP = 0.05
"""The weight of a new value in the running mean of prompts: about the last twenty count."""
_FIRST_MEAN_TOKENS = 512.0


class Work(NamedTuple):
    """Calls in flight, the tokens of their prompts, and the output they are expected to make."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True, eq=False)
class Load:
    """What one instance has to do. Mutable; `flow` and the beats write, policies read.

    A write computes what policies compare, so that a pick reads only a few attributes:

    - `queued_tokens`: prompt tokens that wait on it or are computed. With a prompt of n tokens more
      it would cost `(queued_tokens + n) * scale`.
    - `decode_cost`: requests in its batch with one more, long contexts counting for several.
    - `scale`: 1 for a healthy instance with all KV blocks free, more where they are few or where
      its weight is below 1. `decode_cost` holds it already.
    """

    key: InstanceKey
    pace: Pace = field(default_factory=Pace)
    """How fast the instance works; learned where a policy or objectives need it."""
    foreign_requests: int = 0
    """What the last beat showed beyond our own: calls of other routers."""
    queued_tokens: float = field(init=False)
    decode_cost: float = field(init=False)
    scale: float = field(init=False)
    _requests: int = 0
    _prompt_tokens: int = 0
    _output_tokens: int = 0
    _others: Work = field(default_factory=Work)
    _weight: float = 1.0
    _room: float = 1.0
    _share: float = 0.0
    _mean_prompt_tokens: float = _FIRST_MEAN_TOKENS

    def __post_init__(self) -> None:
        self._compute()

    @property
    def own(self) -> Work:
        """Calls of this process in flight."""
        return Work(self._requests, self._prompt_tokens, self._output_tokens)

    @property
    def ours(self) -> int:
        """Requests on the instance that this router sent, all its processes together."""
        return self._requests + self._others.requests

    @property
    def active(self) -> int:
        """Requests on the instance, of this and other routers."""
        return self._requests + self._others.requests + self.foreign_requests

    @property
    def weight(self) -> float:
        """The share of its usual work that it should get, in (0, 1]: below 1 while it comes back
        after faults.
        """
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._weight = min(max(weight, _LEAST_WEIGHT), 1.0)
        self._compute()

    def begin(self, prompt_tokens: int, output_tokens: int = 0) -> None:
        """A call to the instance begins, that is expected to make `output_tokens`; `end` with the
        same numbers must follow.
        """
        self._requests += 1
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens
        self._mean_prompt_tokens += _MEAN_STEP * (prompt_tokens - self._mean_prompt_tokens)
        self._compute()

    def end(self, prompt_tokens: int, output_tokens: int = 0) -> None:
        """The call that began is over, however it went."""
        self._requests -= 1
        self._prompt_tokens -= prompt_tokens
        self._output_tokens -= output_tokens
        self._compute()

    def set_others(self, work: Work) -> None:
        """What the router's other processes have in flight there."""
        if work != self._others:
            self._others = work
            self._compute()

    def take(self, beat: Heartbeat) -> None:
        """What the engine says of itself.

        Its running and waiting requests hold ours: only what is beyond them is foreign. Its free
        blocks are as old as the beat; until the next one each request that came or went since is
        taken to use what those of the beat use on average.
        """
        ours = self._requests + self._others.requests
        self.foreign_requests = max(0, beat.running + beat.waiting - ours)
        self._room, self._share = 1.0, 0.0
        if beat.total_blocks:
            free = min(beat.free_blocks / beat.total_blocks, 1.0)
            self._share = (1.0 - free) / max(self.active, 1)
            self._room = free + self._share * self.active
        self._compute()

    def _compute(self) -> None:
        other_requests, other_prompts, other_outputs = self._others
        foreign = self.foreign_requests
        active = self._requests + other_requests + foreign
        room = self._room - self._share * active
        self.scale = scale = 1.0 / ((room if room > _LEAST_ROOM else _LEAST_ROOM) * self._weight)
        prompts = self._prompt_tokens + other_prompts
        # One for the request itself: among idle ones, scale decides also without a known prompt.
        self.queued_tokens = prompts + foreign * self._mean_prompt_tokens + 1
        context = prompts + self._output_tokens + other_outputs
        self.decode_cost = (active + 1 + context / TOKENS_PER_SLOT) * scale


class LoadTable:
    """The owner of all loads of a router."""

    def __init__(self) -> None:
        self._loads: dict[InstanceKey, Load] = {}
        self._suspects: Counter[InstanceKey] = Counter()

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads.values())

    def of(self, key: InstanceKey) -> Load:
        """The instance's load. Of one that is not in the fleet: a new one that is not kept, so
        that a call to an instance that just left may still be counted and ended.
        """
        return self._loads.get(key) or Load(key)

    def take(self, key: InstanceKey, beat: Heartbeat) -> None:
        """A beat of a member of the fleet; its first one makes the entry."""
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = self._make(key)
        load.take(beat)

    def keep(self, members: Collection[InstanceKey]) -> list[InstanceKey]:
        """Drop the entries of all but `members`; returns whose were dropped."""
        gone = [key for key in self._loads if key not in members]
        for key in gone:
            del self._loads[key]
        return gone

    def suspect(self, keys: Iterable[InstanceKey]) -> None:
        """A request that met a death is tried there, until `clear` with the same ones."""
        self._suspects.update(keys)

    def clear(self, keys: Iterable[InstanceKey]) -> None:
        """The try at the instances `keys` is over."""
        for key in keys:
            self._suspects[key] -= 1
            if not self._suspects[key]:
                del self._suspects[key]

    def suspected(self) -> frozenset[InstanceKey]:
        """Instances on which suspect requests are now."""
        return frozenset(self._suspects)

    def _make(self, key: InstanceKey) -> Load:
        return Load(key)

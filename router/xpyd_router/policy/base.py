"""The words of choosing: what a request wants, whom it may get, what a policy must offer. Pure.

`flow` asks a Policy once per try. The one that is built is `pairs.PairPolicy`: it knows which
instances may work together, and leaves to a SidePolicy which one of a side is taken. A SidePolicy
comes by its name from the entry-point group `xpyd.router.policies` (`catalogue`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import msgspec

from xpyd_router.fleet.loads import Load, LoadTable
from xpyd_router.fleet.registry import Instance, InstanceKey, Snapshot

SideKind = Literal["P", "D", "A"]


class Pair(NamedTuple):
    """P prefills and sends its KV to D."""

    prefill: Instance
    decode: Instance

    @property
    def is_continuing(self) -> bool:
        """Whether the first token comes from P.

        Both must declare continuation: P, because only such a P answers with token ids and checks
        client_max_tokens; D, because only such a D goes on behind them. Otherwise nothing is added
        to either body, D samples the first token itself and P's is dropped.
        """
        return self.prefill.is_continuing and self.decode.is_continuing


class Alone(NamedTuple):
    """One instance serves the whole request; no KV moves."""

    instance: Instance


Mark = tuple[int, bytes]
"""A beginning of a prompt: about how many tokens long, and a digest that stands for it."""


class Slo(NamedTuple):
    """What a request may take; None: no objective."""

    ttft_s: float | None = None
    """From the request to its first token; in a Want what is left of that, which may be below 0."""
    itl_s: float | None = None
    """Between two tokens, in the mean of an answer (its TPOT)."""


NO_SLO = Slo()


class Want(msgspec.Struct, frozen=True, gc=False):
    """What a request needs of its instances. Made for every try: a Struct takes a twelfth of a
    frozen dataclass's time. It holds nothing that could refer to it.
    """

    model: str
    alone: Literal["P", "D"] | None = None
    """Where it would run alone; only on engines of ours, vLLM's cannot parse a bare id."""
    exclude: frozenset[InstanceKey] = frozenset()
    """Instances that failed it already."""
    continue_at: str | None = None
    """The client has tokens already: only continuing instances of this compatibility key may go
    on."""
    prompt_tokens: int = 0
    """About how long the prompt is; 0 where nobody knows."""
    session: str = ""
    """What the client calls its conversation; only read where a policy needs it."""
    marks: tuple[Mark, ...] = ()
    """Beginnings of the prompt, shortest first; only made where a policy needs them."""
    output_tokens: int = 0
    """About how long the answer will be; 0 where nobody knows."""
    slo: Slo = NO_SLO
    """What it may take; only set where the paces of instances are learned."""


class Policy(Protocol):
    """Picks instances. Must be fair by itself: the caller keeps no state about turns."""

    def pick(self, snapshot: Snapshot, want: Want) -> Pair | Alone | None:
        """A choice among the routable instances, or None where there is none."""
        ...

    def placed(self, choice: Pair | Alone, want: Want) -> int:
        """The request goes there. Returns about how many tokens of its prompt are to be computed:
        those that the instance's cache is not known to have.
        """
        ...

    @property
    def needs_session(self) -> bool:
        """Whether Want.session is read."""
        ...

    @property
    def needs_marks(self) -> bool:
        """Whether Want.marks are read."""
        ...

    @property
    def needs_paces(self) -> bool:
        """Whether Load.pace and Want.slo are read."""
        ...


class Candidate:
    """One instance that may be taken, beside its load. Never changed."""

    __slots__ = ("instance", "load")

    def __init__(self, instance: Instance, load: Load) -> None:
        self.instance = instance
        self.load = load


class Side:
    """The candidates for one place, in the order of their addresses. Never changed.

    `rota` names the competition: equal where the same kinds of instances stand for the same place,
    also when one of them came or went, so that turns may go on.
    """

    __slots__ = ("candidates", "kind", "rota")

    def __init__(
        self, kind: SideKind, candidates: tuple[Candidate, ...], rota: tuple[str, ...]
    ) -> None:
        self.kind: SideKind = kind
        self.candidates = candidates
        self.rota = rota


@dataclass(frozen=True)
class Tools:
    """What a policy is made of."""

    kind: SideKind
    """The side that it chooses on."""
    loads: LoadTable
    random: Callable[[], float]
    """Evenly distributed in [0, 1)."""
    first_turn: int = 0
    """Where turns begin: each process of a router at another place."""


class SidePolicy(Protocol):
    """Chooses one instance of a side. One object for each side of a router; inherit from this.

    Every policy gives a candidate whose `load.weight` is below 1 less work than its peers.
    """

    needs_session: bool = False
    """Whether it reads Want.session."""
    needs_marks: bool = False
    """Whether it reads Want.marks."""
    needs_paces: bool = False
    """Whether it reads Load.pace and Want.slo."""

    @abstractmethod
    def choose(self, side: Side, want: Want) -> Candidate:
        """One of `side.candidates`, which are at least one."""

    def placed(self, instance: Instance, want: Want) -> None:
        """The request goes to `instance`, which this policy chose."""

    def cached_tokens(self, key: InstanceKey, want: Want) -> int:
        """About how many tokens of the prompt the instance's cache has, as far as is known."""
        del key, want
        return 0

    def forget(self, key: InstanceKey) -> None:
        """The instance left the fleet for good: drop what is known of it."""


SideFactory = Callable[[Tools], SidePolicy]
"""What an entry point of the group `xpyd.router.policies` names; a SidePolicy class may be one."""

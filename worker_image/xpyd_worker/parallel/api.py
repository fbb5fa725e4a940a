"""The seams between a rank's model and the other ranks of its engine. Documented here only.

A rank holds a `Part` of the model. Within a stage its tensor group adds up what each rank computed
of a layer; rows go to whole experts on other ranks and come back; between stages hidden states go
on, and what the last stage drew comes back.
`open_parallel` (state.py) makes them; stages.py moves hidden states and drawn tokens. All calls of
one rank come from one thread, in the same order on all ranks; every wait has a deadline and raises
GroupError when it has passed. Imports no torch: a rank's process needs GroupError before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from xpyd_core.errors import XpydError

if TYPE_CHECKING:
    from torch import Tensor


class GroupError(XpydError):
    """Another rank of the group does not answer, or this one cannot do its part of a step that the
    others wait for. The rank cannot go on: its process ends, and the instance with it."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank holds: `layers` (absolute indices) of the model's stages, and of each layer the
    share `tensor_rank` of `tensor_size`. The first stage has the embedding; the last one the last
    norm, the head and the sampler. `replicas`: those that hold their experts together; each has all
    else by itself. `redundant_experts` and `is_elastic`: see Sizes."""

    layers: range
    stage: int = 0
    stages: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1
    replicas: int = 1
    redundant_experts: int | None = None
    is_elastic: bool = False

    @property
    def exchanges_rows(self) -> bool:
        """Whether rows go to experts of other replicas, which there are or may come to be."""
        return self.replicas > 1 or self.is_elastic

    @property
    def is_first(self) -> bool:
        """Whether tokens enter here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether tokens are drawn here."""
        return self.stage == self.stages - 1

    @property
    def answers(self) -> bool:
        """Whether it is the one rank of its replica that answers steps, and drafts behind them."""
        return self.is_last and not self.tensor_rank

    @property
    def ranks(self) -> int:
        """How many ranks hold the model together."""
        return self.replicas * self.stages * self.tensor_size


class TensorGroup(Protocol):
    """The ranks that share each layer of a stage."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x` [rows, n], the same bits on each. `x` is given away: the result
        may be in its memory. The result is the caller's, to keep and to write to."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x` [rows, n], joined along the rows by rank: [rows, n * size]; the
        caller's."""
        ...


class ExpertGroup(Protocol):
    """The ranks that have a stage's experts, each some of them whole. Where replicas come and go
    its numbers change, between two steps."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        ...

    @property
    def size(self) -> int: ...

    @property
    def replicas(self) -> int:
        """How many replicas the group spans, each with rows of its own. 1: all its ranks, which are
        a tensor group, have the same rows."""
        ...

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Give the first `send[0]` rows of `x` [rows, n] to rank 0, the next `send[1]` to rank 1
        and so on, this rank included; what all gave to this one, by rank: [sum(receive), n], the
        caller's. Before: `receive[r]` is what rank r sends here, and `n` is the same on all."""
        ...


class Hidden(NamedTuple):
    """What one stage gives the next, each [rows, hidden]: `x` is what its last layer would add to
    `residual`; `features` are the inputs of some layers so far, in their order, for a draft
    head."""

    x: Tensor
    residual: Tensor
    features: tuple[Tensor, ...] = ()


class _NoGroup:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


NO_GROUP: TensorGroup = _NoGroup()

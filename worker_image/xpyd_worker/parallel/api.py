"""The seams between a rank's model and the other ranks of its engine. Documented here only.

A rank holds a `Part` of the model. Within a stage its tensor group adds up what each rank computed
of a layer; between stages hidden states go on, and what the last stage drew comes back.
`open_parallel` (state.py) makes them; stages.py moves hidden states and drawn tokens. All calls of
one rank come from one thread, in the same order on all ranks; every wait has a deadline and raises
GroupError when it has passed. Imports no torch: a rank's process needs GroupError before it.
"""

from __future__ import annotations

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
    norm, the head and the sampler."""

    layers: range
    stage: int = 0
    stages: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether tokens enter here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether tokens are drawn here."""
        return self.stage == self.stages - 1

    @property
    def ranks(self) -> int:
        """How many ranks hold the model together."""
        return self.stages * self.tensor_size


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


class Hidden(NamedTuple):
    """What one stage gives the next, each [rows, hidden]: `x` is what its last layer would add to
    `residual`."""

    x: Tensor
    residual: Tensor


class _NoGroup:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


NO_GROUP: TensorGroup = _NoGroup()

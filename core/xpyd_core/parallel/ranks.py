"""Ranks of a parallel engine: their numbers on each axis, and who shares a group with whom. Pure.

Ranks count along ExternalDP x DP x PP x PCP x TP, the last fastest (Megatron's order, as in vLLM),
so the ranks of a tensor group are neighbours and a pod that holds whole stages holds a run of
ranks. ExternalDP are replicas outside of the engine; PCP (prefill context) is in the layout so that
it may come, and is 1 everywhere. EP is no axis of its own: the experts of a stage are divided over
its DP x PCP x TP ranks. Used to start, connect and show ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

Groups = tuple[tuple[int, ...], ...]
"""Groups of one kind, each with its ranks in the order of their numbers in the group."""


class RankCoordinates(NamedTuple):
    """A rank's number on each axis."""

    external: int
    data: int
    stage: int
    context: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Length of each axis, at least 1. `has_whole_experts` (--enable-expert-parallel): an expert is
    whole on one rank of its expert group; without, every rank of a tensor group has a slice of each
    expert. `redundant_experts` (--enable-eplb): an expert group has so many slots more than a layer
    has experts, and experts move between its ranks; None: each stays where it is loaded.
    `is_elastic` (--enable-elastic-ep beside it): there may come to be another number of replicas.
    """

    external: int = 1
    data: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    has_whole_experts: bool = False
    redundant_experts: int | None = None
    is_elastic: bool = False

    @property
    def replica(self) -> int:
        """Ranks that hold one copy of the model together: an instance without data parallelism."""
        return self.pipeline * self.context * self.tensor

    @property
    def world(self) -> int:
        """All ranks."""
        return self.external * self.data * self.replica

    @property
    def expert(self) -> int:
        """Ranks of an expert group; 1 where experts are not whole."""
        return self.data * self.context * self.tensor if self.has_whole_experts else 1

    @property
    def has_expert_groups(self) -> bool:
        """Whether other ranks have whole experts of a rank's stage, or may come to."""
        return self.expert > 1 or (self.has_whole_experts and self.is_elastic)

    @property
    def output_rank(self) -> int:
        """The rank within a replica that sends what was drawn: the first of the last stage."""
        return self.replica - self.tensor * self.context

    def depth(self, of_device: int) -> int:
        """Steps that an engine has under way at most: one for each stage; with one stage as many as
        its device takes at once, `of_device`."""
        return self.pipeline if self.pipeline > 1 else of_device

    def coordinates(self, rank: int) -> RankCoordinates:
        """The coordinates of `rank`."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        rest, stage = divmod(rest, self.pipeline)
        external, data = divmod(rest, self.data)
        return RankCoordinates(external, data, stage, context, tensor)

    def rank(self, at: RankCoordinates) -> int:
        """The rank with the coordinates `at`."""
        number = at.external * self.data + at.data
        number = number * self.pipeline + at.stage
        number = number * self.context + at.context
        return number * self.tensor + at.tensor

    @property
    def tensor_groups(self) -> Groups:
        """Ranks that share each layer of a stage."""
        size = self.tensor
        return tuple(tuple(range(at, at + size)) for at in range(0, self.world, size))

    @property
    def pipeline_groups(self) -> Groups:
        """Ranks that hold the same share of one replica's stages, first stage first."""
        return tuple(
            tuple(self.rank(RankCoordinates(e, d, stage, c, t)) for stage in range(self.pipeline))
            for e, d, t, c in itertools.product(
                range(self.external), range(self.data), range(self.tensor), range(self.context)
            )
        )

    @property
    def data_groups(self) -> Groups:
        """Ranks that hold the same part of the model in each replica."""
        return tuple(
            tuple(self.rank(RankCoordinates(e, data, s, c, t)) for data in range(self.data))
            for e, t, s, c in itertools.product(
                range(self.external), range(self.tensor), range(self.pipeline), range(self.context)
            )
        )

    @property
    def expert_groups(self) -> Groups:
        """Ranks that share a stage's experts, where these are whole: the stage's in all replicas of
        an engine, the first replica's first."""
        return tuple(
            tuple(
                self.rank(RankCoordinates(e, d, s, c, t))
                for d, c, t in itertools.product(
                    range(self.data), range(self.context), range(self.tensor)
                )
            )
            for e, s in itertools.product(range(self.external), range(self.pipeline))
        )


ONE_RANK = Sizes()
"""All of the model in one place."""


def group_of(groups: Groups, rank: int) -> tuple[int, ...]:
    """The one of `groups` that `rank` is in; its index there is its number in the group."""
    return next(group for group in groups if rank in group)


def replica_kv_port(first: int, replica: int, ranks: int) -> int:
    """The port of a replica's KV control, where replica 0 has `first` and each has so many `ranks`:
    their ports are behind it (docs/adr/0124). 0, any port, stays 0."""
    return first and first + replica * (ranks + 1)


def kv_ports(first: int, replicas: int, ranks: int, *, is_elastic: bool = False) -> range:
    """All ports of an engine's KV: of its replicas, each with so many `ranks`, and of these. One
    rank alone computes in the engine's process and has no port of its own, but where replicas come
    and go (`is_elastic`)."""
    is_one = replicas * ranks == 1 and not is_elastic
    return range(first, first + (1 if is_one else replicas * (ranks + 1)))

"""Opens what one rank has of the others, and closes it in the opposite order.

Called once by a rank's process, before it loads its part of the model; where replicas come and go
the groups that cross them are made anew (`resize`, docs/adr/0128). See `api.py` for what comes of
it, xpyd_core.parallel.ranks for the members of each group.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from typing import Self

import torch

from xpyd_core.parallel.ranks import Groups, Sizes, group_of
from xpyd_worker.engine.executor import Resize
from xpyd_worker.kernels.gpu.reduce_shape import ReduceShape
from xpyd_worker.parallel.api import NO_GROUP, ExpertGroup, GroupError, Part, TensorGroup
from xpyd_worker.parallel.distributed import (
    ProcessGroup,
    Rendezvous,
    Store,
    gloo_device,
    gloo_group,
    named,
    nccl_group,
)
from xpyd_worker.parallel.groups import (
    FastReduce,
    GroupCoordinator,
    OpsExpertGroup,
    OpsTensorGroup,
)
from xpyd_worker.parallel.shared_memory import Host, open_shared_memory
from xpyd_worker.parallel.stages import HiddenSize, StageBoundary, StageFeedback

_ON_ONE_HOST = ("tensor", "expert")
"""Kinds whose ranks share a host: a tensor group's always (xpyd_core.parallel), an expert group's
where its replicas do, which shows when the memory is opened."""


class _Maker:
    """Makes the groups that this rank is in. Groups of one meeting have names of their own."""

    def __init__(
        self,
        *,
        rank: int,
        local_rank: int,
        at: Rendezvous,
        device: torch.device,
        dtype: torch.dtype,
        custom_all_reduce: bool,
    ) -> None:
        self.rank = rank
        self._local_rank = local_rank
        self.at = at
        self._device = device
        self._dtype = dtype
        self._custom_all_reduce = custom_all_reduce
        self._gloo = gloo_device(at.address)

    def make(
        self, store: Store, sizes: Sizes, kinds: tuple[str, ...], meeting: int, stack: ExitStack
    ) -> dict[str, GroupCoordinator]:
        """The groups of these kinds, which `stack` owns. `meeting`: the number of times that
        replicas came or went, this one included."""
        at, device = self.at, self._device
        # Perhaps some are on other hosts; that only costs what looking around saves.
        host = Host(ranks=sizes.world, cores=len(os.sched_getaffinity(0)))
        groups: dict[str, GroupCoordinator] = {}
        for kind, all_of_kind in _kinds(sizes).items():
            if kind not in kinds:
                continue
            ranks = group_of(all_of_kind, self.rank)
            # The same on all its members, and on no other rank.
            name = f"{kind}-{all_of_kind.index(ranks)}"
            if meeting:
                name = f"{name}-of-meeting-{meeting}"
            cpu_group = gloo_group(store, f"{name}-cpu", ranks, device=self._gloo, at=at)
            stack.callback(cpu_group.close)
            if device.type == "cpu":
                device_group = gloo_group(store, f"{name}-device", ranks, device=self._gloo, at=at)
            else:
                device_group = nccl_group(store, f"{name}-device", ranks, at=at)
            stack.callback(device_group.close)
            fast = shared = None
            if kind in _ON_ONE_HOST and len(ranks) > 1:
                if device.type == "cpu":
                    fast = shared = open_shared_memory(store, name, ranks, at=at, host=host)
                elif kind == "tensor":
                    is_asked = self._custom_all_reduce
                    fast = _on_gpu(cpu_group, name, device, self._dtype, at, is_asked)
            groups[kind] = GroupCoordinator(
                kind,
                device_group=device_group,
                cpu_group=cpu_group,
                device=device,
                local_rank=self._local_rank,
                fast=fast,
                shared=shared,
            )
            stack.callback(groups[kind].close)
        return groups


class ParallelState:
    """What a rank has of the others. `close` it, or use it in a `with`. `boundary` and `feedback`:
    None where there is one stage; `expert_group` and `experts`: where no other rank has whole
    experts of this one's stage, now or later."""

    def __init__(
        self,
        part: Part,
        sizes: Sizes,
        store: Store,
        maker: _Maker,
        hidden: HiddenSize,
        meeting: int,
        replica: int,
    ) -> None:
        """See `open_parallel`."""
        self.part = part
        self._sizes, self._store, self._maker = sizes, store, maker
        self._replica, self._local = replica, maker.rank % sizes.replica
        self._replicas = () if meeting else tuple(range(sizes.data))
        """In the order of their ranks in the groups; none before this one is there."""
        self._owned, self._across = ExitStack(), ExitStack()
        self.experts: ExpertGroup | None = None
        self._experts: OpsExpertGroup | None = None
        if sizes.has_expert_groups:
            ranks = group_of(sizes.expert_groups, maker.rank)
            self.experts = self._experts = OpsExpertGroup(ranks, maker.rank, part.replicas)
        with ExitStack() as stack:
            stack.callback(self.close)
            self._tensor: OpsTensorGroup | None = None
            self._open_own(meeting)
            self._groups: dict[str, GroupCoordinator] = {}
            # Where they are not in the world yet, the others do not meet them before they are.
            if not meeting:
                self._open_across(meeting)
            if part.tensor_size > 1:
                self._tensor = OpsTensorGroup(self.tensor_group)
            self.tensor: TensorGroup = self._tensor or NO_GROUP
            self.boundary: StageBoundary | None = None
            self.feedback: StageFeedback | None = None
            if part.stages > 1:
                self.boundary = StageBoundary(
                    self.pipeline_group, self.tensor_group, hidden, part.layers
                )
                self.feedback = StageFeedback(self.pipeline_group)
            stack.pop_all()

    @property
    def world(self) -> GroupCoordinator:
        """All ranks."""
        return self._groups["world"]

    @property
    def data_group(self) -> GroupCoordinator:
        """The ranks with the same part of the model."""
        return self._groups["data"]

    @property
    def expert_group(self) -> GroupCoordinator | None:
        """The ranks that share whole experts."""
        return self._groups.get("expert")

    def _open_across(self, meeting: int) -> None:
        """The groups that cross replicas."""
        store = self._store.seen_as(self._maker.rank)
        self._groups = self._maker.make(store, self._sizes, _ACROSS, meeting, self._across)
        if self._experts is not None:
            self._experts.open(self._groups["expert"], self.part.replicas)

    def resize(self, change: Resize) -> bool:
        """Have these replicas: make the groups that cross them anew, behind the loss of one all.
        Whether this rank is in one that stays. All ranks, those that come and those that go among
        them, call it with the same change, between the same steps; GroupError names those that do
        not."""
        maker, size, within_s = self._maker, self._sizes.replica, self._maker.at.connect_s
        there = {*change.replicas} if change.is_repair else {*self._replicas, *change.replicas}
        everybody = [rank for one in sorted(there) for rank in range(one * size, (one + 1) * size)]
        # None waits in an old group from here on, so none can be missed there.
        name = f"meeting-{change.meeting}"
        if missing := self._store.roll_call(name, everybody, within_s=within_s):
            raise GroupError(f"{named(missing)} did not come to {name} within {within_s:g} s")
        if self._replica not in change.replicas:
            return False
        self._replicas = change.replicas
        self._across.close()
        maker.rank = change.replicas.index(self._replica) * size + self._local
        self._sizes = replace(self._sizes, data=len(change.replicas))
        self.part = replace(self.part, replicas=len(change.replicas))
        if change.is_repair:
            self._owned.close()
            self._open_own(change.meeting)
        self._open_across(change.meeting)
        return True

    def _open_own(self, meeting: int) -> None:
        """The groups within the replica."""
        store, sizes = self._store.seen_as(self._maker.rank), self._sizes
        own = self._maker.make(store, sizes, _OWN, meeting, self._owned)
        self.tensor_group, self.pipeline_group = own["tensor"], own["pipeline"]
        if self._tensor is not None:
            self._tensor.open(self.tensor_group)

    def close(self) -> None:
        """End all groups, the last made first. What waits in one fails."""
        self._across.close()
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_parallel(
    sizes: Sizes,
    *,
    rank: int,
    local_rank: int,
    at: Rendezvous,
    device: torch.device,
    layers: tuple[range, ...],
    hidden: HiddenSize,
    custom_all_reduce: bool = True,
    meeting: int = 0,
    replica: int | None = None,
) -> ParallelState:
    """Meet the other ranks and make the groups. `layers`: of each stage (partition()); `hidden`: of
    the largest step; `custom_all_reduce`: on GPUs in addition to NCCL's, where it can be.
    `meeting`: above 0 where the other replicas are there already; the groups that cross replicas
    are made by the `resize` of that number. `replica`: this rank's, where `rank`, its place in the
    groups, is not of the replica's number. Raises GroupError, naming the ranks that do not come
    within `at.connect_s`."""
    place = sizes.coordinates(rank)
    part = Part(
        layers=layers[place.stage],
        stage=place.stage,
        stages=sizes.pipeline,
        tensor_rank=place.tensor,
        tensor_size=sizes.tensor,
        replicas=sizes.data if sizes.has_whole_experts else 1,
        redundant_experts=sizes.redundant_experts,
        is_elastic=sizes.is_elastic,
    )
    maker = _Maker(
        rank=rank,
        local_rank=local_rank,
        at=at,
        device=device,
        dtype=hidden.dtype,
        custom_all_reduce=custom_all_reduce,
    )
    replica = place.data if replica is None else replica
    first = replica * sizes.replica
    others = range(first, first + sizes.replica) if meeting else range(sizes.world)
    store = Store(at, first + rank % sizes.replica, others, meeting)
    return ParallelState(part, sizes, store, maker, hidden, meeting, replica)


_OWN, _ACROSS = ("tensor", "pipeline"), ("world", "data", "expert")
"""Kinds of groups within a replica, and of those that cross replicas."""


def _kinds(sizes: Sizes) -> dict[str, Groups]:
    """All groups of each kind, in the order in which they are made."""
    found = {
        "world": (tuple(range(sizes.world)),),
        "tensor": sizes.tensor_groups,
        "pipeline": sizes.pipeline_groups,
        "data": sizes.data_groups,
    }
    return found | {"expert": sizes.expert_groups} if sizes.has_expert_groups else found


def _on_gpu(
    group: ProcessGroup,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    at: Rendezvous,
    is_asked: bool,
) -> FastReduce | None:
    # Triton is not everywhere where torch is.
    from xpyd_worker.kernels.gpu.all_reduce import all_reduce
    from xpyd_worker.parallel.custom_reduce import open_custom_all_reduce
    from xpyd_worker.parallel.peer_memory import GpuPeers

    with torch.cuda.device(device):
        return open_custom_all_reduce(
            group,
            name,
            device=GpuPeers(device),
            launch=all_reduce,
            dtype=dtype,
            shape=ReduceShape(),
            within_s=at.connect_s,
            is_asked=is_asked,
        )

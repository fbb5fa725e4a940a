"""Opens what one rank has of the others, and closes it in the opposite order.

Called once by a rank's process, before it loads its part of the model. See `api.py` for what comes
of it, xpyd_core.parallel.ranks for the members of each group.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Self

import torch

from xpyd_core.parallel.ranks import Groups, Sizes, group_of
from xpyd_worker.kernels.gpu.reduce_shape import ReduceShape
from xpyd_worker.parallel.api import NO_GROUP, ExpertGroup, Part, TensorGroup
from xpyd_worker.parallel.distributed import (
    ProcessGroup,
    Rendezvous,
    Store,
    gloo_device,
    gloo_group,
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


class ParallelState:
    """What a rank has of the others. `close` it, or use it in a `with`. `boundary` and `feedback`:
    None where there is one stage; `expert_group` and `experts`: where no other rank has whole
    experts of this one's stage."""

    def __init__(
        self, part: Part, groups: dict[str, GroupCoordinator], hidden: HiddenSize, owned: ExitStack
    ) -> None:
        """`groups` are owned by `owned`. See `open_parallel`."""
        self.part = part
        self.world, self.tensor_group = groups["world"], groups["tensor"]
        self.pipeline_group, self.data_group = groups["pipeline"], groups["data"]
        self.expert_group = groups.get("expert")
        self._owned = owned
        self.tensor: TensorGroup = NO_GROUP
        if part.tensor_size > 1:
            self.tensor = OpsTensorGroup(self.tensor_group)
        self.experts: ExpertGroup | None = None
        if self.expert_group is not None:
            self.experts = OpsExpertGroup(self.expert_group, part.replicas)
        self.boundary: StageBoundary | None = None
        self.feedback: StageFeedback | None = None
        if part.stages > 1:
            self.boundary = StageBoundary(self.pipeline_group, self.tensor_group, hidden)
            self.feedback = StageFeedback(self.pipeline_group)

    def close(self) -> None:
        """End all groups, the last made first. What waits in one fails."""
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
) -> ParallelState:
    """Meet the other ranks and make the groups. `layers`: of each stage (partition()); `hidden`: of
    the largest step; `custom_all_reduce`: on GPUs in addition to NCCL's, where it can be. Raises
    GroupError, naming the ranks that do not come within `at.connect_s`."""
    place = sizes.coordinates(rank)
    part = Part(
        layers=layers[place.stage],
        stage=place.stage,
        stages=sizes.pipeline,
        tensor_rank=place.tensor,
        tensor_size=sizes.tensor,
        replicas=sizes.data if sizes.has_whole_experts else 1,
        redundant_experts=sizes.redundant_experts,
    )
    store = Store(at, rank, sizes.world)
    gloo = gloo_device(at.address)
    # Perhaps some are on other hosts; that only costs what looking around saves.
    host = Host(ranks=sizes.world, cores=len(os.sched_getaffinity(0)))
    groups: dict[str, GroupCoordinator] = {}
    with ExitStack() as stack:
        for kind, all_of_kind in _kinds(sizes).items():
            ranks = group_of(all_of_kind, rank)
            # The same on all its members, and on no other rank.
            name = f"{kind}-{all_of_kind.index(ranks)}"
            cpu_group = gloo_group(store, f"{name}-cpu", ranks, device=gloo, at=at)
            stack.callback(cpu_group.close)
            if device.type == "cpu":
                device_group = gloo_group(store, f"{name}-device", ranks, device=gloo, at=at)
            else:
                device_group = nccl_group(store, f"{name}-device", ranks, at=at)
            stack.callback(device_group.close)
            fast = shared = None
            if kind in _ON_ONE_HOST and len(ranks) > 1:
                if device.type == "cpu":
                    fast = shared = open_shared_memory(store, name, ranks, at=at, host=host)
                elif kind == "tensor":
                    fast = _on_gpu(cpu_group, name, device, hidden.dtype, at, custom_all_reduce)
            groups[kind] = GroupCoordinator(
                kind,
                device_group=device_group,
                cpu_group=cpu_group,
                device=device,
                local_rank=local_rank,
                fast=fast,
                shared=shared,
            )
            stack.callback(groups[kind].close)
        return ParallelState(part, groups, hidden, stack.pop_all())


_ON_ONE_HOST = ("tensor", "expert")
"""Kinds whose ranks share a host: a tensor group's always (xpyd_core.parallel), an expert group's
where its replicas do, which shows when the memory is opened."""


def _kinds(sizes: Sizes) -> dict[str, Groups]:
    """All groups of each kind, in the order in which they are made."""
    found = {
        "world": (tuple(range(sizes.world)),),
        "tensor": sizes.tensor_groups,
        "pipeline": sizes.pipeline_groups,
        "data": sizes.data_groups,
    }
    return found | {"expert": sizes.expert_groups} if sizes.expert > 1 else found


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

"""The GPU's own all-reduce for a tensor group, where its GPUs have each other's memory.

The kernel is kernels/gpu/all_reduce.py's, what it takes reduce_shape.py's there, the memory
peer_memory.py's. Before a group goes that way its ranks add up known numbers and compare, since a
machine may say that its GPUs reach each other, and be wrong. Where anything is missing all ranks of
the group agree to stay with NCCL, and the first logs why.

See docs/adr/0032.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from xpyd_core.errors import XpydError
from xpyd_core.sizes import format_bytes
from xpyd_worker.kernels.gpu.reduce_shape import MOST_RANKS, WORLD_SIZES, ReduceShape
from xpyd_worker.parallel.api import GroupError
from xpyd_worker.parallel.distributed import ProcessGroup
from xpyd_worker.parallel.peer_memory import (
    GpuPeers,
    NotReachableError,
    PeerMemory,
    agree,
    open_peer_memory,
)

_log = logging.getLogger(__name__)
Launch = Callable[..., None]
"""kernels.gpu.all_reduce.all_reduce."""
FLAG = "--disable-custom-all-reduce"
TYPES = (torch.float32, torch.bfloat16, torch.float16)
_TRIALS = 3
"""A tensor has two places by turns: the third comes to the first one's again."""
_CYCLE = 31
"""Numbers of a trial: with a rank's added all types hold them, and no neighbours are the same."""
_WORLDS = f"{', '.join(map(str, WORLD_SIZES[:-1]))} or {WORLD_SIZES[-1]}"


class CustomAllReduce:
    """See FastReduce. Made by `open_custom_all_reduce`."""

    def __init__(self, memory: PeerMemory, *, launch: Launch, shape: ReduceShape) -> None:
        """Takes `memory` over."""
        self._memory, self._launch, self._shape = memory, launch, shape
        self._rank, self._ranks = memory.group.rank, len(memory.group.ranks)
        self._table = memory.table(MOST_RANKS)

    def takes(self, x: Tensor) -> bool:
        """See FastReduce."""
        return x.dtype in TYPES and self._shape.takes(
            ranks=self._ranks,
            size_bytes=x.numel() * x.element_size(),
            is_contiguous=x.is_contiguous(),
        )

    def all_reduce(self, x: Tensor) -> None:
        """See FastReduce: enqueued, as all of a GPU's. What is captured of it is replayed by all
        ranks, or by none."""
        self._launch(x, self._table, rank=self._rank, ranks=self._ranks, shape=self._shape)

    def close(self) -> None:
        """Give the memory back. When no step is under way."""
        self._memory.close()


def open_custom_all_reduce(
    group: ProcessGroup,
    name: str,
    *,
    device: GpuPeers,
    launch: Launch,
    dtype: torch.dtype,
    shape: ReduceShape,
    within_s: float,
    is_asked: bool = True,
) -> CustomAllReduce | None:
    """The all-reduce for the ranks of `group`, which is over Gloo, whose tensors on the GPU are of
    `dtype`. None, on all of them, where it cannot be, or is not asked for on any; the first says in
    the log how it is. GroupError where a rank does not answer, or the GPUs do not meet
    `within_s`."""
    is_first = group.rank == 0
    try:
        if not is_asked:
            raise NotReachableError(FLAG)
        if len(group.ranks) not in WORLD_SIZES:
            raise NotReachableError(f"{len(group.ranks)} ranks; it is made for {_WORLDS}")
        memory = open_peer_memory(group, name, device=device, size_bytes=shape.memory_bytes)
        made = CustomAllReduce(memory, launch=launch, shape=shape)
        try:
            wrong = _wrong_sums(made, memory, dtype, shape, within_s)
            agree(group, f"peers/{name}/tried", b"", wrong)
        except XpydError:
            made.close()
            raise
    except NotReachableError as error:
        if is_first:
            level = logging.WARNING if is_asked else logging.INFO
            _log.log(level, "group %s: no custom all-reduce, all over NCCL: %s", name, error)
        return None
    if is_first:
        most = format_bytes(shape.most_bytes)
        _log.info("group %s: custom all-reduce of up to %s, beyond it NCCL", name, most)
    return made


def _wrong_sums(
    made: CustomAllReduce,
    memory: PeerMemory,
    dtype: torch.dtype,
    shape: ReduceShape,
    within_s: float,
) -> str:
    """Add up known numbers in all ways there are, which also compiles them; what is wrong."""
    ranks = len(memory.group.ranks)
    for size_bytes in shape.trial_bytes(ranks):
        count = torch.arange(size_bytes // dtype.itemsize) % _CYCLE
        wanted = (ranks * count + sum(range(ranks))).to(dtype)
        for _ in range(_TRIALS):
            x = memory.device.put((count + memory.group.rank).to(dtype))
            assert made.takes(x), "a trial of what it takes"
            made.all_reduce(x)
            if not memory.device.is_done(within_s):
                raise GroupError(
                    f"the GPUs of group {memory.name} do not meet within {within_s:g} s; "
                    f"start with {FLAG}"
                )
            if not torch.equal(x.cpu(), wanted):
                return f"a sum of {format_bytes(size_bytes)} came out wrong"
    return ""

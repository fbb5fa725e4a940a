"""One group of ranks as all its members see it, and the registry that finds it by its name.

A coordinator has two process groups over the same ranks: one that moves what stands on the device
(NCCL on a GPU, Gloo on a CPU), and one over Gloo for what stands on the host, so that numbers and
tokens never queue behind activations. Compiled graphs hold a group's name, never the group: the
operators (`ops.py`) look it up here, which is why the registry belongs to the process.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from xpyd_worker.parallel.distributed import ProcessGroup


class FastReduce(Protocol):
    """A faster all-reduce for some tensors, of one host's ranks."""

    def takes(self, x: Tensor) -> bool:
        """Whether `x` may be given to `all_reduce`; all ranks come to the same answer."""
        ...

    def all_reduce(self, x: Tensor) -> None:
        """Add up all ranks' `x`, in place. Raises GroupError."""
        ...

    def close(self) -> None:
        """Give back its memory."""
        ...


class FastGather(Protocol):
    """A faster all-gather, of one host's ranks and for what stands in its memory."""

    def all_gather(self, out: Tensor, share: Tensor, rows: int) -> None:
        """`out` [rows, size, n] of all ranks' `share` [rows, n], both contiguous. With one row
        `share` may be this rank's place in `out`. Raises GroupError."""
        ...


class GroupCoordinator:
    """One group, as one of its ranks has it."""

    def __init__(
        self,
        kind: str,
        *,
        device_group: ProcessGroup,
        cpu_group: ProcessGroup,
        device: torch.device,
        local_rank: int,
        fast: FastReduce | None = None,
        fast_gather: FastGather | None = None,
    ) -> None:
        """Takes `fast` over; all else stays its maker's."""
        assert device_group.ranks == cpu_group.ranks, "two process groups, one set of ranks"
        self.kind = kind
        self.device = device
        self.device_group = device_group
        self.cpu_group = cpu_group
        self.ranks = cpu_group.ranks
        """Numbers in the world, by their numbers in the group."""
        self.rank_in_group = cpu_group.rank
        """The number for whatever is kept by rank of this group."""
        self.rank = self.ranks[self.rank_in_group]
        """The number in the world."""
        self.local_rank = local_rank
        """The number on this host, and of its GPU."""
        self._fast, self._fast_gather = fast, fast_gather
        self.unique_name = f"{kind}:{_next_number(kind)}"
        _groups[self.unique_name] = self

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def first_rank(self) -> int:
        """In the world, as the three below."""
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        return self.ranks[-1]

    @property
    def next_rank(self) -> int:
        """The first one's, on the last."""
        return self.ranks[(self.rank_in_group + 1) % self.size]

    @property
    def prev_rank(self) -> int:
        """The last one's, on the first."""
        return self.ranks[self.rank_in_group - 1]

    @property
    def is_first(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last(self) -> bool:
        return self.rank_in_group == self.size - 1

    def all_reduce(self, x: Tensor) -> None:
        """Add up all ranks' `x`, in place."""
        if self._fast is not None and self._fast.takes(x):
            self._fast.all_reduce(x)
        else:
            self.device_group.all_reduce(x)

    def all_gather_flat(self, out: Tensor, share: Tensor) -> None:
        """All ranks' `share` one behind the other in `out`, of which it may be a part."""
        if self._fast_gather is not None and share.numel():
            self._fast_gather.all_gather(out, share, 1)
        else:
            self.device_group.all_gather(out, share)

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x` [rows, n] beside each other: [rows, n * size]."""
        rows, width = x.shape
        if self._fast_gather is not None and x.numel():
            beside = x.new_empty(rows, self.size * width)
            self._fast_gather.all_gather(beside, x.contiguous(), rows)
            return beside
        out = x.new_empty(self.size, rows, width)
        self.device_group.all_gather(out, x.contiguous())
        return out.transpose(0, 1).reshape(rows, self.size * width)

    def close(self) -> None:
        """The name is nobody's any more."""
        _groups.pop(self.unique_name, None)
        if self._fast is not None:
            self._fast.close()


_groups: WeakValueDictionary[str, GroupCoordinator] = WeakValueDictionary()
_numbers: Counter[str] = Counter()


def _next_number(kind: str) -> int:
    _numbers[kind] += 1
    return _numbers[kind] - 1


def group_by_name(name: str) -> GroupCoordinator:
    """The open group of that name. KeyError when there is none."""
    try:
        return _groups[name]
    except KeyError:
        raise KeyError(f"no group {name!r} is open here; open: {sorted(_groups)}") from None

"""One group of ranks as all its members see it, its registry, and its operators in torch.

A coordinator has two process groups over the same ranks: one that moves what is on the device (NCCL
on a GPU, Gloo on a CPU), and one over Gloo for what is on the host, so that numbers and tokens
never queue behind activations. A compiled or exported graph holds a group's name, never the group:
the operators (tensor, name of a group) look it up here, which is why the registry belongs to the
process. They have fakes of the same shape, and are registered by torch's lower interface: its
decorator costs four times as much a call, and a step has two calls a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from xpyd_worker.parallel.distributed import ProcessGroup
from xpyd_worker.parallel.shared_memory import SharedMemoryCollectives


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
        shared: SharedMemoryCollectives | None = None,
    ) -> None:
        """`shared` does all but all-reduces, which are `fast`'s. Takes both over, which may be one;
        all else stays its maker's."""
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
        self._fast, self._shared = fast, shared
        self.unique_name = f"{kind}:{_next_number(kind)}"
        _groups[self.unique_name] = self

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def first_rank(self) -> int:
        """A rank in the world, as the three below."""
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
        """Put all ranks' `share` into `out`, one behind the other; `share` may be a part of it."""
        if self._shared is not None and share.numel():
            self._shared.all_gather(out, share, 1)
        else:
            self.device_group.all_gather(out, share)

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x` [rows, n], joined along the rows by rank: [rows, n * size]."""
        rows, width = x.shape
        if self._shared is not None and x.numel():
            joined = x.new_empty(rows, self.size * width)
            self._shared.all_gather(joined, x.contiguous(), rows)
            return joined
        out = x.new_empty(self.size, rows, width)
        self.device_group.all_gather(out, x.contiguous())
        return out.transpose(0, 1).reshape(rows, self.size * width)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See ExpertGroup."""
        x = x.contiguous()
        out = x.new_empty(sum(receive), *x.shape[1:])
        if self._shared is not None:
            self._shared.all_to_all(out, x, send, receive)
        else:
            self.device_group.all_to_all(out, x, send, receive)
        return out

    def close(self) -> None:
        """Take the group out of the registry, and close its faster ways."""
        _groups.pop(self.unique_name, None)
        for way in (self._fast, self._shared):
            if way is not None:
                way.close()


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


# torch.ops and torch.library are not typed.
_library: Any = torch.library
_LIBRARY: Any = _library.Library("xpyd", "FRAGMENT")
_LIBRARY.define("all_reduce_(Tensor(a!) x, str group) -> ()")
_LIBRARY.define("all_gather(Tensor x, str group) -> Tensor")
_LIBRARY.define("all_to_all(Tensor x, SymInt[] send, SymInt[] receive, str group) -> Tensor")


def _all_reduce(x: Tensor, group: str) -> None:
    group_by_name(group).all_reduce(x)


def _all_gather(x: Tensor, group: str) -> Tensor:
    return group_by_name(group).all_gather(x)


def _all_to_all(x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    return group_by_name(group).all_to_all(x, send, receive)


def _fake_all_reduce(x: Tensor, group: str) -> None:
    """Reduce in place: only values change."""


def _fake_all_gather(x: Tensor, group: str) -> Tensor:
    rows, width = x.shape
    return x.new_empty(rows, width * group_by_name(group).size)


def _fake_all_to_all(x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    return x.new_empty(sum(receive), *x.shape[1:])


_LIBRARY.impl("all_reduce_", _all_reduce, "CompositeExplicitAutograd")
_LIBRARY.impl("all_gather", _all_gather, "CompositeExplicitAutograd")
_LIBRARY.impl("all_to_all", _all_to_all, "CompositeExplicitAutograd")
_library.register_fake("xpyd::all_reduce_", _fake_all_reduce, lib=_LIBRARY)
_library.register_fake("xpyd::all_gather", _fake_all_gather, lib=_LIBRARY)
_library.register_fake("xpyd::all_to_all", _fake_all_to_all, lib=_LIBRARY)

_ops: Any = torch.ops
_ALL_REDUCE: Any = _ops.xpyd.all_reduce_.default
_ALL_GATHER: Any = _ops.xpyd.all_gather.default
_ALL_TO_ALL: Any = _ops.xpyd.all_to_all.default


class OpsTensorGroup:
    """See TensorGroup: the group's operators."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.open(group)

    def open(self, group: GroupCoordinator) -> None:
        """Be this group from now on."""
        self.rank, self.size = group.rank_in_group, group.size
        self._name = group.unique_name

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up in place."""
        _ALL_REDUCE(x, self._name)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather in new memory."""
        gathered: Tensor = _ALL_GATHER(x, self._name)
        return gathered


class OpsExpertGroup:
    """See ExpertGroup: the group's operator. Layers keep this object where the group becomes
    another; there is none to call before the first `open`."""

    def __init__(self, ranks: Sequence[int], rank: int, replicas: int) -> None:
        """`ranks` of the world are to be in it, `rank` among them."""
        self.rank, self.size, self.replicas = ranks.index(rank), len(ranks), replicas
        self._name = ""

    def open(self, group: GroupCoordinator, replicas: int) -> None:
        """Be this group from now on."""
        self.rank, self.size, self.replicas = group.rank_in_group, group.size, replicas
        self._name = group.unique_name

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Exchange rows, in new memory."""
        exchanged: Tensor = _ALL_TO_ALL(x, send, receive, self._name)
        return exchanged

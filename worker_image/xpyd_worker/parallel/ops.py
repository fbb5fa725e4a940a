"""Collectives as operators of torch: (tensor, name of a group), with fakes of the same shape.

A compiled or exported graph keeps the name; whoever runs it has a group of that name. Registered by
torch's lower interface: its decorator costs four times as much a call, and a step has two calls a
layer. Typed here, since torch.ops is not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xpyd_worker.parallel.groups import GroupCoordinator, group_by_name

_library: Any = torch.library
_LIBRARY: Any = _library.Library("xpyd", "FRAGMENT")
_LIBRARY.define("all_reduce_(Tensor(a!) x, str group) -> ()")
_LIBRARY.define("all_gather(Tensor x, str group) -> Tensor")


def _all_reduce(x: Tensor, group: str) -> None:
    group_by_name(group).all_reduce(x)


def _all_gather(x: Tensor, group: str) -> Tensor:
    return group_by_name(group).all_gather(x)


def _fake_all_reduce(x: Tensor, group: str) -> None:
    """In place: nothing changes but values."""


def _fake_all_gather(x: Tensor, group: str) -> Tensor:
    rows, width = x.shape
    return x.new_empty(rows, width * group_by_name(group).size)


_LIBRARY.impl("all_reduce_", _all_reduce, "CompositeExplicitAutograd")
_LIBRARY.impl("all_gather", _all_gather, "CompositeExplicitAutograd")
_library.register_fake("xpyd::all_reduce_", _fake_all_reduce, lib=_LIBRARY)
_library.register_fake("xpyd::all_gather", _fake_all_gather, lib=_LIBRARY)

_ops: Any = torch.ops
_ALL_REDUCE: Any = _ops.xpyd.all_reduce_.default
_ALL_GATHER: Any = _ops.xpyd.all_gather.default


class OpsTensorGroup:
    """See TensorGroup: the group's operators."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.rank, self.size = group.rank_in_group, group.size
        self._name = group.unique_name

    def all_reduce(self, x: Tensor) -> Tensor:
        """In place."""
        _ALL_REDUCE(x, self._name)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """In new memory."""
        gathered: Tensor = _ALL_GATHER(x, self._name)
        return gathered

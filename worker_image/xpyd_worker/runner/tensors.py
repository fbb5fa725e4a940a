"""Steps between tensors on any device and Python lists, none of which waits for the device.

Lists enter a device by way of pinned memory, in the order of the stream; torch gives pinned memory
out again only when its copy is done. Values leave it through `to_host`, and are read when the
caller knows that they have come. `to_ints` and `to_floats` are for tensors on the host: torch's own
`tolist` is a list of unknowns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor


def to_ints(tensor: Tensor) -> list[int]:
    """The elements of a one-dimensional integer tensor."""
    return cast("list[int]", cast("Any", tensor).tolist())


def to_floats(tensor: Tensor) -> list[float]:
    """The elements of a one-dimensional float tensor."""
    return cast("list[float]", cast("Any", tensor).tolist())


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`; itself on a CPU."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def numbers(
    values: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A list, or rows of equal length, as a tensor on `device`."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory that is there when what was enqueued so far is done; the tensor
    itself where it is there already."""
    if can_be_read(tensor):
        return tensor
    host = torch.empty(
        tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda", device="cpu"
    )
    return host.copy_(tensor, non_blocking=True)


def can_be_read(tensor: Tensor) -> bool:
    """Whether its values can be looked at without a wait: on a CPU. Elsewhere what they call for is
    done for all rows, with masks."""
    return tensor.device.type == "cpu"


def rows_of(matrix: Tensor, rows: list[int]) -> Tensor:
    """The named rows in this order: a copy, or the matrix itself where that is all of it."""
    if rows == list(range(matrix.shape[0])):
        return matrix
    return matrix.index_select(0, numbers(rows, torch.int64, matrix.device))


def put_ints(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Put each list as int64 on `device`, all by one copy."""
    together = numbers(list(itertools.chain.from_iterable(lists)), torch.int64, device)
    return list(torch.split(together, [len(one) for one in lists]))


def fill_drawn(token_ids: Tensor, at: Tensor, drawn: Tensor, places: Tensor) -> None:
    """Put `drawn[places]` into rows `at` of `token_ids`. A token that is none (the model's numbers
    were not finite) becomes token 0: the engine drops its sequence when it has the tokens."""
    token_ids.index_copy_(0, at, drawn.index_select(0, places).clamp_(min=0))

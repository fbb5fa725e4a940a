"""Small steps between tensors and Python lists (torch's `tolist` is a list of unknowns)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def to_ints(tensor: Tensor) -> list[int]:
    """The elements of a one-dimensional integer tensor."""
    return cast("list[int]", cast("Any", tensor).tolist())


def to_floats(tensor: Tensor) -> list[float]:
    """The elements of a one-dimensional float tensor."""
    return cast("list[float]", cast("Any", tensor).tolist())


def rows_of(matrix: Tensor, rows: list[int]) -> Tensor:
    """The named rows in this order: a copy, or the matrix itself where that is all of it."""
    if rows == list(range(matrix.shape[0])):
        return matrix
    return matrix[torch.tensor(rows)]

"""Tensors to Python lists: torch's `tolist` is typed as a list of unknowns."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor


def to_ints(tensor: Tensor) -> list[int]:
    """The elements of a one-dimensional integer tensor."""
    return cast("list[int]", cast("Any", tensor).tolist())


def to_floats(tensor: Tensor) -> list[float]:
    """The elements of a one-dimensional float tensor."""
    return cast("list[float]", cast("Any", tensor).tolist())

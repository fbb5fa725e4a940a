"""Which share of a stored weight a rank holds, and where it goes.

Between the layers, which say how each of their weights is divided over a tensor group, and the
loader, which reads these shares and nothing else. Numbers and views of tensors, no I/O.

Outputs of one linear (columns of W^T: queries, keys, values, gate, up) and inputs of the next one
(output projection, down) are cut alike, so that what a rank computes of a block needs nothing of
the others but one sum at its end (Megatron-LM, arXiv 1909.08053).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from xpyd_worker.parallel.api import TensorGroup


@dataclass(frozen=True)
class Cut:
    """One dimension of a stored weight: `size` in the checkpoint, of which `held` is here."""

    size: int
    held: range


class Piece(NamedTuple):
    """Part of a stored tensor: it begins `at` these indices and fills `destination`."""

    destination: Tensor
    at: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its place in the stored tensor."""
        ends = zip(self.at, self.destination.shape, strict=True)
        return tuple(slice(first, first + count) for first, count in ends)


class Stored(NamedTuple):
    """What the model takes of one tensor of a checkpoint, whose shape there must be `shape`."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def weight_bytes(weights: Iterable[Mapping[str, Stored]]) -> int:
    """What these take, by their names in a checkpoint, whether they have memory or not."""
    return sum(
        piece.destination.numel() * piece.destination.itemsize
        for named in weights
        for stored in named.values()
        for piece in stored.pieces
    )


def whole(size: int) -> Cut:
    """The share that is all of a dimension."""
    return Cut(size, range(size))


def share(count: int, group: TensorGroup, unit: int = 1) -> Cut:
    """This rank's share of `count` heads, or other things that stay whole, of `unit` each. Where
    ranks are more than heads, neighbours have the same one, as in a KV transfer's plan
    (xpyd_kv.plan.engine_layout). Before: one of `count` and the group's size divides the other."""
    first = group.rank * count // group.size
    end = first + max(1, count // group.size)
    return Cut(count * unit, range(first * unit, end * unit))


def is_first(group: TensorGroup) -> bool:
    """Whether this rank adds what is added once, such as the bias behind a sum over ranks."""
    return group.rank == 0


def all_of(tensor: Tensor) -> Stored:
    """A weight that each rank has whole."""
    return Stored(tuple(tensor.shape), (Piece(tensor, (0,) * tensor.dim()),))


def by_name(
    tensor: Tensor,
    prefix: str,
    names: Sequence[str],
    *,
    rows: Sequence[Cut],
    columns: Cut | None = None,
    kind: str = "weight",
) -> dict[str, Stored]:
    """Checkpoint name -> its part of `tensor`, which holds the cuts of `rows` one behind the other:
    each under its own of `names`, or all under the one that there is. `columns`: the second
    dimension; None where there is none."""
    parts = torch.split(tensor, [len(cut.held) for cut in rows])
    width, left = ((), ()) if columns is None else ((columns.size,), (columns.held.start,))
    if len(names) == 1:
        *firsts, size = itertools.accumulate((cut.size for cut in rows), initial=0)
        pieces = tuple(
            Piece(part, (first + cut.held.start, *left))
            for part, first, cut in zip(parts, firsts, rows, strict=True)
        )
        return {f"{prefix}{names[0]}.{kind}": Stored((size, *width), pieces)}
    return {
        f"{prefix}{name}.{kind}": Stored(
            (cut.size, *width), (Piece(part, (cut.held.start, *left)),)
        )
        for name, part, cut in zip(names, parts, rows, strict=True)
    }

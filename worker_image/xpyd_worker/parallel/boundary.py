"""Between stages: hidden states and residual, from each rank to its like in the stage behind.

Each tensor rank sends its share of both, cut from the flat tensor, and the stage behind gathers the
shares: between stages, where the network is slow, each byte goes once. What is sent goes behind a
head of fixed size on the host's group, by which the receiver knows before the first use that both
speak of one step. Buffers are as large as the largest step, so their addresses hold for good; a
graph that is captured over them stays right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from xpyd_worker.parallel.api import GroupError, Hidden
from xpyd_worker.parallel.distributed import Pending, numbers
from xpyd_worker.parallel.groups import GroupCoordinator

_MAGIC = 0x58_50_59_44
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_TAG, X_TAG, RESIDUAL_TAG = 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class HiddenSize:
    """Hidden states of the largest step: [most_rows, width] of `dtype`."""

    most_rows: int
    width: int
    dtype: torch.dtype


class StageBoundary:
    """See Boundary. One step is on its way in, and one out, at most."""

    def __init__(
        self, pipeline: GroupCoordinator, tensor: GroupCoordinator, hidden: HiddenSize
    ) -> None:
        self._pipeline, self._tensor, self._hidden = pipeline, tensor, hidden
        self._sent: list[Pending] = []
        self._steps_sent = self._steps_received = 0
        self._coming: _Coming | None = None
        if not pipeline.is_first:
            room = tensor.size * self._share(hidden.most_rows)
            self._flat = torch.zeros(2, room, dtype=hidden.dtype, device=pipeline.device)

    def begin_step(self) -> None:
        """See Boundary. GroupError names the rank that has not taken them."""
        sent, self._sent = self._sent, []
        for one in sent:
            one.wait()

    def receive(self, rows: int) -> _Coming:
        """See Boundary. What was begun before must have been got: there is one place for it."""
        assert self._coming is None or self._coming.is_over, "the step before was not got"
        self._steps_received += 1
        head = torch.empty(5, dtype=torch.int64)
        source = self._pipeline.rank_in_group - 1
        at, end = self._own_share(rows)
        if self._pipeline.device.type == "cpu":
            # Gloo ends the process where more arrives than was expected: what a sender in another
            # step sends must fit, so that the head can say it.
            end = None
        self._coming = _Coming(
            self,
            rows,
            [
                self._pipeline.cpu_group.receive(head, source, HEAD_TAG),
                *(
                    self._pipeline.device_group.receive(flat[at:end], source, tag)
                    for flat, tag in zip(self._flat, (X_TAG, RESIDUAL_TAG), strict=True)
                ),
            ],
        )
        return self._coming

    def send(self, hidden: Hidden) -> None:
        """See Boundary. The head first."""
        assert not self._sent, "begin_step was not called"
        rows = len(hidden.x)
        at, end = self._own_share(rows)
        self._steps_sent += 1
        head = torch.tensor(self._head(self._steps_sent, rows), dtype=torch.int64)
        to = self._pipeline.rank_in_group + 1
        self._sent.append(self._pipeline.cpu_group.send(head, to, HEAD_TAG))
        for one, tag in zip(hidden, (X_TAG, RESIDUAL_TAG), strict=True):
            assert one.dtype is self._hidden.dtype, f"hidden states of {one.dtype}"
            share = one.contiguous().view(-1)[at:end]
            self._sent.append(self._pipeline.device_group.send(share, to, tag))

    def arrived(self, rows: int, pending: list[Pending]) -> Hidden:
        """Check the head; wait for the shares, and put them together."""
        head, *shares = pending
        found = numbers(head.wait())
        wanted = self._head(self._steps_received, rows)
        if found != wanted:
            raise GroupError(
                f"rank {self._pipeline.prev_rank} sends {_said(found)}; "
                f"rank {self._pipeline.rank} expects {_said(wanted)}"
            )
        for share in shares:
            share.wait()
        width = self._hidden.width
        if self._tensor.size > 1:
            size = self._share(rows)
            at = self._tensor.rank_in_group * size
            for flat in self._flat:
                gathered = flat[: size * self._tensor.size]
                self._tensor.all_gather_flat(gathered, gathered[at : at + size])
        x, residual = (flat[: rows * width].view(rows, width) for flat in self._flat)
        return Hidden(x, residual)

    def _share(self, rows: int) -> int:
        """Elements that each tensor rank sends of a tensor; the last ones may send fewer."""
        return -(-rows * self._hidden.width // self._tensor.size)

    def _own_share(self, rows: int) -> tuple[int, int]:
        assert 0 < rows <= self._hidden.most_rows, f"{rows} rows; {self._hidden.most_rows} at most"
        share = self._share(rows)
        at = self._tensor.rank_in_group * share
        return at, min(at + share, rows * self._hidden.width)

    def _head(self, step: int, rows: int) -> list[int]:
        return [_MAGIC, step, rows, self._hidden.width, _TYPES.index(self._hidden.dtype)]


class _Coming:
    """See Incoming."""

    def __init__(self, boundary: StageBoundary, rows: int, pending: list[Pending]) -> None:
        self._boundary, self._rows, self._pending = boundary, rows, pending

    @property
    def is_over(self) -> bool:
        return not self._pending

    def get(self) -> Hidden:
        """See Incoming."""
        pending, self._pending = self._pending, []
        assert pending, "got before"
        return self._boundary.arrived(self._rows, pending)


def _said(head: list[int]) -> str:
    magic, step, rows, width, dtype = head
    if magic != _MAGIC or not 0 <= dtype < len(_TYPES):
        return f"what is no head of hidden states ({head})"
    return f"step {step}, [{rows}, {width}] of {_TYPES[dtype]}"

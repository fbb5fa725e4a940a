"""Between the stages of a pipeline: hidden states go forward, drawn tokens come back.

Each tensor rank sends its share of hidden states and residual, cut from the flat tensor, and the
next stage gathers the shares: between stages, where the network is slow, each byte goes once. So do
the features that a draft head reads, where there is one; how many come to a stage follows from its
layers. A head of fixed size goes first, on the host's group; by it the receiver knows before the
first use that both sides are in one step. Buffers are as large as the largest step, so their
addresses never change; a graph that is captured over them stays right.

Drawn tokens go on the host's group: the next step is scheduled there, and on a device they would
wait behind hidden states whose sender waits for these very tokens. One message a step and stage, of
a size that both know: a head, the tokens, both counts. Several may be under way; they arrive in
order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from xpyd_worker.kernels.post_update import Sampled
from xpyd_worker.parallel.api import GroupError, Hidden
from xpyd_worker.parallel.distributed import Pending, numbers
from xpyd_worker.parallel.groups import GroupCoordinator

_MAGIC = 0x58_50_59_44
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_TAG, X_TAG, RESIDUAL_TAG = 1, 2, 3
_SAMPLED_TAG = 4
FEATURE_TAG = 5
"""Of the first; the others count on."""
_SAMPLED_HEAD = 3
_MOST_UNDER_WAY = 64
"""Messages. More steps than stages are never under way, so the oldest of these has long arrived."""


@dataclass(frozen=True, kw_only=True)
class HiddenSize:
    """Hidden states of the largest step: [most_rows, width] of `dtype`. `feature_layers`: layers
    of the model whose inputs the last stage gives to a draft head."""

    most_rows: int
    width: int
    dtype: torch.dtype
    feature_layers: tuple[int, ...] = ()


class StageBoundary:
    """A rank's neighbours: the same tensor share of the stage before and of the next one. One step
    is on its way in, and one out, at most."""

    def __init__(
        self,
        pipeline: GroupCoordinator,
        tensor: GroupCoordinator,
        hidden: HiddenSize,
        layers: range,
    ) -> None:
        """`layers`: those of this stage."""
        self._pipeline, self._tensor, self._hidden = pipeline, tensor, hidden
        self._sent: list[Pending] = []
        self._steps_sent = self._steps_received = 0
        self._incoming: IncomingHidden | None = None
        if not pipeline.is_first:
            room = tensor.size * self._share(hidden.most_rows)
            # What enters this stage is read here, as is what enters each of its layers.
            features = sum(layer < layers.start for layer in {*hidden.feature_layers})
            self._flat = torch.zeros(2 + features, room, dtype=hidden.dtype, device=pipeline.device)

    def begin_step(self) -> None:
        """Wait until what the step before sent has left. GroupError names the rank that has not
        taken it."""
        sent, self._sent = self._sent, []
        for one in sent:
            one.wait()

    def receive(self, rows: int) -> IncomingHidden:
        """Begin to receive; not on the first stage. The wait is at the first use. What was begun
        before must have been got: there is one place for it."""
        assert self._incoming is None or self._incoming.is_over, "the step before was not got"
        self._steps_received += 1
        head = torch.empty(5, dtype=torch.int64)
        source = self._pipeline.rank_in_group - 1
        at, end = self._own_share(rows)
        if self._pipeline.device.type == "cpu":
            # Gloo ends the process where more arrives than was expected: what a sender in another
            # step sends must fit, so that the head can say it.
            end = None
        self._incoming = IncomingHidden(
            self,
            rows,
            [
                self._pipeline.cpu_group.receive(head, source, HEAD_TAG),
                *(
                    self._pipeline.device_group.receive(flat[at:end], source, tag)
                    for flat, tag in zip(self._flat, _tags(len(self._flat)), strict=True)
                ),
            ],
        )
        return self._incoming

    def send(self, hidden: Hidden) -> None:
        """Begin to send, the head first, and keep the tensors until they have left; not on the last
        stage."""
        assert not self._sent, "begin_step was not called"
        rows = len(hidden.x)
        at, end = self._own_share(rows)
        self._steps_sent += 1
        head = torch.tensor(self._head(self._steps_sent, rows), dtype=torch.int64)
        to = self._pipeline.rank_in_group + 1
        self._sent.append(self._pipeline.cpu_group.send(head, to, HEAD_TAG))
        tensors = (hidden.x, hidden.residual, *hidden.features)
        for one, tag in zip(tensors, _tags(len(tensors)), strict=True):
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
                f"rank {self._pipeline.prev_rank} sends {_describe(found)}; "
                f"rank {self._pipeline.rank} expects {_describe(wanted)}"
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
        x, residual, *features = (flat[: rows * width].view(rows, width) for flat in self._flat)
        return Hidden(x, residual, tuple(features))

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


class IncomingHidden:
    """Hidden states on their way here."""

    def __init__(self, boundary: StageBoundary, rows: int, pending: list[Pending]) -> None:
        self._boundary, self._rows, self._pending = boundary, rows, pending

    @property
    def is_over(self) -> bool:
        return not self._pending

    def get(self) -> Hidden:
        """Wait for them, once, and give them in buffers whose addresses never change: they are
        overwritten by the next step's."""
        pending, self._pending = self._pending, []
        assert pending, "got before"
        return self._boundary.arrived(self._rows, pending)


def _tags(tensors: int) -> list[int]:
    """Of `x`, `residual` and the features."""
    return [X_TAG, RESIDUAL_TAG, *range(FEATURE_TAG, FEATURE_TAG + tensors - 2)]


def _describe(head: list[int]) -> str:
    magic, step, rows, width, dtype = head
    if magic != _MAGIC or not 0 <= dtype < len(_TYPES):
        return f"what is no head of hidden states ({head})"
    return f"step {step}, [{rows}, {width}] of {_TYPES[dtype]}"


class StageFeedback:
    """Sends drawn tokens from the last stage to all others, each to the ranks of its tensor
    share."""

    def __init__(self, pipeline: GroupCoordinator) -> None:
        self._pipeline = pipeline
        self._sent = 0
        self._received = 0
        self._under_way: deque[Pending] = deque()

    def send(self, sampled: Sampled) -> None:
        """Send `sampled`, which is on the host; on the last stage, once for each step that draws.
        Waits only where a stage is too far behind; GroupError names it."""
        self._sent += 1
        message = _pack(self._sent, sampled)
        for stage in range(self._pipeline.size - 1):
            self._under_way.append(self._pipeline.cpu_group.send(message, stage, _SAMPLED_TAG))
        while len(self._under_way) > _MOST_UNDER_WAY:
            self._under_way.popleft().wait()

    def receive(self, requests: int, width: int = 1) -> IncomingSampled:
        """Begin to receive, on the other stages, what the last stage drew in its next step that
        draws."""
        self._received += 1
        message = torch.empty(_SAMPLED_HEAD + requests * (width + 1), dtype=torch.int64)
        last = self._pipeline.size - 1
        pending = self._pipeline.cpu_group.receive(message, last, _SAMPLED_TAG)
        return IncomingSampled(pending, [self._received, requests, width], self._pipeline.last_rank)


class IncomingSampled:
    """Drawn tokens on their way here."""

    def __init__(self, pending: Pending, head: list[int], source: int) -> None:
        self._pending, self._head, self._source = pending, head, source

    def get(self) -> Sampled:
        """Wait for them; on the host. GroupError where the last stage drew for others."""
        message = self._pending.wait()
        found = numbers(message[:_SAMPLED_HEAD])
        if found != self._head:
            raise GroupError(
                f"rank {self._source} drew for step, requests, width {found}; "
                f"{self._head} was expected"
            )
        return _unpack(message)


def _pack(step: int, sampled: Sampled) -> Tensor:
    """[head, tokens, num_sampled and num_rejected in halves] as int64."""
    requests, width = sampled.tokens.shape
    message = torch.empty(_SAMPLED_HEAD + requests * (width + 1), dtype=torch.int64)
    message[:_SAMPLED_HEAD] = torch.tensor([step, requests, width])
    message[_SAMPLED_HEAD : _SAMPLED_HEAD + requests * width] = sampled.tokens.reshape(-1)
    counts = message[_SAMPLED_HEAD + requests * width :].view(torch.int32).view(2, requests)
    counts[0], counts[1] = sampled.num_sampled, sampled.num_rejected
    return message


def _unpack(message: Tensor) -> Sampled:
    requests, width = numbers(message[1:_SAMPLED_HEAD])
    tokens = message[_SAMPLED_HEAD : _SAMPLED_HEAD + requests * width].view(requests, width)
    counts = message[_SAMPLED_HEAD + requests * width :].view(torch.int32).view(2, requests)
    return Sampled(tokens, counts[0], counts[1])

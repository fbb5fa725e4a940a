"""What the last stage drew, to every other stage: tokens and how many of them count.

On the host's group, since whoever schedules the next step wants them there, and since on a device
they would stand in line behind hidden states whose sender waits for these very tokens. One message
a step and stage, of a size that both know: a head, the tokens, both counts. Several may be under
way; they arrive in order.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from xpyd_worker.parallel.api import GroupError, Sampled
from xpyd_worker.parallel.distributed import Pending, numbers
from xpyd_worker.parallel.groups import GroupCoordinator

_TAG = 4
_HEAD = 3
_MOST_UNDER_WAY = 64
"""Messages. More steps than stages are never under way, so the oldest of these has long arrived."""


class StageFeedback:
    """See Feedback."""

    def __init__(self, pipeline: GroupCoordinator) -> None:
        self._pipeline = pipeline
        self._told = 0
        self._asked = 0
        self._under_way: deque[Pending] = deque()

    def tell(self, sampled: Sampled) -> None:
        """See Feedback. Waits where a stage is too far behind; GroupError names it."""
        self._told += 1
        message = _pack(self._told, sampled)
        for stage in range(self._pipeline.size - 1):
            self._under_way.append(self._pipeline.cpu_group.send(message, stage, _TAG))
        while len(self._under_way) > _MOST_UNDER_WAY:
            self._under_way.popleft().wait()

    def receive(self, requests: int, width: int = 1) -> _ComingSampled:
        """See Feedback."""
        self._asked += 1
        message = torch.empty(_HEAD + requests * (width + 1), dtype=torch.int64)
        last = self._pipeline.size - 1
        pending = self._pipeline.cpu_group.receive(message, last, _TAG)
        return _ComingSampled(pending, [self._asked, requests, width], self._pipeline.last_rank)


class _ComingSampled:
    """See IncomingSampled."""

    def __init__(self, pending: Pending, head: list[int], source: int) -> None:
        self._pending, self._head, self._source = pending, head, source

    def get(self) -> Sampled:
        """See IncomingSampled. GroupError where the last stage drew for others."""
        message = self._pending.wait()
        found = numbers(message[:_HEAD])
        if found != self._head:
            raise GroupError(
                f"rank {self._source} drew for step, requests, width {found}; "
                f"{self._head} was expected"
            )
        return _unpack(message)


def _pack(step: int, sampled: Sampled) -> Tensor:
    """[head, tokens, num_sampled and num_rejected in halves] as int64."""
    requests, width = sampled.tokens.shape
    message = torch.empty(_HEAD + requests * (width + 1), dtype=torch.int64)
    message[:_HEAD] = torch.tensor([step, requests, width])
    message[_HEAD : _HEAD + requests * width] = sampled.tokens.reshape(-1)
    counts = message[_HEAD + requests * width :].view(torch.int32).view(2, requests)
    counts[0], counts[1] = sampled.num_sampled, sampled.num_rejected
    return message


def _unpack(message: Tensor) -> Sampled:
    requests, width = numbers(message[1:_HEAD])
    tokens = message[_HEAD : _HEAD + requests * width].view(requests, width)
    counts = message[_HEAD + requests * width :].view(torch.int32).view(2, requests)
    return Sampled(tokens, counts[0], counts[1])

"""A rank without others: what stands for neighbours where an engine has one stage."""

from __future__ import annotations

from dataclasses import dataclass

from xpyd_worker.parallel.api import (
    NO_GROUP,
    Boundary,
    Feedback,
    Hidden,
    Incoming,
    IncomingSampled,
    Part,
    Sampled,
    TensorGroup,
)


class _NoBoundary:
    def begin_step(self) -> None:
        """Nothing was sent."""

    def receive(self, rows: int) -> Incoming:
        raise AssertionError("one stage: nobody sends hidden states")

    def send(self, hidden: Hidden) -> None:
        raise AssertionError("one stage: nobody takes hidden states")


class _NoFeedback:
    def tell(self, sampled: Sampled) -> None:
        """Nobody asks."""

    def receive(self, requests: int, width: int = 1) -> IncomingSampled:
        raise AssertionError("one stage: nobody else draws tokens")


NO_BOUNDARY: Boundary = _NoBoundary()
NO_FEEDBACK: Feedback = _NoFeedback()


@dataclass(frozen=True)
class Alone:
    """See Parallel."""

    part: Part
    tensor: TensorGroup = NO_GROUP
    boundary: Boundary = NO_BOUNDARY
    feedback: Feedback = NO_FEEDBACK


def alone(layers: int) -> Alone:
    """All `layers` of a model on one rank."""
    return Alone(Part(layers=range(layers)))

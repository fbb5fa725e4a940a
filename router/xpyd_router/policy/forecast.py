"""What a request is expected to take where it was placed. Pure."""

from __future__ import annotations

from typing import NamedTuple

from xpyd_router.fleet.loads import Load


class Forecast(NamedTuple):
    """None where the instance is unknown."""

    ttft_s: float | None
    """From the pick to the first token."""
    itl_s: float | None
    """Between two tokens, in the mean."""


def forecast(first: Load, last: Load, prefill_tokens: int) -> Forecast:
    """Of one request more: `first` computes so many tokens of its prompt, `last` makes its tokens.
    Neither counts it yet.
    """
    line, gap = first.pace.first, last.pace.gap
    return Forecast(
        line.at(first.queued_tokens + prefill_tokens) if line.is_known else None,
        gap.at(last.active + 1) if gap.is_known else None,
    )

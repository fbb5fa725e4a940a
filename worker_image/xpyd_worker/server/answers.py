"""What the two endpoints' answers have in common: ids, usage, the seam of a format.

A format turns deltas into the `choices` of one endpoint; stream.py and the handlers put them into
chunks and bodies.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from xpyd_core.blocks import prompt_digest
from xpyd_worker.server.generation import ChoiceDelta, Generation, Usage
from xpyd_worker.server.openai_types import Options


@dataclass(frozen=True)
class AnswerId:
    """Head of every chunk and body. The id holds neither the request's uuid nor an address."""

    id: str
    created: int
    model: str


def answer_id(prefix: str, options: Options, model: str, *, alone: str | None) -> AnswerId:
    """The router's id and time where it gave them (a stream goes on under them), else our own.

    `alone`: the caller's own id, as vLLM does; our router puts one of its own in its place.
    """
    own = f"{prefix}-{alone or os.urandom(16).hex()}"
    created = options.kv.created
    return AnswerId(
        options.kv.response_id or own, int(time.time()) if created is None else created, model
    )


# Writing one takes about 2 us; a hop to a thread is worth more only above that many.
INLINE_SCORES = 1024


class Format(Protocol):
    """Choices of one endpoint. One object serves one HTTP request, one call at a time, on any
    thread."""

    @property
    def whole_object(self) -> str:
        """`object` of a whole answer."""
        ...

    @property
    def chunk_object(self) -> str:
        """`object` of a streamed chunk."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """Choices of the chunks before the first token; may be none."""
        ...

    def chunk(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """The choice of one streamed chunk; None where it would say nothing."""
        ...

    def whole(self, delta: ChoiceDelta) -> dict[str, Any]:
        """The choice of a whole answer from all that it gained."""
        ...

    def scores(self, deltas: Sequence[ChoiceDelta]) -> int:
        """How many log probabilities stand in what `chunk`, or `whole` with `extras`, will give for
        these: they are the work."""
        ...

    def extras(self, *, continued: bool) -> dict[str, Any]:
        """Members that stand beside `choices` in a whole answer or the first chunk; `continued`:
        of a stream whose beginning the client has."""
        ...


def collect(into: dict[int, ChoiceDelta], deltas: Sequence[ChoiceDelta]) -> None:
    """Add deltas to what their choices gained before."""
    for delta in deltas:
        known = into.setdefault(delta.index, delta)
        if known is delta:
            continue
        known.text += delta.text
        known.token_ids += delta.token_ids
        known.logprobs += delta.logprobs
        known.finish_reason = delta.finish_reason
        known.stop_reason = delta.stop_reason


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def prefill_params(generation: Generation) -> dict[str, Any]:
    """P's `kv_transfer_params`: what D needs to know of each prompt's transfer."""
    reports = generation.reports
    incarnations = [report.decode_incarnation for report in reports if report.decode_incarnation]
    return {
        "transfer": [report.state for report in reports],
        "decode_incarnation": incarnations[-1] if incarnations else "",
        "prompt_digest": [prompt_digest(job.request.prompt) for job in generation.jobs],
    }

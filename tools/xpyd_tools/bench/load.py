"""The requests of a measured load: their prompts and their times. Only the file of prompts is I/O.

Random prompts share no prefix, so no prefix cache helps; each run has other token ids, unless the
seed is given. Requests come with gamma-distributed gaps. A Poisson process, the usual model of
independent users, has exponential gaps: shape 1. A smaller shape makes bursts, a larger one evens
the load out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from pathlib import Path
from random import Random
from typing import Any, cast

from xpyd_core.errors import UserError

Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class LoadRequest:
    """One request: a prompt as text or token ids, or the messages of a chat; and how many tokens
    to answer with at most."""

    prompt: str | tuple[int, ...] | Messages
    output_tokens: int


def random_requests(
    count: int, *, input_tokens: int, output_tokens: int, vocabulary: range, seed: int
) -> list[LoadRequest]:
    """Prompts of exactly `input_tokens` ids out of `vocabulary`."""
    rng = Random(seed)
    return [
        LoadRequest(tuple(rng.choices(vocabulary, k=input_tokens)), output_tokens)
        for _ in range(count)
    ]


def read_requests(path: Path, count: int, *, output_tokens: int) -> list[LoadRequest]:
    """The first `count` lines of a JSON lines file, from the beginning again where it has fewer.

    A line is an object with `prompt` (text or token ids) or `messages`, and may have
    `output_tokens`. UserError names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--dataset {path}: {error}") from error
    requests = [
        _read_request(line, f"--dataset {path}, line {number}", output_tokens)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not requests:
        raise UserError(f"--dataset {path}: it has no prompts")
    return list(islice(cycle(requests), count))


def _read_request(line: str, where: str, output_tokens: int) -> LoadRequest:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: no JSON: {error}") from error
    members = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    prompt = members.get("prompt") or members.get("messages")
    most = members.get("output_tokens", output_tokens)
    if not isinstance(prompt, str | list) or not isinstance(most, int) or most < 1:
        raise UserError(
            f'{where}: expected {{"prompt": text or token ids}} or {{"messages": [...]}}, and '
            '"output_tokens" from 1 on where it is there'
        )
    if isinstance(prompt, list):
        found = cast("list[Any]", prompt)
        if all(isinstance(one, int) for one in found):
            return LoadRequest(tuple(cast("list[int]", found)), most)
    return LoadRequest(cast("str | Messages", prompt), most)


def arrival_times(
    requests: int, *, rate_per_s: float, burstiness: float, seed: int
) -> tuple[float, ...]:
    """Seconds from the start at which each request comes; the first comes at 0.

    `burstiness` is the gamma distribution's shape: the gaps have the mean 1 / `rate_per_s` and the
    variance that divided by `burstiness`, times the mean. An infinite rate: all at once.
    """
    if requests < 1 or rate_per_s <= 0 or burstiness <= 0:
        raise ValueError("expected at least one request, a rate and a burstiness above 0")
    if math.isinf(rate_per_s):
        return (0.0,) * requests
    rng = Random(seed)
    scale_s = 1 / (rate_per_s * burstiness)
    gaps = (rng.gammavariate(burstiness, scale_s) for _ in range(requests - 1))
    return tuple(accumulate(gaps, initial=0.0))

"""What a measured load asks: prompts of random token ids, or those of a file.

Random prompts share no prefix, so no prefix cache helps; other ids in each run, unless the seed is
given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any, cast

from xpyd_core.errors import UserError

Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Ask:
    """One request: a prompt as text or token ids, or the messages of a chat; and how many tokens
    to answer with at most."""

    prompt: str | tuple[int, ...] | Messages
    output_tokens: int


def random_asks(
    count: int, *, input_tokens: int, output_tokens: int, vocabulary: range, seed: int
) -> list[Ask]:
    """Prompts of exactly `input_tokens` ids out of `vocabulary`."""
    rng = Random(seed)
    return [
        Ask(tuple(rng.choices(vocabulary, k=input_tokens)), output_tokens) for _ in range(count)
    ]


def read_asks(path: Path, count: int, *, output_tokens: int) -> list[Ask]:
    """The first `count` lines of a JSON lines file, from the beginning again where it has fewer.

    A line is an object with `prompt` (text or token ids) or `messages`, and may have
    `output_tokens`. UserError names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--dataset {path}: {error}") from error
    asks = [
        _ask(line, f"--dataset {path}, line {number}", output_tokens)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not asks:
        raise UserError(f"--dataset {path}: it has no prompts")
    return list(islice(cycle(asks), count))


def _ask(line: str, where: str, output_tokens: int) -> Ask:
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
            return Ask(tuple(cast("list[int]", found)), most)
    return Ask(cast("str | Messages", prompt), most)

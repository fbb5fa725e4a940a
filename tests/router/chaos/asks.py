"""Requests drawn from a seed: both endpoints, streamed or not, every option whose answer the router
has a hand in. The answer follows from the request alone (truth.py). Pure.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tests.router.chaos.truth import CONTEXT, Wanted

MODEL = "m"
Endpoint = Literal["completions", "chat/completions"]


@dataclass(frozen=True)
class Ask:
    """One client's request."""

    number: int
    endpoint: Endpoint
    body: dict[str, Any]

    @cached_property
    def wanted(self) -> Wanted:
        """What a right answer is made of."""
        return Wanted.of(self.endpoint, self.body)

    @property
    def tag(self) -> str:
        """By which the mocks' call logs know it."""
        return self.body["user"]


def _text(rng: random.Random, longest: int) -> str:
    return "".join(rng.choice("abcdefghij k") for _ in range(rng.randrange(1, longest)))


def _sampling(rng: random.Random) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.4:
        return {"temperature": 0}
    if kind < 0.95:
        return {"seed": rng.choice([0, 7, rng.getrandbits(40), -5]), "temperature": 0.8}
    return {"temperature": 1.0}


def _stop(rng: random.Random, wanted: Wanted) -> Any:
    """Stop strings, often cut out of what the answer would be."""
    choice = rng.randrange(wanted.choices)
    text = "".join(step.text for step in wanted.steps(choice))
    if len(text) < 4 or rng.random() < 0.2:
        return "never said"
    start = rng.randrange(len(text) - 2)
    found = text[start : start + rng.randrange(1, 9)]
    return found if rng.random() < 0.5 else ["never said", found]


def _options(rng: random.Random, is_chat: bool) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if rng.random() < 0.6:
        body["stream"] = True
        if rng.random() < 0.4:
            body["stream_options"] = {"include_usage": True}
            if rng.random() < 0.3:
                body["stream_options"]["continuous_usage_stats"] = True
    if rng.random() < 0.3:
        body["return_token_ids"] = True
    if rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": rng.randrange(3)} if is_chat else {"logprobs": 2}
    if rng.random() < 0.2:
        body["ignore_eos"] = True
    if rng.random() < 0.25:
        body["n"] = 2
    return body


def _limit(rng: random.Random, is_chat: bool) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.12:
        limit = 1
    elif kind < 0.2:
        return {}
    else:
        limit = rng.choice([2, 3, rng.randrange(2, 20), rng.randrange(10, 60)])
    name = "max_completion_tokens" if is_chat and rng.random() < 0.5 else "max_tokens"
    body: dict[str, Any] = {name: limit}
    if rng.random() < 0.15:
        body["min_tokens"] = rng.randrange(limit + 1)
    return body


def draw(rng: random.Random, number: int) -> Ask:
    """One request. `number` is its name in the logs."""
    is_chat = rng.random() < 0.4
    body: dict[str, Any] = {"model": MODEL, "user": f"chaos-{number}"}
    if is_chat:
        body["messages"] = [{"role": "user", "content": _text(rng, 30)}]
        if rng.random() < 0.3:
            body["messages"].insert(0, {"role": "system", "content": _text(rng, 20)})
    else:
        text = _text(rng, 60)
        several = [text, _text(rng, 20)]
        body["prompt"] = rng.choice([text, text, text, list(text.encode()), several])
    body |= {**_sampling(rng), **_options(rng, is_chat), **_limit(rng, is_chat)}
    endpoint: Endpoint = "chat/completions" if is_chat else "completions"
    # An echo is served by one D alone, which nobody can go on for once its text is out.
    is_plain = not is_chat and isinstance(body["prompt"], str) and "stream" not in body
    if is_plain and "logprobs" not in body and rng.random() < 0.1:
        body["echo"] = True
    if rng.random() < 0.3:
        body["stop"] = _stop(rng, Wanted.of(endpoint, body))
    ask = Ask(number, endpoint, body)
    assert max(map(len, ask.wanted.prompts)) + 1 < CONTEXT
    return ask

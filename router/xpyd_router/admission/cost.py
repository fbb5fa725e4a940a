"""What a request costs, before an engine has computed it. Pure."""

from __future__ import annotations

from xpyd_router.admission.values import Cost
from xpyd_router.requests.bodies import Ask


def cost_of(ask: Ask, prompt_tokens: int) -> Cost:
    """Its prompts and all that its choices may put out; without a limit, what is expected."""
    output = ask.output_tokens if ask.max_tokens is None else ask.max_tokens * ask.choices
    return Cost(1, prompt_tokens + output, len(ask.raw))

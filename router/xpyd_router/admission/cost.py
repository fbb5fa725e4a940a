"""What a request costs, before an engine has counted it. Pure."""

from __future__ import annotations

from xpyd_router.admission.values import Cost
from xpyd_router.requests.bodies import COMPLETIONS_MAX_TOKENS, Ask

_BYTES_PER_TOKEN = 4
"""Of English text, and of a body with token ids about as many."""
_CHAT_OUTPUT = 1024
"""A chat's answer without a limit: the context would be the limit, which few answers come near."""


def cost_of(ask: Ask) -> Cost:
    """All prompts and choices of `ask` together, the prompts by the length of the body."""
    output = ask.max_tokens
    if output is None:
        output = _CHAT_OUTPUT if ask.is_chat else COMPLETIONS_MAX_TOKENS
    prompt = len(ask.raw) // _BYTES_PER_TOKEN
    return Cost(1, prompt + output * ask.choices, len(ask.raw))

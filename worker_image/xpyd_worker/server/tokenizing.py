"""`POST /tokenize` and `POST /detokenize`, as vLLM has them. Nothing of it reaches the engine.

Texts longer than the context are counted, too: how much too long a prompt is, is a good question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xpyd_worker.server.fields import Fields, bad
from xpyd_worker.server.not_built import refuse_not_built
from xpyd_worker.server.openai_types import parse_messages
from xpyd_worker.server.prompts import (
    INLINE_TOKENS,
    characters_of,
    check_vocabulary,
    template_ids,
    text_ids,
)
from xpyd_worker.server.service import Service

# A second of encoding. No model's context is longer, but for texts of very long tokens.
MAX_CHARACTERS = 4 * 1024 * 1024
MAX_TOKENS = 1024 * 1024
_TEMPLATE_FIELDS = (
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "mm_processor_kwargs",
    "tools",
)


async def tokenize(service: Service, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to `prompt` (text) or `messages` (a conversation in the model's template)."""
    fields = Fields(body)
    service.model.name_for(fields.text("model", 1024))
    has_prompt, has_messages = fields.get("prompt") is not None, fields.get("messages") is not None
    if has_prompt == has_messages:
        raise bad("prompt", "give either prompt, a text, or messages, a conversation")
    wants_pieces = fields.boolean("return_token_strs")
    if has_prompt:
        text = fields.text("prompt", MAX_CHARACTERS) or ""
        add_special = _flag(fields, "add_special_tokens", default=True)
        ids = await text_ids(service, text, add_special_tokens=add_special)
    else:
        ids = await _conversation_ids(service, body, fields)
    return {
        "count": len(ids),
        "max_model_len": service.model.max_model_len,
        "tokens": ids,
        "token_strs": await _pieces(service, ids) if wants_pieces else None,
    }


async def detokenize(service: Service, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to `tokens`: their text, special ones included."""
    fields = Fields(body)
    service.model.name_for(fields.text("model", 1024))
    ids = fields.token_ids("tokens", MAX_TOKENS)
    if ids is None:
        raise bad("tokens", "expected a list of token ids")
    check_vocabulary(service.model, ids, "tokens")

    def decode() -> str:
        return service.model.tokenizer.decode(ids, skip_special_tokens=False)

    is_short = len(ids) <= INLINE_TOKENS
    return {"prompt": decode() if is_short else await service.threads.run(decode)}


async def _conversation_ids(service: Service, body: Mapping[str, Any], fields: Fields) -> list[int]:
    refuse_not_built({name: body.get(name) for name in _TEMPLATE_FIELDS}, chat=True)
    messages = parse_messages(fields)
    characters = characters_of(messages)
    if characters > MAX_CHARACTERS:
        raise bad("messages", f"at most {MAX_CHARACTERS} characters, got {characters}")
    return await template_ids(
        service,
        messages,
        add_generation_prompt=_flag(fields, "add_generation_prompt", default=True),
        add_special_tokens=_flag(fields, "add_special_tokens", default=False),
    )


def _flag(fields: Fields, name: str, *, default: bool) -> bool:
    return default if fields.get(name) is None else fields.boolean(name)


async def _pieces(service: Service, ids: Sequence[int]) -> list[str]:
    """The tokens as the vocabulary writes them."""

    def pieces() -> list[str]:
        return [service.model.tokenizer.token_piece(token_id) for token_id in ids]

    return pieces() if len(ids) <= INLINE_TOKENS else await service.threads.run(pieces)

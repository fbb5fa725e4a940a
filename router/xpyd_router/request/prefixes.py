"""What policies compare of requests: the session, and marks of the prompt's beginnings. Pure.

Marks are at fixed places, every block at first, then ever further apart: what two prompts have in
common is known to an eighth, with 58 marks for 32 Ki tokens. They are made of the JSON's text, so
that they need no tokenizer, and four bytes of it are taken for a token; or, where the router counts
tokens, they are the engines' own block hashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from xpyd_core.blocks import DEFAULT_BLOCK_SIZE
from xpyd_router.policy.base import Mark

_MAX_SESSION = 512
_BYTES_PER_TOKEN = 4
_MAX_BLOCKS = 2048
"""32 Ki tokens; longer prefixes are not distinguished."""


def _places() -> Iterator[int]:
    place = 1
    while place <= _MAX_BLOCKS:
        yield place
        place += max(1, place // 8)


_BLOCKS = tuple(_places())
"""Ends of marks, in blocks."""
_TEXT = tuple(
    (blocks * DEFAULT_BLOCK_SIZE, blocks * DEFAULT_BLOCK_SIZE * _BYTES_PER_TOKEN)
    for blocks in _BLOCKS
)
"""The same in tokens, and in bytes of text."""


def session_in(fields: Mapping[str, Any]) -> str:
    """What the body calls the session: `prompt_cache_key`, else `user`; empty without either."""
    for name in ("prompt_cache_key", "user"):
        value = fields.get(name)
        if isinstance(value, str) and value:
            return value[:_MAX_SESSION]
    return ""


def text_marks(fields: Mapping[str, Any], *, is_chat: bool) -> tuple[Mark, ...]:
    """Marks of a request's prompt. What precedes it in a chat, or changes all of it, is in
    them, too: tools, the template's variables, the salt, the model.
    """
    root = [fields.get(name) for name in ("model", "cache_salt", "chat_template_kwargs")]
    # One JSON text is the beginning of another where the prompts are, up to its closing bracket.
    try:
        hasher = blake2b(orjson.dumps([is_chat, *root]), digest_size=16)
        text = orjson.dumps(fields.get("messages" if is_chat else "prompt"))
        if is_chat and (tools := fields.get("tools")):
            text = orjson.dumps(tools) + text
    except orjson.JSONEncodeError:  # nested deeper than any prompt; the engine refuses it
        return ()
    view, before = memoryview(text), 0
    marks: list[Mark] = []
    for tokens, end in _TEXT:
        if end > len(text):
            break
        hasher.update(view[before:end])
        marks.append((tokens, hasher.digest()))
        before = end
    return tuple(marks)


def hash_marks(hashes: Sequence[bytes], block_tokens: int) -> tuple[Mark, ...]:
    """Marks of a prompt whose full blocks have these hashes."""
    return tuple(
        (blocks * block_tokens, hashes[blocks - 1]) for blocks in _BLOCKS if blocks <= len(hashes)
    )

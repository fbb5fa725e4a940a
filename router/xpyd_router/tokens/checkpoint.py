"""One checkpoint's tokenizer, templates and block chain: a request's JSON in, counts out.

For the child only. The calls of the library are those of the engine (xpyd_worker.runner.tokenizer),
so that the ids are its, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import tokenizers

from xpyd_core.blocks import SCHEME, block_hashes
from xpyd_core.errors import UserError
from xpyd_core.tokenizer_files import TokenizerFiles
from xpyd_router.tokens.prompts import (
    Prompt,
    Refused,
    completion_prompts,
    conversation,
    flag,
    kept_tokens,
    salt,
)
from xpyd_router.tokens.template import ChatTemplates

_LONG_CHARACTERS = 4096

Guard = Callable[[], AbstractContextManager[None]]


class Limits(NamedTuple):
    """Bounds on one request."""

    max_characters: int = 4 * 1024 * 1024
    """Of what a template puts out."""
    max_hashes: int = 2048
    """Of a chain: 32 Ki tokens in blocks of 16. Prefixes that are longer are told apart no more."""


class Counts(NamedTuple):
    """Tokens of all prompts, and the hashes of the first one's full blocks."""

    tokens: int
    hashes: list[bytes]


class Checkpoint:
    """Immutable after it was made. `guard` bounds the time of what runs in it."""

    def __init__(
        self, files: TokenizerFiles, limits: Limits, guard: Guard = lambda: nullcontext()
    ) -> None:
        """Raises UserError for a tokenizer that cannot be read. Slow for a large vocabulary."""
        self._files = files
        self._limits = limits
        self._guard = guard
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(files.tokenizer)
        except Exception as error:  # the Rust library raises plain Exception
            raise UserError(f"tokenizer: {error}") from error
        self._templates = ChatTemplates(
            files.chat_templates, files.special_tokens, max_characters=limits.max_characters
        )

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self._files.block_size

    def count(self, fields: Mapping[str, Any], *, is_chat: bool) -> Counts:
        """What the engine will have of a request with these `fields`; Refused where it has none."""
        prompts = self._chat_ids(fields) if is_chat else self._completion_ids(fields)
        worst = max((max(ids) for ids in prompts if ids), default=0)
        if not all(prompts) or worst >= self._files.vocab_size:
            raise Refused("a prompt is empty or has an id that the model does not know")
        hashes: list[bytes] = []
        if self._files.prefix_caching and self._files.block_hash == SCHEME:
            size = self._files.block_size
            first = prompts[0][: size * self._limits.max_hashes]
            hashes = block_hashes(first, block_size=size, salt=salt(fields))
        return Counts(sum(map(len, prompts)), hashes)

    def _completion_ids(self, fields: Mapping[str, Any]) -> list[list[int]]:
        is_special = flag(fields, "add_special_tokens", default=True)
        kept = kept_tokens(fields, self._files.max_model_len)

        def ids(prompt: Prompt) -> list[int]:
            found = self._encode(prompt, is_special) if isinstance(prompt, str) else list(prompt)
            return found if kept is None else found[-kept:]

        return [ids(prompt) for prompt in completion_prompts(fields)]

    def _chat_ids(self, fields: Mapping[str, Any]) -> list[list[int]]:
        given = conversation(fields, knows_developer=self._files.knows_developer)
        is_special = flag(fields, "add_special_tokens", default=False)
        kept = kept_tokens(fields, self._files.max_model_len)
        with self._guard():
            text = self._templates.render(given)
        ids = self._encode(text, is_special)
        return [ids if kept is None else ids[-kept:]]

    def _encode(self, text: str, is_special: bool) -> list[int]:
        if len(text) <= _LONG_CHARACTERS:
            encoding = self._tokenizer.encode(text, add_special_tokens=is_special)
        else:
            # "fast": without the offsets, which nobody reads here.
            encode = self._tokenizer.encode_batch_fast
            encoding = encode([text], add_special_tokens=is_special)[0]
        return cast("list[int]", encoding.ids)

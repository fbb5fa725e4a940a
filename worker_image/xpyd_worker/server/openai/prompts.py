"""Texts and conversations to token ids: prompts of requests, `POST /tokenize`, `POST /detokenize`.

Short texts are encoded on the event loop, long ones on the text threads. Nothing here reaches the
engine. /tokenize counts texts longer than the context, too, so that a client sees how much too long
its prompt is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from xpyd_core.bodies import NO_VALUE, check_text, read, refuse
from xpyd_core.complaints import shown
from xpyd_core.errors import ApiError, UserError
from xpyd_core.openai import (
    MAX_DETOKENIZED,
    MAX_TOKENIZED_CHARACTERS,
    DetokenizeRequest,
    TokenizeRequest,
)
from xpyd_worker.server.openai.chats import Conversation, conversation_of
from xpyd_worker.server.openai.not_built import refuse_not_built
from xpyd_worker.server.openai.params import Prompt, too_long
from xpyd_worker.server.service import ServedModel, Service

_Item = TypeVar("_Item", bound=Sized)
_Found = TypeVar("_Found")
# Encoding 4 k characters takes about a millisecond; a thread hop is worth more only above that.
_INLINE_CHARACTERS = 4096
# Words are encoded one by one, twice each.
_INLINE_BAD_WORD_CHARACTERS = 256
# Below that many a hop to a thread costs more than looking the tokens' text up.
INLINE_TOKENS = 4096
# Short texts share a hop, up to so many times what is done inline: a client that leaves is noticed
# between two of them.
_HOP = 16


def kept_tokens(model: ServedModel, truncate: int | None) -> int | None:
    """How many tokens of a prompt's end are kept; None: all. Of -1 one is left for the answer."""
    return model.max_model_len - 1 if truncate == -1 else truncate


async def completion_ids(
    service: Service, prompts: Sequence[Prompt], *, truncate: int | None = None
) -> list[tuple[int, ...]]:
    """Ids of each prompt of /v1/completions, with the model's BOS where it uses one. `truncate` as
    in Options."""
    model = service.model
    kept = kept_tokens(model, truncate)
    if kept is not None:
        prompts = [one if isinstance(one, str) else one[-kept:] for one in prompts]
    for prompt in prompts:
        if isinstance(prompt, str):
            if kept is not None:
                continue
            _refuse_hopeless(model, len(prompt), "prompt")
        elif len(prompt) >= model.max_model_len:
            raise too_long(model.max_model_len, f"your prompt has {len(prompt)} tokens", "prompt")
        else:
            check_vocabulary(model, prompt, "prompt")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encode = partial(model.tokenizer.encode, add_special_tokens=True)
    encoded = iter(await _each(service, encode, texts, inline=_INLINE_CHARACTERS))
    found = [tuple(next(encoded) if isinstance(one, str) else one) for one in prompts]
    if kept is not None:
        found = [ids[-kept:] for ids in found]
    if not all(found):
        raise refuse("prompt", "is empty after tokenization")
    return found


async def prompt_texts(
    service: Service, prompts: Sequence[Prompt], *, skip_special_tokens: bool
) -> list[str]:
    """The text of each prompt, as echo puts it in front of the answer."""
    ids = [list(prompt) for prompt in prompts if not isinstance(prompt, str)]
    decode = partial(service.model.tokenizer.decode, skip_special_tokens=skip_special_tokens)
    decoded = iter(await _each(service, decode, ids, inline=INLINE_TOKENS))
    return [one if isinstance(one, str) else next(decoded) for one in prompts]


async def _each(
    service: Service, work: Callable[[_Item], _Found], items: Sequence[_Item], *, inline: int
) -> list[_Found]:
    """What `work` gives for each item; on a thread where they are longer than `inline` together."""
    if sum(map(len, items)) <= inline:
        return [work(item) for item in items]
    found: list[_Found] = []
    for group in _groups(items, _HOP * inline):
        found += await service.threads.run(lambda group=group: [work(item) for item in group])
    return found


def _groups(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    """Neighbours that are at most `size` long together, or one that is longer."""
    start, length = 0, 0
    for index, item in enumerate(items):
        if index > start and length + len(item) > size:
            yield items[start:index]
            start, length = index, 0
        length += len(item)
    yield items[start:]


async def chat_ids(
    service: Service, conversation: Conversation, *, truncate: int | None = None
) -> tuple[int, ...]:
    """Ids of a conversation, the beginning of the assistant's answer included."""
    kept = kept_tokens(service.model, truncate)
    if kept is None:
        _refuse_hopeless(service.model, conversation.characters, "messages")
    ids = await template_ids(service, conversation, add_special_tokens=False)
    return tuple(ids if kept is None else ids[-kept:])


async def text_ids(service: Service, text: str, *, add_special_tokens: bool) -> list[int]:
    """Ids of `text`, however many."""
    encode = partial(service.model.tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return await service.threads.run(encode, is_short=len(text) <= _INLINE_CHARACTERS)


async def template_ids(
    service: Service, conversation: Conversation, *, add_special_tokens: bool
) -> list[int]:
    """Ids of a conversation in the model's template, however many; 400 where it refuses it."""
    model = service.model
    messages: Sequence[dict[str, Any]] = conversation.messages
    if not model.knows_developer:
        # OpenAI's newer name for the same thing; templates of older models know one of them.
        messages = [
            {**message, "role": "system"} if message["role"] == "developer" else message
            for message in messages
        ]
    apply = partial(
        model.tokenizer.apply_chat_template,
        messages,
        tools=conversation.tools,
        documents=conversation.documents,
        variables=conversation.variables,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        add_special_tokens=add_special_tokens,
    )
    try:
        is_short = conversation.is_plain and conversation.characters <= _INLINE_CHARACTERS
        return await service.threads.run(apply, is_short=is_short)
    except ApiError:
        raise
    except UserError as error:
        raise ApiError(400, str(error), param="messages") from error


def _refuse_hopeless(model: ServedModel, characters: int, name: str) -> None:
    """Refuse at once a text that cannot fit however it is encoded (megabytes take seconds)."""
    if characters <= _INLINE_CHARACTERS:
        return
    least = -(-characters // model.max_token_bytes)
    if least >= model.max_model_len:
        raise too_long(model.max_model_len, f"your {name} has at least {least} tokens", name)


def check_vocabulary(model: ServedModel, ids: Sequence[int], name: str) -> None:
    """400 for an id that the model does not have."""
    worst = max(ids, default=0)
    if worst >= model.vocab_size:
        raise refuse(name, f"token id {worst} is not in the vocabulary of {model.vocab_size} ids")


async def bad_word_ids(service: Service, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences of `words` at the beginning of a text and, as vLLM has it, those with a space
    in front where that makes another first token and no more tokens."""
    find = partial(_bad_word_ids, service.model, words)
    is_short = sum(map(len, words)) <= _INLINE_BAD_WORD_CHARACTERS
    return await service.threads.run(find, is_short=is_short)


def _bad_word_ids(model: ServedModel, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        text = word.lstrip()
        plain = tuple(model.tokenizer.encode(text, add_special_tokens=False))
        if not plain:
            raise refuse("bad_words", f"{shown(word)} has no tokens")
        spaced = tuple(model.tokenizer.encode(f" {text}", add_special_tokens=False))
        found[plain] = None
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found[spaced] = None
    return tuple(found)


def output_limit(
    model: ServedModel, prompt_tokens: int, *, asked: int | None, default: int | None, name: str
) -> int:
    """How many tokens may follow the prompt. `asked` is the client's max_tokens; where it gave
    none, `default`, but never more than the context has room for (None: all of it).

    400 when the prompt, or prompt and `asked`, exceed the context.
    """
    room = model.max_model_len - prompt_tokens
    if room < 1:
        raise too_long(model.max_model_len, f"your {name} has {prompt_tokens} tokens", name)
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise too_long(
            model.max_model_len,
            f"you requested {prompt_tokens + asked} tokens "
            f"({prompt_tokens} in the {name}, {asked} in the completion)",
            "max_tokens",
        )
    return asked


_TEMPLATE_FIELDS = ("chat_template", "mm_processor_kwargs")


class ToTokenize(NamedTuple):
    """A body of POST /tokenize, and its conversation where it has one."""

    asked: TokenizeRequest
    conversation: Conversation | None


def parse_tokenize(body: bytes) -> ToTokenize:
    """The body of POST /tokenize."""
    check_text(body)
    asked = read(TokenizeRequest, body)
    if (asked.prompt is None) == (asked.messages is None):
        raise refuse("prompt", "give either prompt, a text, or messages, a conversation")
    if asked.messages is None:
        return ToTokenize(asked, None)
    refuse_not_built(body, chat=True, names=_TEMPLATE_FIELDS)
    return ToTokenize(asked, conversation_of(body, asked.messages, asked))


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """The body of POST /detokenize. A list that is too long is refused before it is read."""
    check_text(body)
    text = bytes(read(_DetokenizeTexts, body).tokens)
    if text.count(b",") >= MAX_DETOKENIZED:
        raise refuse("tokens", f"must have at most {MAX_DETOKENIZED} items")
    return read(DetokenizeRequest, body)


class _DetokenizeTexts(msgspec.Struct, frozen=True, gc=False):
    """What of the body may be long."""

    tokens: msgspec.Raw = NO_VALUE


async def tokenize(service: Service, call: ToTokenize) -> dict[str, Any]:
    """The answer to `prompt` (text) or `messages` (a conversation in the model's template)."""
    asked, conversation = call
    service.model.name_for(asked.model)
    if conversation is None:
        add_special = asked.add_special_tokens is not False
        ids = await text_ids(service, asked.prompt or "", add_special_tokens=add_special)
    else:
        ids = await _conversation_ids(service, asked, conversation)
    return {
        "count": len(ids),
        "max_model_len": service.model.max_model_len,
        "tokens": ids,
        "token_strs": await _pieces(service, ids) if asked.return_token_strs else None,
    }


async def detokenize(service: Service, asked: DetokenizeRequest) -> dict[str, Any]:
    """The answer to `tokens`: their text, special ones included."""
    service.model.name_for(asked.model)
    ids = asked.tokens
    check_vocabulary(service.model, ids, "tokens")
    decode = partial(service.model.tokenizer.decode, ids, skip_special_tokens=False)
    return {"prompt": await service.threads.run(decode, is_short=len(ids) <= INLINE_TOKENS)}


async def _conversation_ids(
    service: Service, asked: TokenizeRequest, conversation: Conversation
) -> list[int]:
    characters = conversation.characters
    if characters > MAX_TOKENIZED_CHARACTERS:
        raise refuse("messages", f"at most {MAX_TOKENIZED_CHARACTERS} characters, got {characters}")
    add_special = bool(asked.add_special_tokens)
    return await template_ids(service, conversation, add_special_tokens=add_special)


async def _pieces(service: Service, ids: Sequence[int]) -> list[str]:
    """The tokens as the vocabulary writes them."""

    def pieces() -> list[str]:
        return [service.model.tokenizer.token_piece(token_id) for token_id in ids]

    return await service.threads.run(pieces, is_short=len(ids) <= INLINE_TOKENS)

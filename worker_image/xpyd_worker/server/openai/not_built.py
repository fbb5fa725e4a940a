"""Fields of OpenAI's and vLLM's API that this engine does not have: which values change nothing.

A client library or a router may send such a field with its default; that is accepted. Any other
value gets 400 with the field's name, since an answer that silently ignores it would be wrong.
Fields that no API knows are ignored, as vLLM does. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from xpyd_core.bodies import NO_VALUE, refuse

# null is always accepted and is in no row.
_BOTH: Mapping[str, tuple[Any, ...]] = {
    "custom_params": ({},),
    "detokenize": (True,),
    "early_stopping": (False,),
    "ebnf": (),
    "grammar": (),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "no_stop_trim": (False,),
    "regex": (),
    "request_id": ("",),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_params": ({},),
    "stop_regex": ([],),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "prompt_embeds": ([],),
    "suffix": ("",),
}
_CHAT: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "separate_reasoning": (True,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_reasoning": (True,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


_SHORT_BYTES = 4096
"""A value of more JSON is no default."""
_TABLES = ({**_BOTH, **_COMPLETION}, {**_BOTH, **_CHAT})


def _texts_of(names: Iterable[str]) -> msgspec.json.Decoder[Any]:
    """A decoder of these members of an object, each as its JSON."""
    members = [(name, msgspec.Raw, NO_VALUE) for name in (*names, "best_of", "n")]
    return msgspec.json.Decoder(msgspec.defstruct("NotBuilt", members, gc=False))


_READERS = tuple(map(_texts_of, _TABLES))


def refuse_not_built(body: bytes, *, chat: bool, names: Collection[str] | None = None) -> None:
    """Raise the 400 for a field of `body`, a JSON object, that would change the answer, but is not
    built. `names`: only of these fields."""
    texts = _READERS[chat].decode(body)
    for name, neutral in _TABLES[chat].items():
        text = getattr(texts, name)
        if (names is None or name in names) and not _is_neutral(text, neutral):
            raise refuse(name, _allowed(neutral))
    if names is None and not _is_neutral(texts.best_of, (_value_of(texts.n) or 1,)):
        raise refuse(
            "best_of", "this engine does not support it yet; leave it out or send n's value"
        )


def _is_neutral(text: msgspec.Raw, neutral: tuple[Any, ...]) -> bool:
    value = _value_of(text)
    return value is None or any(_same(value, one) for one in neutral)


def _value_of(text: msgspec.Raw) -> object:
    """The value; None where it is absent or null, the text itself where that is long."""
    if len(text) > _SHORT_BYTES:
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):  # a number of very many digits, or very deep
        return text


def _same(value: object, neutral: object) -> bool:
    # True == 1 in Python, but `"length_penalty": true` is a wrong type and no default.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _allowed(neutral: tuple[Any, ...]) -> str:
    show: Callable[[object], str] = repr
    values = " or ".join(show(one) for one in neutral)
    also = f"; leave it out or send {values}" if values else "; leave it out"
    return f"this engine does not support it yet{also}"

"""A JSON object's members as typed values, with errors that name the member. Pure.

The request parsers use it; it knows JSON and OpenAI's error format, and no endpoint. A null member
counts as absent. A boolean is not a number. Fields of OpenAI's and vLLM's API that this engine does
not implement are refused here by name, unless their value changes nothing.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, cast

from xpyd_core.errors import ApiError

_SHOWN_CHARACTERS = 40
_IDS = 2**31


def bad(name: str, message: str, *, code: str | None = None) -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, f"{name}: {message}", param=name, code=code)


def too_long(max_model_len: int, detail: str, param: str) -> ApiError:
    """A 400 in OpenAI's words for what is longer than the context; `detail` says how long it is."""
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, {detail}. "
        "Please reduce the length of the prompt or of the completion."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def shown(value: object) -> str:
    """A value as an error message shows it: short, whatever the client sent."""
    try:
        is_long = isinstance(value, list | dict)
        text = reprlib.repr(cast("object", value)) if is_long else repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        return "a number of very many digits"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


class Fields:
    """The members of one JSON object. Errors put `prefix` before their names."""

    def __init__(self, members: Mapping[str, Any], prefix: str = "") -> None:
        self._members = members
        self._prefix = prefix

    def name(self, name: str) -> str:
        """The member's name as the client knows it."""
        return self._prefix + name

    def get(self, name: str) -> Any:  # noqa: ANN401 - any JSON value
        """The member, or None where it is null or absent."""
        return self._members.get(name)

    def has(self, name: str) -> bool:
        """Whether the member is there, be it null."""
        return name in self._members

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer from `low` to `high`."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise bad(self.name(name), f"expected an integer, got {shown(value)}")
        if not low <= value <= high:
            raise bad(self.name(name), f"must be {low} to {high}, got {shown(value)}")
        return value

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        """A finite number from `low` (not `low` itself where `above`) to `high`."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise bad(self.name(name), f"expected a number, got {shown(value)}")
        # Not by math.isfinite: an integer may be larger than any float.
        if not low <= value <= high or (above and value == low):
            least = f"above {low:g} and at most {high:g}" if above else f"{low:g} to {high:g}"
            raise bad(self.name(name), f"must be {least}, got {shown(value)}")
        return float(value)

    def boolean(self, name: str, *, default: bool = False) -> bool:
        """true or false; `default` where absent."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad(self.name(name), f"expected true or false, got {shown(value)}")
        return value

    def text(self, name: str, max_characters: int | None = None) -> str | None:
        """A string of at most `max_characters`; None: of any length."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise bad(self.name(name), f"expected a string, got {shown(value)}")
        if max_characters is not None and len(value) > max_characters:
            raise bad(self.name(name), f"at most {max_characters} characters, got {len(value)}")
        return value

    def items(self, name: str, max_items: int) -> list[Any] | None:
        """A list of at most `max_items`."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise bad(self.name(name), f"expected a list, got {shown(value)}")
        found = cast("list[Any]", value)
        if len(found) > max_items:
            raise bad(self.name(name), f"at most {max_items} items, got {len(found)}")
        return found

    def object(self, name: str) -> Fields | None:
        """A JSON object's own members."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise bad(self.name(name), f"expected an object, got {shown(value)}")
        return Fields(cast("dict[str, Any]", value), f"{self._prefix}{name}.")

    def token_ids(self, name: str, max_items: int) -> tuple[int, ...] | None:
        """A list of token ids."""
        found = self.items(name, max_items)
        return None if found is None else as_token_ids(found, self.name(name))


def is_token_id(value: object) -> bool:
    """Whether a JSON value can be a token id; whether the model has it is checked later."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _IDS


def as_token_ids(values: list[Any], name: str) -> tuple[int, ...]:
    """`values` as token ids; the error names the first that is none."""
    # Four loops in C take a tenth of one in Python, and a list may have a million items.
    if values and set(map(type, values)) == {int} and min(values) >= 0 and max(values) < _IDS:
        return tuple(values)
    for index, value in enumerate(values):
        if not is_token_id(value):
            raise bad(name, f"item {index}: expected a token id, got {shown(value)}")
    return tuple(values)


# null is always accepted and is in no row.
_BOTH: Mapping[str, tuple[Any, ...]] = {
    "custom_params": ({},),
    "detokenize": (True,),
    "early_stopping": (False,),
    "ebnf": (),
    "grammar": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "no_stop_trim": (False,),
    "regex": (),
    "request_id": ("",),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_params": ({},),
    "stop_regex": ([],),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "prompt_embeds": ([],),
    "suffix": ("",),
}
_CHAT: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def _same(value: object, neutral: object) -> bool:
    # True == 1 in Python, but `"length_penalty": true` is a wrong type and no default.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def refuse_not_built(body: Mapping[str, Any], *, chat: bool) -> None:
    """Raise the 400 for a field of `body` that would change the answer, but is not built."""
    table = {**_BOTH, **(_CHAT if chat else _COMPLETION)}
    for name, neutral in table.items():
        value = body.get(name)
        if value is not None and not any(_same(value, one) for one in neutral):
            raise bad(name, _allowed(neutral))
    _refuse_best_of(body)


def _allowed(neutral: tuple[Any, ...]) -> str:
    show: Callable[[object], str] = repr
    values = " or ".join(show(one) for one in neutral)
    also = f"; leave it out or send {values}" if values else "; leave it out"
    return f"this engine does not support it yet{also}"


def _refuse_best_of(body: Mapping[str, Any]) -> None:
    best_of = body.get("best_of")
    if best_of is not None and not _same(best_of, body.get("n") or 1):
        raise bad("best_of", "this engine does not support it yet; leave it out or send n's value")

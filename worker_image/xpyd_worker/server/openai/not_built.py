"""Fields of OpenAI's and vLLM's API that this engine does not have: which values change nothing.

A client library or a router may send such a field with its default; that is accepted. Any other
value gets 400 with the field's name, since an answer that silently ignores it would be wrong.
Fields that no API knows are ignored, as vLLM does. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from xpyd_core.openai import refuse

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
            raise refuse(name, _allowed(neutral))
    _refuse_best_of(body)


def _allowed(neutral: tuple[Any, ...]) -> str:
    show: Callable[[object], str] = repr
    values = " or ".join(show(one) for one in neutral)
    also = f"; leave it out or send {values}" if values else "; leave it out"
    return f"this engine does not support it yet{also}"


def _refuse_best_of(body: Mapping[str, Any]) -> None:
    best_of = body.get("best_of")
    if best_of is not None and not _same(best_of, body.get("n") or 1):
        raise refuse(
            "best_of", "this engine does not support it yet; leave it out or send n's value"
        )

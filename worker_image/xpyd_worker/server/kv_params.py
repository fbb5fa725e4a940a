"""`kv_transfer_params` of a request: what our router tells P and D (docs: continuation). Pure.

Null and unknown keys count as absent, so that other routers' keys do no harm. The lists per choice
follow OpenAI's order, i*n+j for choice j of prompt i; the others have one entry per prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from xpyd_worker.server.fields import Fields, as_token_ids, bad, shown

MAX_CONTINUE_TOKENS = 2**20
_STATES = ("none", "pending", "granted")
_SEED = 2**64


@dataclass(frozen=True)
class KvParams:
    """Checked kv_transfer_params.

    `from_router`: the key client_max_tokens was there (its value may be null): our router asks P.
    `continue_from`: ids that each choice already put out; empty for none. `emit_from`: of how many
    of them the client has the text. `first_logprobs`: P's `logprobs` objects, per choice.
    `max_model_len` is the smaller context of the pair: P refuses what D could not hold.
    `transfer`, `decode_incarnation` and `prompt_digest` are P's answer; empty where not given.
    """

    seed: int | None = None
    from_router: bool = False
    client_max_tokens: int | None = None
    max_model_len: int | None = None
    continue_from: tuple[tuple[int, ...], ...] = ()
    emit_from: tuple[int, ...] = ()
    first_logprobs: tuple[dict[str, Any] | None, ...] = ()
    response_id: str | None = None
    created: int | None = None
    transfer: tuple[str, ...] = ()
    decode_incarnation: str = ""
    prompt_digest: tuple[str, ...] = ()


def parse_kv_params(body: Fields, *, choices: int, prompts: int) -> KvParams:
    """The body's kv_transfer_params for `prompts` prompts with `choices` choices in all."""
    fields = body.object("kv_transfer_params")
    if fields is None:
        return KvParams()
    continue_from = _continue_from(fields, choices)
    return KvParams(
        seed=fields.integer("seed", -_SEED, _SEED),
        from_router=fields.has("client_max_tokens"),
        client_max_tokens=fields.integer("client_max_tokens", 0, 2**62),
        max_model_len=fields.integer("max_model_len", 1, 2**53),
        continue_from=continue_from,
        emit_from=_emit_from(fields, continue_from),
        first_logprobs=_first_logprobs(fields, choices),
        response_id=fields.text("response_id", 256),
        created=fields.integer("created", 0, 2**53),
        transfer=_words(fields, "transfer", prompts, _STATES),
        decode_incarnation=fields.text("decode_incarnation", 64) or "",
        prompt_digest=_words(fields, "prompt_digest", prompts, None),
    )


def _list_of(fields: Fields, name: str, length: int) -> list[Any]:
    """A list with `length` entries; empty where absent."""
    found = fields.items(name, length)
    if found is None:
        return []
    if len(found) != length:
        raise bad(fields.name(name), f"expected {length} entries, got {len(found)}")
    return found


def _continue_from(fields: Fields, choices: int) -> tuple[tuple[int, ...], ...]:
    name = fields.name("continue_from")
    result: list[tuple[int, ...]] = []
    for ids in _list_of(fields, "continue_from", choices):
        if not isinstance(ids, list):
            raise bad(name, f"expected lists of token ids, got {shown(ids)}")
        result.append(as_token_ids(cast("list[Any]", ids), name))
    if sum(map(len, result)) > MAX_CONTINUE_TOKENS:
        raise bad(name, f"at most {MAX_CONTINUE_TOKENS} token ids")
    return tuple(result)


def _emit_from(fields: Fields, continue_from: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    found = _list_of(fields, "emit_from", len(continue_from))
    for ids, k in zip(continue_from, found, strict=False):
        if not isinstance(k, int) or isinstance(k, bool) or not 0 <= k <= len(ids):
            raise bad(fields.name("emit_from"), f"must be 0 to {len(ids)}, got {shown(k)}")
    return tuple(found) or (0,) * len(continue_from)


def _first_logprobs(fields: Fields, choices: int) -> tuple[dict[str, Any] | None, ...]:
    found = _list_of(fields, "first_logprobs", choices)
    for one in found:
        if one is not None and not isinstance(one, dict):
            raise bad(fields.name("first_logprobs"), f"expected objects, got {shown(one)}")
    return tuple(found)


def _words(
    fields: Fields, name: str, prompts: int, allowed: tuple[str, ...] | None
) -> tuple[str, ...]:
    found = _list_of(fields, name, prompts)
    for one in found:
        if not isinstance(one, str) or len(one) > 64 or (allowed and one not in allowed):
            raise bad(fields.name(name), f"unexpected entry {shown(one)}")
    return tuple(found)

"""What one request keeps over its attempts, and what each attempt sends to P and D. Pure.

`flow` drives it. The rule: nothing that the client has is sent again. Once P's first token is on
the wire, a later attempt continues behind the ids that were sent. D's body is the client's bytes
with kv_transfer_params spliced in; nothing else of it is encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import msgspec
import orjson
from msgspec.structs import replace

from xpyd_core.bodies import NO_VALUE, LongBody, is_absent, read, refuse
from xpyd_core.errors import ApiError, ProtocolError
from xpyd_core.kv_outcome import Cause, Outcome, Said, cause_of, read_header
from xpyd_router.access_log import Trace
from xpyd_router.fleet.instances import Instance, InstanceKey
from xpyd_router.fleet.poison import Break
from xpyd_router.policy.base import NO_SLO, Forecast, PrefixMark, Slo
from xpyd_router.policy.canary import Share
from xpyd_router.policy.pairs import Pair
from xpyd_router.request.answers import (
    DONE,
    OUTPUT_DETAILS,
    ChunkWriter,
    Head,
    PrefillAnswer,
    chunk_of,
    end_of_stream,
    parse_prefill_answer,
    role_events,
)
from xpyd_router.request.client_request import ChatMembers, InferenceRequest

_SERVED_TOKENS = 32
"""A request that kills in its stream does so at one place: tries behind it get a few tokens each,
P's and those of the steps under way."""
TokenIds = tuple[tuple[int, ...], ...]
"""Ids per choice, in OpenAI's order: i*n+j for choice j of prompt i."""


@dataclass
class Sent:
    """What the client has of a stream; it grows while D streams."""

    token_ids: list[list[int]]
    """Tokens of each choice, with those whose text is held back."""
    compatibility: str
    """Only instances that go on as this (`Instance.goes_on_as`) give the ids the same meaning."""
    usage: dict[str, Any]
    """P's first usage: it counts the prompt. Empty where no P was asked."""
    model: str
    """The name that the chunks bear."""
    ended: set[int] = field(default_factory=set[int])
    """Choices whose finish_reason went out."""
    reasoning: dict[int, int] = field(default_factory=dict[int, int])
    """Tokens of reasoning in choices that ended, where an engine tells them from the answer."""
    has_usage: bool = False
    """The chunk that counts the tokens went out."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt's, where an engine goes on behind these and `token_ids`, as behind a prompt."""
    settled: int = 0
    """How many tokens of the only choice have their text with the client; only with `prompt_ids`.
    """

    def note(self, choice: dict[str, Any]) -> bool:
        """Take one choice of a chunk; whether the client is to have it. A choice that has ended
        ends once: a D that goes on behind it says so again.
        """
        index, ids = choice.get("index"), choice.get("token_ids")
        # The client has this in the usage.
        reasoning = choice.pop("reasoning_tokens", None)
        if type(index) is not int or not 0 <= index < len(self.token_ids):
            return True
        if type(reasoning) is int:
            self.reasoning[index] = reasoning
        if index in self.ended:
            return False
        if isinstance(ids, list):
            self.token_ids[index].extend(cast("list[int]", ids))
        if choice.get("finish_reason") is not None:
            self.ended.add(index)
        return True

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return len(self.ended) == len(self.token_ids)


class Prefilled(NamedTuple):
    """P's answer and what it is to the client."""

    answer: PrefillAnswer
    token_ids: TokenIds
    """All ids of each choice that D must know of."""
    is_news: bool
    """Whether the answer's tokens are the client's; else P only made the KV."""
    goes_on: bool = True
    """Whether D goes on behind `token_ids` and says its own, so that another can go on again."""
    prompt_ids: tuple[int, ...] = ()
    """See Sent."""

    @property
    def is_over(self) -> bool:
        """Whether no choice is left for D."""
        return self.is_news and self.answer.is_over


class RequestState(msgspec.Struct, kw_only=True):
    """See the module. One owner: the task that serves the request."""

    request: InferenceRequest
    trace: Trace
    head: Head
    public: str
    """The hex part of the response id."""
    seed: int
    deadline_s: float
    """Deadline until the answer is whole or its stream has begun; on the router's clock."""
    prompt_tokens: int
    """Counted, or estimated."""
    forwarded: str = ""
    """The client's header lines that engines get."""
    session: str = ""
    """What policies know the client's conversation by."""
    marks: tuple[PrefixMark, ...] = ()
    """Beginnings of the prompt, for policies."""
    share: Share = ""
    """The side of a canary that serves it; "": none has been picked yet."""
    slo: Slo = NO_SLO
    """What the client may expect; only where paces are learned."""
    forecast: Forecast | None = None
    """What was expected when it was placed first."""
    placed_s: float = 0.0
    """When that was, after the request came."""
    exclude: set[InstanceKey] = set()
    failures: int = 0
    refusals: int = 0
    shunned: tuple[frozenset[InstanceKey], ...] = ()
    """Sets of instances to avoid: the next attempt avoids the first set that leaves a choice."""
    breaks: list[Break] = []
    """Breaks that this request met, a few tokens apart: instances may have died of it."""
    broke_at_tokens: int = 0
    """Tokens that the client had at the last of these breaks."""
    last_cause: str = ""
    drain_cuts: int = 0
    """Calls of it that ended with an instance that was leaving."""
    sent: Sent | None = None
    extends: bool = True
    """Whether P's next token is the client's; else P only makes the KV."""
    has_decode_begun: bool = False
    """Events of D (or of the instance alone) went out. Without `sent` no instance can continue."""
    was_interrupted: bool = False
    """The client did not take what came for a while."""

    def met(self, broken: Break) -> None:
        """An instance broke off under it. Where much was streamed since the last time, that one
        served the request and died of something else.
        """
        had_tokens = sum(map(len, self.sent.token_ids)) if self.sent else 0
        if had_tokens - self.broke_at_tokens >= _SERVED_TOKENS:
            self.breaks.clear()
        if broken not in self.breaks:
            self.breaks.append(broken)
        self.broke_at_tokens = had_tokens


def may_extend(request: InferenceRequest, sent: Sent, context: int) -> bool:
    """Whether P' may add a token to what was sent: one living choice, and not the last token that
    the client or the context allows.

    At the last token P' cannot know whether to hold text back, so D' writes that one. A completion
    without a limit of the client's has the engine's, which is not known here.
    """
    if len(sent.token_ids) != 1 or sent.ended:
        return False
    after = len(sent.token_ids[0]) + 1
    if context and sent.usage.get("prompt_tokens", context) + after >= context:
        return False
    if request.max_tokens is None:
        return request.is_chat
    return after < request.max_tokens


def common_context(pair: Pair) -> int:
    """Tokens that both of the pair hold; 0 where neither says."""
    said = [i.beat.max_model_len for i in (pair.prefill, pair.decode) if i.beat.max_model_len]
    return min(said, default=0)


def prefill_params(state: RequestState, pair: Pair) -> dict[str, Any]:
    """kv_transfer_params for a P that continues.

    Without client_max_tokens P only makes the KV of the prompts; its token is thrown away. With
    max_model_len P refuses what D has no room for, before anything is streamed.
    """
    request, sent, context = state.request, state.sent, common_context(pair)
    state.extends = sent is None or may_extend(request, sent, context)
    params: dict[str, Any] = {"seed": state.seed}
    if context:
        params["max_model_len"] = context
    if state.extends:
        params["client_max_tokens"] = request.max_tokens
    if sent is not None and state.extends:
        params["continue_from"] = sent.token_ids
    return params


def take_prefill(state: RequestState, body: bytes) -> Prefilled:
    """P's answer to `prefill_params`; ProtocolError for one that cannot be used."""
    answer = parse_prefill_answer(state.request, body)
    sent = state.sent
    before = frozen(sent.token_ids) if sent else ((),) * len(answer.choices)
    if len(before) != len(answer.choices):
        raise ProtocolError("prefill answer: another number of choices than before")
    if not state.extends:
        return Prefilled(answer, before, is_news=False)
    ids = tuple(old + new.token_ids for old, new in zip(before, answer.choices, strict=True))
    return Prefilled(answer, ids, is_news=True)


def frozen(ids: Sequence[Sequence[int]]) -> TokenIds:
    """The ids as they are now."""
    return tuple(map(tuple, ids))


def first_events(state: RequestState, prefilled: Prefilled, pair: Pair) -> bytes:
    """What the client gets of P's answer, empty where that is nothing; from here on it is sent."""
    if not prefilled.is_news:
        return b""
    sent, answer = state.sent, prefilled.answer
    is_first = sent is None
    if sent is None:
        compatibility = pair.decode.goes_on_as or ""
        sent = state.sent = Sent([], compatibility, of_prompt(answer.usage), answer.model)
    sent.token_ids = [list(ids) for ids in prefilled.token_ids]
    if prefilled.prompt_ids:
        sent.prompt_ids, sent.settled = prefilled.prompt_ids, len(sent.token_ids[0])
    sent.usage = sent.usage or of_prompt(answer.usage)
    writer = ChunkWriter(state.request, state.head, answer, sent.usage)
    generated = sum(len(ids) for ids in prefilled.token_ids)
    events = [*(writer.role() if is_first else ()), *writer.content(generated)]
    if prefilled.is_over:
        events += writer.finish(generated)
    return b"".join(events)


def of_prompt(usage: dict[str, Any]) -> dict[str, Any]:
    """An engine's usage without what it says of its own output besides the length."""
    return {name: usage[name] for name in usage if name != OUTPUT_DETAILS}


def can_go_on_alone(state: RequestState, instance: Instance) -> bool:
    """Whether `instance`, alone, streams with token ids, so that another can go on behind it.

    A request that shows the prompt's side is sent as it is: a second instance would show it again.
    """
    return instance.is_continuing and not state.request.shows_prompt


def sent_alone(state: RequestState, instance: Instance) -> Sent:
    """What the client will have of a stream that `instance` serves alone: nothing yet."""
    ids: list[list[int]] = [[] for _ in range(state.request.choices)]
    return Sent(ids, instance.beat.compatibility, {}, state.request.model)


def sent_by_decode(state: RequestState, prefilled: Prefilled, pair: Pair) -> Sent:
    """What the client will have of a stream of which D serves all: nothing yet."""
    answer = prefilled.answer
    usage = of_prompt(answer.usage)
    sent = Sent([[]], pair.decode.goes_on_as or "", usage, answer.model)
    sent.prompt_ids = prefilled.prompt_ids
    return sent


def begin_alone(state: RequestState, sent: Sent, event: bytes) -> bytes:
    """What goes before `event`, the first where no P wrote one; from here on it is sent."""
    request, state.sent = state.request, sent
    if request.wants_running_usage and not sent.usage and (chunk := chunk_of(event)) is not None:
        sent.usage = of_prompt(chunk.get("usage") or {})
    return role_events(request, state.head, sent.model, sent.usage) if request.is_chat else b""


def alone_params(state: RequestState) -> dict[str, Any]:
    """kv_transfer_params for an instance that serves a stream alone: it gives token ids with each
    chunk, and begins behind those that were sent."""
    sent = state.sent
    ids = frozen(sent.token_ids) if sent else ((),) * state.request.choices
    return {
        "seed": state.seed,
        "continue_from": ids,
        "emit_from": [len(one) for one in ids],
        "response_id": state.head.response_id,
        "created": state.head.created,
    }


def last_events(state: RequestState) -> bytes | None:
    """What is left of a stream whose choices have all ended: usage if asked, [DONE]. None where
    only an engine knows it.
    """
    sent = state.sent
    if sent is None or not sent.is_over:
        return None
    if sent.has_usage:
        return DONE
    if state.request.include_usage and "prompt_tokens" not in sent.usage:
        return None
    generated = sum(len(ids) for ids in sent.token_ids)
    usage = sent.usage
    if len(sent.reasoning) == len(sent.token_ids):
        details = {"reasoning_tokens": sum(sent.reasoning.values())}
        usage = {**usage, OUTPUT_DETAILS: details}
    return end_of_stream(state.request, state.head, sent.model, usage, generated)


def decode_params(state: RequestState, prefilled: Prefilled, *, is_stream: bool) -> dict[str, Any]:
    """kv_transfer_params for a D that continues.

    Streamed, it emits what follows the ids; else the whole answer, P's logprobs in front.
    """
    emit_from: Sequence[int] = [len(ids) if is_stream else 0 for ids in prefilled.token_ids]
    params: dict[str, Any] = {
        "seed": state.seed,
        "continue_from": prefilled.token_ids,
        "emit_from": emit_from,
        "response_id": state.head.response_id,
        "created": state.head.created,
        **prefilled.answer.transfer,
    }
    if not is_stream:
        params["first_logprobs"] = [choice.logprobs for choice in prefilled.answer.choices]
    return params


def decode_body(
    state: RequestState, prefilled: Prefilled | None, *, is_stream: bool, pair_mac: str
) -> bytes | LongBody:
    """D's body behind P: the client's, and what D has to know. `prefilled` None: a pair that does
    not continue. `pair_mac`: empty for an engine that beats as vLLM's own connector does, to which
    nothing is added."""
    if prefilled is None and not pair_mac:
        return state.request.raw
    params = {} if prefilled is None else decode_params(state, prefilled, is_stream=is_stream)
    return splice(state.request.raw, {"kv_transfer_params": {**params, "pair_mac": pair_mac}})


def said_of_pair(prefilled: Prefilled | None, said: str) -> Said:
    """What became of a pair's KV, by D's header and P's answer. D knows whether it came; of KV that
    P did not send, P knows why.
    """
    outcome, word = read_header(said)
    not_sent = prefilled.answer.not_sent if prefilled is not None else ()
    if outcome == "moved" or (outcome == "unreported" and not not_sent):
        return Said(outcome)
    if not_sent and word in ("", "not_sent"):
        word = not_sent[0]
    return Said("failed" if outcome == "failed" else "recomputed", word or "not_sent")


def pair_outcome(prefilled: Prefilled | None, said: str) -> tuple[Outcome, Cause]:
    """See `said_of_pair`, with the cause that the word means."""
    outcome, word = said_of_pair(prefilled, said)
    return outcome, cause_of(word) if word else ""


def gave_up(state: RequestState) -> ApiError:
    """The last word of a request that failed wherever it was tried; names no instance."""
    count = state.trace.tries
    tries = "after one try" if count == 1 else f"after {count} tries"
    if state.last_cause == "timeout":
        return ApiError(504, f"the instances did not answer in time, {tries}", code="timeout")
    if state.last_cause == "refused":
        return ApiError(503, f"the instances take no requests, {tries}", retry_after_s=1)
    return ApiError(502, f"the instances failed, {tries}", code="upstream_failed")


def prefill_body(
    request: InferenceRequest, params: Mapping[str, Any] | None = None, *, pair_mac: str
) -> bytes | LongBody:
    """P's body: one token behind what it continues, not streamed.

    `params` is None for an engine without continuation; else {seed, client_max_tokens,
    continue_from?}, with one list of ids per choice in continue_from. `pair_mac`: see
    docs/adr/0040.
    """
    limit = 1
    changed: dict[str, Any] = {}
    if params is not None:
        ids: Sequence[Sequence[int]] = params.get("continue_from") or ((),)
        limit += len(ids[0])
        changed["return_token_ids"] = True
    if params is not None or pair_mac:
        changed["kv_transfer_params"] = {**(params or {}), "pair_mac": pair_mac}
    return splice(request.raw, {**changed, **one_token(request, limit)})


def one_token(request: InferenceRequest, limit: int) -> dict[str, Any]:
    """The members by which P generates `limit` tokens, not streamed."""
    members = request.members
    changed: dict[str, Any] = {"max_tokens": limit}
    if isinstance(members, ChatMembers) and members.max_completion_tokens is not None:
        changed["max_completion_tokens"] = limit
    if members.min_tokens is not None:
        changed["min_tokens"] = min(members.min_tokens, limit)
    changed["stream"] = False
    if members.stream_options is not None:
        changed["stream_options"] = None
    return changed


def with_members(
    request: InferenceRequest, *, salt: msgspec.Raw, least_priority: int
) -> InferenceRequest:
    """The request of a key with this salt, in JSON, as engines get it. A salt of the client's own
    becomes part of it; a priority before `least_priority` becomes that. ApiError 400."""
    members, raw = request.members, request.raw
    own, priority = members.cache_salt, members.priority
    if own is not NO_VALUE and not is_absent(own):
        if bytes(memoryview(own)[:1]) != b'"':
            raise refuse("cache_salt", "expected a string")
        mixed = blake2b(own, key=memoryview(salt)[1:-1], digest_size=16).hexdigest()
        salt = msgspec.Raw(f'"{mixed}"'.encode())
    end = raw.rindex(b"}")
    added = (raw[:end], b',"cache_salt":', salt)
    if (
        priority is NO_VALUE
        or is_absent(priority)
        or read(int, priority, "priority") >= (least_priority)
    ):
        members = replace(members, cache_salt=salt)
    else:
        least = b"%d" % least_priority
        added = (*added, b',"priority":', least)
        members = replace(members, cache_salt=salt, priority=msgspec.Raw(least))
    return replace(request, raw=b"".join((*added, raw[end:])), members=members)


_COPIED_BYTES = 64 * 1024
"""A body of at most so much is copied: one piece is written faster than two."""


def splice(raw: bytes, members: Mapping[str, Any]) -> bytes | LongBody:
    """The JSON object `raw`, byte for byte, with `members` behind its own.

    The client's own of the same name stay before them: of two members of one name the last counts,
    as in every parser that engines use. `raw` is an object with at least one member.
    """
    end = raw.rindex(b"}")
    behind = b"".join((b",", orjson.dumps(members)[1:-1], raw[end:]))
    if len(raw) > _COPIED_BYTES:
        return LongBody(memoryview(raw)[:end], behind)
    return raw[:end] + behind

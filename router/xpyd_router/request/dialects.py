"""Dialects: what P and D are sent of a request, and what of P's answer D gets. Pure.

The one seam between `flow` and engines of other makes (docs/adr/0053; a table in docs/router.md).
Per pair `dialect_between` gives the object that speaks to both; bodies of xpyd's own engines are
`state`'s.
To P goes the client's body, for one token, not streamed. vLLM's NixlConnector answers with an
object that names the KV, and D gets that object as it is.

Where both take a prompt's ids, P's token can be the client's first one and another pair can go on
in a stream: the ids so far are the prompt then. D counts, limits, penalizes and seeds what it
generates behind them as if that were all, so only requests to which this is the same are served so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, Literal, Protocol, cast

import msgspec
import orjson

from xpyd_core.bodies import LongBody, is_absent
from xpyd_core.errors import ProtocolError
from xpyd_core.kv_outcome import AloneCause
from xpyd_router.fleet.instances import Dialect as Name
from xpyd_router.fleet.instances import Instance
from xpyd_router.policy.pairs import Alone, Pair
from xpyd_router.request.answers import Json, PrefillAnswer, parse_params_answer, parse_vllm_choice
from xpyd_router.request.client_request import ChatMembers, InferenceRequest
from xpyd_router.request.state import (
    Prefilled,
    RequestState,
    common_context,
    decode_body,
    may_extend,
    one_token,
    prefill_body,
    prefill_params,
    splice,
    take_prefill,
)

Body = bytes | LongBody
GivesBack = Literal["call", "lease"]


class Dialect(Protocol):
    """How the two engines of a pair are spoken to.

    A dialect in which both are called at once (SGLang's: one body with P's bootstrap host and port
    and a random room) has the same body from `prefill_body` and `decode_body`, which then gets no
    `prefilled`, and drops P's answer in `take_prefill`; only `flow` would call the two together.
    """

    gives_back: GivesBack
    """How KV is freed that D is never asked for. `call`: D is told, and may have got some as soon
    as P was asked. `lease`: P keeps it for a while, from its answer on."""

    def is_for_decode_alone(self, request: InferenceRequest) -> bool:
        """Whether the KV of such a request cannot be named, so that D serves it alone."""
        ...

    def prefill_body(self, state: RequestState, pair: Pair, pair_mac: str) -> Body:
        """P's body. `pair_mac`: see decode_body of `state`."""
        ...

    def take_prefill(self, state: RequestState, pair: Pair, body: bytes) -> Prefilled | None:
        """What of P's answer counts; None: nothing. ProtocolError for an unusable answer."""
        ...

    def decode_body(
        self, state: RequestState, prefilled: Prefilled | None, *, is_stream: bool, pair_mac: str
    ) -> Body:
        """D's body. `prefilled` is of `take_prefill`."""
        ...


class _Xpyd:
    """Both continue: P's token is the client's, and D goes on behind it (docs/adr/0002)."""

    gives_back: GivesBack = "call"

    def is_for_decode_alone(self, request: InferenceRequest) -> bool:
        """See Dialect."""
        del request
        return False

    def prefill_body(self, state: RequestState, pair: Pair, pair_mac: str) -> Body:
        """See Dialect."""
        return prefill_body(state.request, prefill_params(state, pair), pair_mac=pair_mac)

    def take_prefill(self, state: RequestState, pair: Pair, body: bytes) -> Prefilled | None:
        """See Dialect."""
        del pair
        return take_prefill(state, body)

    def decode_body(
        self, state: RequestState, prefilled: Prefilled | None, *, is_stream: bool, pair_mac: str
    ) -> Body:
        """See Dialect."""
        return decode_body(state, prefilled, is_stream=is_stream, pair_mac=pair_mac)


_OF_XPYD = ("transfer", "decode_incarnation", "prompt_digest")


def _of_several(transfer: Json, prompts: int) -> Json:
    """What of `transfer` D is told of several prompts. vLLM's P speaks of the first one only: where
    nothing comes of that, D waits for none of them."""
    given = {name: said for name, said in transfer.items() if name == "decode_incarnation"}
    if transfer.get("transfer") in (["none"], ["none"] * prompts):
        given["transfer"] = ["none"] * prompts
    return given


def _has_embeddings(request: InferenceRequest) -> bool:
    """Whether prompts are given as embeddings: these are further ones beside `prompt`, and may be
    several."""
    return not is_absent(request.members.prompt_embeds)


def _has_beams(request: InferenceRequest) -> bool:
    wanted = request.members.use_beam_search
    return not is_absent(wanted) and bytes(memoryview(wanted)[:5]) != b"false"


_MEDIA = re.compile(rb'"(?:image|audio|video)_(?:url|embeds|pil)"|"input_(?:audio|image)"')


def _has_media(request: InferenceRequest) -> bool:
    """Whether a chat has parts that are no text, as far as their names are written without escapes.
    A text cannot look so: its quotes have backslashes."""
    members = request.members
    return isinstance(members, ChatMembers) and (
        _MEDIA.search(memoryview(members.messages)) is not None
    )


def _is_cut_by_context(request: InferenceRequest) -> bool:
    """Whether the engine's own context says where the prompt is cut, by -1 in any spelling: P and D
    may have different ones."""
    limit = request.members.truncate_prompt_tokens
    return not is_absent(limit) and not bytes(memoryview(limit)[:32]).isdigit()


class _PairId:
    """The id in X-Request-Id names the KV; nothing else is needed. What a P of ours says of the
    transfer goes to D, so that D does not wait for KV that does not come."""

    gives_back: GivesBack = "call"

    def is_for_decode_alone(self, request: InferenceRequest) -> bool:
        """See Dialect: vLLM makes an id of its own for each of several choices and beams, and
        xpyd's connector sends nothing of media."""
        return (
            (request.members.n or 1) > 1
            or _has_beams(request)
            or _has_embeddings(request)
            or _has_media(request)
        )

    def prefill_body(self, state: RequestState, pair: Pair, pair_mac: str) -> Body:
        """See Dialect."""
        if not _goes_by_ids(state, pair):
            return prefill_body(state.request, None, pair_mac=pair_mac)
        return _ids_prefill_body(state, pair, {"pair_mac": pair_mac})

    def take_prefill(self, state: RequestState, pair: Pair, body: bytes) -> Prefilled | None:
        """See Dialect."""
        prefill, decode = pair.prefill.beat, pair.decode.beat
        if not prefill.dialect and not (decode.dialect and prefill.incarnation):
            return None
        answer = parse_params_answer(state.request, body, _OF_XPYD)
        if (prompts := state.request.choices) > 1:
            answer = replace(answer, transfer=_of_several(answer.transfer, prompts))
        return _taken(state, pair, answer, is_nixl=False)

    def decode_body(
        self, state: RequestState, prefilled: Prefilled | None, *, is_stream: bool, pair_mac: str
    ) -> Body:
        """See Dialect."""
        if prefilled is None or not pair_mac:
            return decode_body(state, None, is_stream=is_stream, pair_mac=pair_mac)
        return _ids_decode_body(
            state, prefilled, {**prefilled.answer.transfer, "pair_mac": pair_mac}
        )


class _Nixl:
    """vLLM's NixlConnector, and NixlPushConnector, whose P does not say its blocks."""

    gives_back: GivesBack = "lease"

    def __init__(self, *, pushes: bool) -> None:
        self._pushes = pushes
        names = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        asked: Json = {"do_remote_decode": True, "do_remote_prefill": False}
        asked |= {name: None for name in names if not (pushes and name == "remote_block_ids")}
        self._asked: Final = asked

    def is_for_decode_alone(self, request: InferenceRequest) -> bool:
        """See Dialect: P's answer names the KV of the first prompt, and D frees it when the first
        of several choices has read it. It does not compare P's prompt with D's."""
        return (
            request.choices > 1
            or _has_beams(request)
            or _has_embeddings(request)
            or _is_cut_by_context(request)
        )

    def prefill_body(self, state: RequestState, pair: Pair, pair_mac: str) -> Body:
        """See Dialect."""
        del pair_mac
        if _goes_by_ids(state, pair):
            return _ids_prefill_body(state, pair, self._asked)
        changed = one_token(state.request, 1)
        return splice(state.request.raw, {"kv_transfer_params": self._asked, **changed})

    def take_prefill(self, state: RequestState, pair: Pair, body: bytes) -> Prefilled | None:
        """See Dialect."""
        return _taken(state, pair, parse_params_answer(state.request, body), is_nixl=True)

    def decode_body(
        self, state: RequestState, prefilled: Prefilled | None, *, is_stream: bool, pair_mac: str
    ) -> Body:
        """See Dialect."""
        del is_stream, pair_mac
        if prefilled is None:
            return state.request.raw
        return _ids_decode_body(state, prefilled, prefilled.answer.transfer)


_PAIR_ID: Final = _PairId()
_DIALECTS: Final[Mapping[Name, Dialect]] = MappingProxyType(
    {
        "xpyd": _Xpyd(),
        "pair-id": _PAIR_ID,
        "nixl": _Nixl(pushes=False),
        "nixl-push": _Nixl(pushes=True),
    }
)


def dialect_between(pair: Pair) -> Dialect:
    """What the two engines of `pair` have in common: all that go by the pair id do."""
    prefill, decode = pair.prefill.dialect, pair.decode.dialect
    return _DIALECTS[prefill] if prefill == decode else _PAIR_ID


def _cannot_name(instance: Instance, request: InferenceRequest) -> bool:
    """Whether the KV of such a request has no name that a P or D, which is `instance`, knows."""
    return instance.beat.dialect != "" and _DIALECTS[instance.dialect].is_for_decode_alone(request)


def may_leave_to_decode(state: RequestState, pair: Pair) -> bool:
    """Whether an error that P answered may be of its one token alone, so that D, which makes all of
    them, must say what becomes of the request: some versions of vLLM parse a call of a tool that
    ends behind it, and answer 500 or 400. A D that only serves pairs would wait for the KV."""
    members = state.request.members
    has_tools = isinstance(members, ChatMembers) and not is_absent(members.tools)
    return has_tools and pair.prefill.dialect != "xpyd" and pair.decode.serves_alone


class _Unnamed(Alone):
    """The D of a pair that cannot name the KV of the request."""

    __slots__ = ()


def served_by(choice: Pair | Alone, request: InferenceRequest) -> Pair | Alone:
    """`choice`, or its D alone where the pair cannot serve such a request."""
    if isinstance(choice, Pair) and choice.decode.serves_alone:
        prefill, decode = choice.prefill, choice.decode
        is_mixed = prefill.dialect != decode.dialect
        if _cannot_name(decode, request) or (is_mixed and _cannot_name(prefill, request)):
            return _Unnamed(decode)
    return choice


def why_alone(choice: Alone, state: RequestState) -> AloneCause:
    """Why the policy gave the request to one instance, where a P was there."""
    match choice.instance.beat.type:
        case "A":
            return "aggregated"
        case "P":
            return "one_token"
        case "D":
            if state.request.alone == "D" and not state.sent:
                return "echo"
            is_several = isinstance(choice, _Unnamed) or _cannot_name(
                choice.instance, state.request
            )
            return "several" if is_several else "short_prompt"


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message whose text is all that a template needs of it."""

    role: str
    content: str


class _Plain(msgspec.Struct, forbid_unknown_fields=True):
    """A body to which its own tokens may be prompt as well as output."""

    model: str
    prompt: str | list[int] = ""
    messages: list[_Message] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: Literal[0] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: Literal[1] | None = None
    stop: list[None] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    echo: bool | None = None
    stream: bool = False
    stream_options: msgspec.Raw = msgspec.Raw(b"null")
    user: str | None = None


def _is_plain(request: InferenceRequest) -> bool:
    """Whether what follows a token does not depend on whether it is output or prompt: no seed, no
    penalty of output, no stop text, no grammar, no tools, no media, nothing that is not known here;
    and a limit, because an engine's default counts from the prompt's end.
    """
    if request.choices > 1 or request.max_tokens is None or request.wants_token_ids:
        return False
    try:
        body = msgspec.json.decode(request.raw, type=_Plain)
    except msgspec.DecodeError:
        return False
    depends = body.presence_penalty or body.frequency_penalty or body.logprobs or body.echo
    return not depends and (body.seed is None or body.temperature == 0)


def _goes_by_ids(state: RequestState, pair: Pair) -> bool:
    """Whether P's token may be the client's and D's stream be continued."""
    known = pair.decode.goes_on_as
    if not state.request.stream or known is None or pair.prefill.goes_on_as != known:
        return False
    return state.sent is not None or _is_plain(state.request)


def _ids_so_far(state: RequestState) -> list[int]:
    """What was sent and may be continued. Tokens whose text is held back are computed anew: a
    continuation cannot write the half of a character."""
    sent = state.sent
    if sent is None:
        return []
    del sent.token_ids[0][sent.settled :]
    return sent.token_ids[0]


def _prompt(request: InferenceRequest, ids: Sequence[int], params: Json) -> Json:
    """The members of a body by which `ids` are its prompt, with `params` in them."""
    if request.is_chat:
        return {"kv_transfer_params": {**params, "prompt_token_ids": ids}}
    return {"prompt": ids, "kv_transfer_params": params}


def _ids_prefill_body(state: RequestState, pair: Pair, params: Json) -> Body:
    """P's body where its token may be the client's; behind what was sent, if anything was."""
    request, sent = state.request, state.sent
    changed: Json = {"kv_transfer_params": params}
    state.extends = True
    if sent is not None:
        ids = [*sent.prompt_ids, *_ids_so_far(state)]
        changed = _prompt(request, ids, params)
        state.extends = may_extend(request, sent, common_context(pair))
    return splice(request.raw, {**changed, **one_token(request, 1), "return_token_ids": True})


_BLOCK_TOKENS = 16
"""vLLM's blocks have a multiple of it."""


def _has_room_in_block(transfer: Json, prompt_tokens: int) -> bool:
    """Whether D needs no more blocks for one token more. NixlConnector takes all of D's prompt for
    P's KV: a further block would have no counterpart; within the block vLLM computes the last token
    itself. Known where there is one group of blocks of 16 tokens, or a multiple."""
    if not transfer:
        return True
    groups: object = transfer.get("remote_block_ids")
    if not isinstance(groups, list) or len(cast("list[object]", groups)) != 1:
        return False
    blocks = cast("list[object]", groups)[0]
    if not isinstance(blocks, list) or prompt_tokens % _BLOCK_TOKENS == 0:
        return False
    return 0 < len(cast("list[object]", blocks)) <= prompt_tokens // _BLOCK_TOKENS + 1


def _taken(state: RequestState, pair: Pair, answer: PrefillAnswer, *, is_nixl: bool) -> Prefilled:
    """What of vLLM's answer counts: `transfer`, and its token where that may be handed over."""
    sent = state.sent
    kv_alone = Prefilled(answer, (), is_news=False, goes_on=False)
    if not _goes_by_ids(state, pair):
        return kv_alone
    try:
        choice, prompt_ids = parse_vllm_choice(state.request, answer.document)
    except ProtocolError:
        if sent is not None:
            raise
        return kv_alone
    before = tuple(sent.token_ids[0]) if sent is not None else ()
    given = len(prompt_ids)
    if sent is not None:
        prompt_ids = sent.prompt_ids
    dropped = Prefilled(answer, (before,), is_news=False, prompt_ids=prompt_ids)
    limit, context = cast(int, state.request.max_tokens), common_context(pair)
    fits = (
        state.extends
        and choice.finish_reason in ("length", "stop")
        and len(choice.token_ids) == 1
        and bool(choice.text)
        and not choice.text.endswith("\ufffd")
        and 0 < len(prompt_ids) + limit <= context
        and (not is_nixl or _has_room_in_block(answer.transfer, given))
    )
    if not fits:
        return dropped
    ids = (before + choice.token_ids,)
    return Prefilled(replace(answer, choices=(choice,)), ids, is_news=True, prompt_ids=prompt_ids)


def _ids_decode_body(state: RequestState, prefilled: Prefilled, params: Json) -> Body:
    """D's body: the client's, with what names the KV and, where another may go on, all ids."""
    request = state.request
    if not prefilled.goes_on:
        return splice(request.raw, {"kv_transfer_params": params}) if params else request.raw
    (ids,) = prefilled.token_ids
    changed = _prompt(request, [*prefilled.prompt_ids, *ids], params)
    changed["return_token_ids"] = True
    if ids:
        left = cast(int, request.max_tokens) - len(ids)
        changed["max_tokens"] = left
        if isinstance(request.members, ChatMembers) and request.members.max_completion_tokens:
            changed["max_completion_tokens"] = left
    return splice(request.raw, changed)


_NAMES_KV = b'"kv_transfer_params":{'
"""As vLLM writes it; in a text the quotes would have backslashes."""


def without_kv_params(body: bytes) -> bytes:
    """A D's whole answer without what it says of KV that it keeps: host and port of NixlConnector
    that goes both ways. A stream has none of it."""
    if body.find(_NAMES_KV) < 0:
        return body
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    document.pop("kv_transfer_params", None)
    return orjson.dumps(document)

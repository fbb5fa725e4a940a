"""What the router reads in a client's request, head and body. Pure.

Head: the client's own id is echoed; W3C trace context and the headers that flags name are forwarded
to engines, byte for byte. No other header is: engines get a head that the router makes. Forwarded
values are checked here, whatever server is in front: a value must not be able to end a header line.

Body: the router checks only the fields that it acts on; the engine validates the others, and P
reads every field before anything is streamed. Nothing is built of what the router does not act on
(ADR 0039).

Policies compare the session and marks of the prompt's beginnings. Marks are at fixed places, every
block at first, then ever further apart: what two prompts have in common is known to an eighth, with
58 marks for 32 Ki tokens. They are made of the JSON's text, so that they need no tokenizer: four
bytes of it count as a token. Where the router counts tokens, they are the engines' block hashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

import msgspec

from xpyd_core.blocks import DEFAULT_BLOCK_SIZE
from xpyd_core.bodies import (
    MAX_MEMBER_BYTES,
    NO_VALUE,
    PromptShape,
    check_text,
    is_absent,
    prompt_shape,
    read,
    refuse,
)
from xpyd_core.errors import ApiError, UserError
from xpyd_core.openai import MAX_CHOICES, Echo, MaxCompletionTokens, Routed
from xpyd_router.policy.base import NO_SLO, PrefixMark, Slo

MAX_NAMES = 32
MAX_VALUE_BYTES = 8000
"""Common servers refuse lines above 8 KiB."""
MAX_FORWARDED_BYTES = 16 * 1024
"""All forwarded values of a request: half of what common servers take as a whole head."""
MAX_SLO_MS = 3_600_000
"""An hour: longer than any request may take."""
_MAX_CLIENT_ID = 256
_MAX_TRACESTATE = 512
"""Bytes of a tracestate: as many as W3C asks proxies to pass on."""
_MAX_TRACEPARENT = 256
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")
_PRINTABLE = re.compile(rb"[ -~]*")
_VALUE = re.compile(rb"[\t -~\x80-\xff]*")
_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[ -~]*)?"
)
_TRACESTATE = re.compile(
    rb"(?:[a-z0-9][a-z0-9_*/@-]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~])?(?:[\t ]*,[\t ]*"
    rb"(?:[a-z0-9][a-z0-9_*/@-]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~])?)*"
)
_NUMBER = re.compile(rb"[0-9]{1,16}(\.[0-9]{1,16})?")
_SLO = {b"x-slo-ttft-ms": "ttft_s", b"x-slo-tpot-ms": "itl_s"}
_NEVER = frozenset(
    (
        # Of one connection, not of the request (RFC 9110, 7.6.1).
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "proxy-authenticate", "proxy-authorization", "expect"),
        # Made by the router for each call.
        *("host", "x-request-id", "x-xpyd-mac", "x-xpyd-pair-mac", "x-data-parallel-rank"),
        # Always passed on where they are valid.
        *("traceparent", "tracestate"),
    )
)
_READ = (
    *(b"x-request-id", b"traceparent", b"tracestate", b"x-session-id"),
    *(b"x-slo-ttft-ms", b"x-slo-tpot-ms"),
)


class ClientHead(NamedTuple):
    """See the module."""

    request_id: bytes = b""
    """The client's X-Request-Id: echoed and logged, never parsed, never sent on."""
    trace_id: str = ""
    """The trace id of the client's traceparent, 32 hex digits; empty without a valid one."""
    forwarded: str = ""
    """Header lines for the engines, each with its end of line. Latin-1."""
    session: str = ""
    """The client's X-Session-Id: read by policies, goes on only where a flag names it."""
    slo: Slo = NO_SLO
    """The request's objectives; the names of the headers are llm-d's."""
    complaint: ApiError | None = None
    """Why the request is refused."""


def check_forwarded_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names, each once. UserError names the one that may not be forwarded, and why."""
    found: dict[str, str] = {}
    for name in names:
        lowered = name.lower()
        if _NAME.fullmatch(name) is None:
            raise UserError(f"--forward-header {name!r}: not the name of a header")
        if lowered in ("traceparent", "tracestate"):
            raise UserError(
                f"--forward-header {name}: goes to the engines without it; leave it out"
            )
        if lowered in _NEVER or lowered.startswith("content-"):
            raise UserError(
                f"--forward-header {name}: belongs to a single connection or body; the router "
                "makes its own for each call"
            )
        found[lowered] = name
    if len(found) > MAX_NAMES:
        raise UserError(f"--forward-header: at most {MAX_NAMES} names")
    return tuple(found.values())


class HeadReader:
    """Reads heads. `names`: the headers to forward, as of `check_forwarded_names`."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._forwarded = {name.lower().encode(): name for name in names}
        self._wanted = frozenset((*_READ, *self._forwarded))

    def read(self, headers: Iterable[tuple[bytes, bytes]]) -> ClientHead:
        """`headers` as ASGI gives them, names in lower case."""
        wanted = self._wanted
        found = [pair for pair in headers if pair[0] in wanted]
        return self._read(found) if found else _EMPTY

    def _read(self, found: list[tuple[bytes, bytes]]) -> ClientHead:
        request_id = b""
        session = ""
        slo = NO_SLO
        parents: list[bytes] = []
        states: list[bytes] = []
        lines: list[str] = []
        size = 0
        complaint: ApiError | None = None
        for name, value in found:
            if name == b"x-request-id":
                # What is not ASCII has no one form in a header; it would come back as other bytes.
                is_fit = len(value) <= _MAX_CLIENT_ID and _PRINTABLE.fullmatch(value)
                request_id = request_id or (value if is_fit else b"")
            elif name == b"traceparent":
                parents.append(value)
            elif name == b"tracestate":
                states.append(value)
            elif name == b"x-session-id" and len(value) <= _MAX_CLIENT_ID:
                session = value.decode("latin-1")
            elif name in _SLO:
                slo, wrong = _take_slo(slo, name, value)
                complaint = complaint or wrong
            if name in self._forwarded:
                shown = self._forwarded[name]
                size += len(value)
                complaint = complaint or _complaint(shown, value, size)
                lines.append(f"{shown}: {value.decode('latin-1')}\r\n")
        trace_id, context = _trace_context(parents, states)
        if complaint is not None:
            return ClientHead(request_id, trace_id, complaint=complaint)
        return ClientHead(request_id, trace_id, context + "".join(lines), session, slo)


_EMPTY = ClientHead()


def _take_slo(slo: Slo, name: bytes, value: bytes) -> tuple[Slo, ApiError | None]:
    """`slo` with this header's, or what is wrong with it."""
    if _NUMBER.fullmatch(value) is None or not 0 < float(value) <= MAX_SLO_MS:
        shown = name.decode().title()
        message = f"header {shown}: expected milliseconds, above 0 and at most {MAX_SLO_MS}"
        return slo, ApiError(400, message, param=shown)
    return slo._replace(**{_SLO[name]: float(value) / 1000}), None


def _complaint(name: str, value: bytes, size: int) -> ApiError | None:
    if len(value) > MAX_VALUE_BYTES:
        return ApiError(431, f"header {name}: longer than {MAX_VALUE_BYTES} bytes")
    if size > MAX_FORWARDED_BYTES:
        return ApiError(431, f"header {name}: more than {MAX_FORWARDED_BYTES} bytes with others")
    if _VALUE.fullmatch(value) is None:
        return ApiError(400, f"header {name}: control characters are not allowed")
    return None


def _trace_context(parents: list[bytes], states: list[bytes]) -> tuple[str, str]:
    """The trace's id and the lines to pass on. As W3C says, a wrong one is dropped, not an error,
    and there is no tracestate without a traceparent.
    """
    if len(parents) != 1 or len(parents[0]) > _MAX_TRACEPARENT:
        return "", ""
    parent = parents[0].strip(b" \t")
    match = _TRACEPARENT.fullmatch(parent)
    if match is None or (match[2] is not None and parent.startswith(b"00")):
        return "", ""
    lines = f"traceparent: {parent.decode()}\r\n"
    state = b",".join(states).strip(b" \t")
    if state and len(state) <= _MAX_TRACESTATE and _TRACESTATE.fullmatch(state):
        lines += f"tracestate: {state.decode()}\r\n"
    return match[1].decode(), lines


Endpoint = Literal["completions", "chat/completions"]
ENDPOINTS: tuple[Endpoint, ...] = ("completions", "chat/completions")
TEXT_PATHS = ("/tokenize", "/detokenize")
"""What engines answer besides inference, and the router sends on."""


class _Members(Routed, frozen=True, gc=False, kw_only=True):
    """What the router looks at in both bodies: its own fields, read and checked, and as JSON texts
    what only the engine checks. Nothing is built of other members.
    """

    prompt_logprobs: msgspec.Raw = NO_VALUE
    kv_transfer_params: msgspec.Raw = NO_VALUE
    vllm_xargs: msgspec.Raw = NO_VALUE
    priority: msgspec.Raw = NO_VALUE
    user: msgspec.Raw = NO_VALUE
    prompt_cache_key: msgspec.Raw = NO_VALUE
    cache_salt: msgspec.Raw = NO_VALUE
    prompt_embeds: msgspec.Raw = NO_VALUE
    use_beam_search: msgspec.Raw = NO_VALUE
    truncate_prompt_tokens: msgspec.Raw = NO_VALUE


class _Extra(msgspec.Struct, gc=False):
    """What clients may not say in `vllm_xargs`: vLLM takes its members for a request's own, and of
    another type than an object they end its engine."""

    kv_transfer_params: msgspec.Raw = NO_VALUE
    ec_transfer_params: msgspec.Raw = NO_VALUE


class CompletionMembers(_Members, frozen=True, gc=False, kw_only=True):
    """What it looks at in a /v1/completions body: RoutedCompletion, and the texts."""

    echo: Echo = None
    prompt: msgspec.Raw = NO_VALUE


class ChatMembers(_Members, frozen=True, gc=False, kw_only=True):
    """What it looks at in a /v1/chat/completions body: RoutedChat, and the texts."""

    max_completion_tokens: MaxCompletionTokens = None
    messages: msgspec.Raw = NO_VALUE
    tools: msgspec.Raw = NO_VALUE
    chat_template_kwargs: msgspec.Raw = NO_VALUE


Members = CompletionMembers | ChatMembers
_KINDS: Mapping[Endpoint, type[Members]] = {
    "completions": CompletionMembers,
    "chat/completions": ChatMembers,
}
_BYTES_PER_TOKEN = 4
"""Bytes of one token of English text; without the model's tokenizer a body's length is what is
known.
"""
_EXPECTED_TOKENS = 256
_MOST_EXPECTED_TOKENS = 1024
"""Clients give limits far above what their answers need."""
_COMPLETIONS_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions without the field."""


class InferenceRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A client's request: its bytes and what the router reads in them. Made for every request: a
    Struct takes a twelfth of a frozen dataclass's time. Of more than 15 fields Python would make a
    dict first, in three times the time.
    """

    endpoint: Endpoint
    raw: bytes
    members: Members
    model: str
    stream: bool
    include_usage: bool
    wants_running_usage: bool
    wants_token_ids: bool
    max_tokens: int | None
    """The client's limit; None where it gave none."""
    seed: int | None
    choices: int
    """Choices of all prompts together."""
    shape: PromptShape | None
    """What the prompt has; None of a chat."""
    output_tokens: int
    """An estimate of what is generated: the limit, unless it is far too high."""
    shows_prompt: bool
    """Whether the answer holds the prompt's text or logprobs."""
    alone: Literal["P", "D"] | None
    """The instance that serves the request alone: P if P's token is the last one, D if the answer
    shows the prompt; None: both take part."""

    @property
    def is_chat(self) -> bool:
        """Whether answers are chat completions."""
        return self.endpoint == "chat/completions"

    @property
    def prompt_tokens(self) -> int:
        """An estimate by the body's length, for policies and limits that have no count."""
        return len(self.raw) // _BYTES_PER_TOKEN + 1

    @property
    def prompt(self) -> msgspec.Raw:
        """The JSON of the prompts, or of the conversation."""
        members = self.members
        return members.messages if isinstance(members, ChatMembers) else members.prompt


def _streamed_usage(routed: Routed) -> tuple[bool, bool]:
    """Whether the client wants usage at the stream's end, and in every chunk."""
    options = routed.stream_options
    if options is None:
        return False, False
    if not routed.stream:
        raise refuse("stream_options", "only allowed when stream is true")
    at_end = bool(options.include_usage)
    return at_end, bool(options.continuous_usage_stats) and at_end  # as in vLLM


def _shows_prompt(members: Members) -> bool:
    """Whether the answer holds the prompt's text or logprobs, which only a prefill makes."""
    echo = isinstance(members, CompletionMembers) and bool(members.echo)
    wanted = members.prompt_logprobs  # 0 is a wish too
    return echo or not (is_absent(wanted) or bytes(memoryview(wanted)[:5]) == b"false")


def _limit(members: Members) -> int | None:
    newer = members.max_completion_tokens if isinstance(members, ChatMembers) else None
    return newer if newer is not None else members.max_tokens


def _choices(prompts: int, n: int) -> int:
    if n * prompts > MAX_CHOICES:
        field = "n" if n > 1 else "prompt"
        raise refuse(field, f"expected at most {MAX_CHOICES} choices (prompts x n)")
    return n * prompts


_NOT_OF_CLIENTS = "set by the router, not by clients"


def _check_extra(raw: msgspec.Raw) -> None:
    extra = read(_Extra, raw, "vllm_xargs")
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if not is_absent(getattr(extra, name)):
            raise refuse(f"vllm_xargs.{name}", _NOT_OF_CLIENTS)


def parse_request(endpoint: Endpoint, raw: bytes) -> InferenceRequest:
    """The request in `raw`; ApiError 400 that names the field and what is allowed."""
    check_text(raw)
    return _request_of(endpoint, raw, read(_KINDS[endpoint], raw))


_MESSAGES = b'{"messages":'
Pieces = Sequence[bytes | msgspec.Raw | memoryview]


class ChatBody(NamedTuple):
    """A chat that the router has made, whose messages are first in it."""

    raw: bytes
    rest: bytes
    """An object of its other members."""


def chat_body(messages: Pieces, rest: bytes) -> ChatBody:
    """The chat of these pieces of JSON, and of an object of its other members, which has some."""
    return ChatBody(b"".join((_MESSAGES, *messages, b",", memoryview(rest)[1:])), rest)


def parse_chat(chat: ChatBody) -> InferenceRequest:
    """The same as parse_request, at a cost that does not grow with the messages: whoever made the
    chat has looked at them."""
    start, size = len(_MESSAGES), len(chat.raw) - len(_MESSAGES) - len(chat.rest)
    messages = msgspec.Raw(memoryview(chat.raw)[start : start + size])
    members = read(ChatMembers, chat.rest)
    routed = msgspec.structs.replace(members, messages=messages)
    return _request_of("chat/completions", chat.raw, routed)


def _request_of(endpoint: Endpoint, raw: bytes, routed: Members) -> InferenceRequest:
    if routed.model is None:
        raise refuse("model", "you must provide the model's name as a string")
    if not is_absent(routed.kv_transfer_params):
        raise refuse("kv_transfer_params", _NOT_OF_CLIENTS)
    if not is_absent(routed.vllm_xargs):
        _check_extra(routed.vllm_xargs)
    include_usage, running_usage = _streamed_usage(routed)
    shape = None
    if isinstance(routed, CompletionMembers):
        shape = prompt_shape(routed.prompt, MAX_CHOICES)
    choices = _choices(1 if shape is None else shape.prompts, routed.n or 1)
    shows_prompt = _shows_prompt(routed)
    limit = _limit(routed)
    if limit == 0 and not shows_prompt:
        raise refuse("max_tokens", "expected at least 1 (0 only with echo or prompt_logprobs)")
    most = limit
    if endpoint == "completions" and limit is None:
        most = _COMPLETIONS_MAX_TOKENS
    if most is not None and (routed.min_tokens or 0) > most:
        raise refuse("min_tokens", f"must not be more than max_tokens, {most}")
    alone: Literal["P", "D"] | None = None
    if limit is not None and limit <= 1:
        alone = "P"
    elif shows_prompt:
        alone = "D"
    return InferenceRequest(
        endpoint=endpoint,
        raw=raw,
        members=routed,
        model=routed.model,
        stream=bool(routed.stream),
        include_usage=include_usage,
        wants_running_usage=running_usage,
        wants_token_ids=bool(routed.return_token_ids),
        max_tokens=limit,
        seed=routed.seed,
        choices=choices,
        shape=shape,
        output_tokens=choices * min(most or _EXPECTED_TOKENS, _MOST_EXPECTED_TOKENS),
        shows_prompt=shows_prompt,
        alone=alone,
    )


_MAX_SESSION = 512
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
"""Ends of marks in tokens, and in bytes of text."""


def session_in(members: Members) -> str:
    """What the body calls the session: `prompt_cache_key`, else `user`; empty without either."""
    for value in (members.prompt_cache_key, members.user):
        if len(value) <= MAX_MEMBER_BYTES and bytes(value).startswith(b'"'):
            session = msgspec.json.decode(value, type=str)
            if session:
                return session[:_MAX_SESSION]
    return ""


def text_marks(members: Members) -> tuple[PrefixMark, ...]:
    """Marks of a request's prompt. What precedes it in a chat, or changes all of it, is in
    them, too: tools, the template's variables, the salt, the model.

    They are of the JSON as the client wrote it: one client writes the same prompt alike.
    """
    most = _TEXT[-1][1]
    root = [members.model, bytes(memoryview(members.cache_salt)[:most])]
    if isinstance(members, ChatMembers):
        root.append(bytes(memoryview(members.chat_template_kwargs)[:most]))
        text = b"" if is_absent(members.tools) else bytes(memoryview(members.tools)[:most])
        text += memoryview(members.messages)[:most]
    else:
        text = bytes(memoryview(members.prompt)[:most])
    hasher = blake2b(msgspec.json.encode(root), digest_size=16)
    # One JSON text is the beginning of another where the prompts are, up to its closing bracket.
    view, before = memoryview(text), 0
    marks: list[PrefixMark] = []
    for tokens, end in _TEXT:
        if end > len(view):
            break
        hasher.update(view[before:end])
        marks.append((tokens, hasher.digest()))
        before = end
    return tuple(marks)


def hash_marks(hashes: Sequence[bytes], block_tokens: int) -> tuple[PrefixMark, ...]:
    """Marks of a prompt whose full blocks have these hashes."""
    return tuple(
        (blocks * block_tokens, hashes[blocks - 1]) for blocks in _BLOCKS if blocks <= len(hashes)
    )

"""Whether a client got the right answer: every byte that it may rely on. Pure.

`complaints` gives one line for each thing that is wrong; none means right. What the client did not
ask for must not be there either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from tests.router.chaos.asks import MODEL, Ask
from tests.router.chaos.truth import SEEDS, TOKEN_BYTES, Wanted, logprob, token_text, top

_HEX = re.compile(rb"[0-9a-f]{32}")
_ADDRESS = re.compile(rb"_addr_|127\.\d+\.\d+\.\d+:\d+")


class Answer(NamedTuple):
    """What came over the wire."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Right(NamedTuple):
    """What one choice must be."""

    text: str
    ids: tuple[int, ...]
    finish: str | None
    stop: str | None


@dataclass
class Said:
    """What one choice was, put together from its pieces."""

    text: str = ""
    ids: list[int] = field(default_factory=list[int])
    has_ids: bool = False
    prompt_ids: Any = None
    scores: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    finish: str | None = None
    stop: Any = None
    roles: int = 0
    wrong: list[str] = field(default_factory=list[str])


def rights_of(wanted: Wanted) -> list[Right]:
    """The right choices, in order."""
    rights: list[Right] = []
    for choice in range(wanted.choices):
        steps = list(wanted.steps(choice))
        ids = tuple(step.token_id for step in steps if step.token_id is not None)
        text = wanted.echo + "".join(step.text for step in steps)
        rights.append(Right(text, ids, steps[-1].finish, steps[-1].stop))
    return rights


def hexes(answer: Answer) -> set[bytes]:
    """All that could be a transfer's uuid: none of them may be one."""
    return set(_HEX.findall(answer.body)) | set(_HEX.findall(repr(answer.headers).encode()))


def complaints(ask: Ask, answer: Answer) -> list[str]:
    """What is wrong with `answer`."""
    if answer.status != 200:
        return [f"lost: status {answer.status}: {answer.body[:300]!r}"]
    leaks = [f"an address leaks: {m!r}" for m in _ADDRESS.findall(answer.body)]
    leaks += ["kv_transfer_params leaks"] * (b'"kv_transfer_params"' in answer.body)
    judge = _of_stream if ask.wanted.stream else _of_whole
    try:
        return leaks + judge(ask, answer)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        return [*leaks, f"malformed: {type(error).__name__} {error}: {answer.body[-300:]!r}"]


# --- streamed


def _events(body: bytes) -> tuple[list[Any], list[str]]:
    """The chunks of a stream, and what is wrong with its frame."""
    if not body.endswith(b"\n\n"):
        return [], [f"lost: the stream was cut: {body[-200:]!r}"]
    events = body[:-2].split(b"\n\n")
    wrong: list[str] = []
    if any(not event.startswith(b"data: ") for event in events):
        wrong.append(f"an event that is none: {body[-300:]!r}")
    payloads = [event[6:] for event in events]
    if payloads[-1].startswith(b'{"error"'):
        return [], [f"lost: an error event: {payloads[-1][:200]!r}"]
    if payloads.count(b"[DONE]") != 1 or payloads[-1] != b"[DONE]":
        wrong.append(f"[DONE] {payloads.count(b'[DONE]')} times, last event {payloads[-1][:100]!r}")
    return [orjson.loads(p) for p in payloads if p != b"[DONE]"], wrong


def _of_stream(ask: Ask, answer: Answer) -> list[str]:
    chunks, wrong = _events(answer.body)
    if not chunks:
        return wrong
    wanted = ask.wanted
    wrong += _heads(ask, chunks, answer)
    said = [Said() for _ in range(wanted.choices)]
    for chunk in chunks:
        for piece in chunk["choices"]:
            index: int = piece["index"]
            _take(said[index], piece, chunk, wanted)
    if wanted.is_chat:
        wrong += [f"{one.roles} role deltas" for one in said if one.roles != 1]
    return wrong + _choices(wanted, said) + _usage_of_stream(wanted, chunks)


def _heads(ask: Ask, chunks: list[Any], answer: Answer) -> list[str]:
    kind = "chat.completion.chunk" if ask.wanted.is_chat else "text_completion"
    heads: set[tuple[Any, ...]] = {(c["id"], c["object"], c["created"], c["model"]) for c in chunks}
    wrong = [f"heads differ: {heads}"] * (len(heads) != 1)
    [(response_id, object_, _, model), *_] = heads
    return (
        wrong
        + _head(ask, answer, response_id)
        + [f"object {object_}, model {model}"] * ((object_, model) != (kind, MODEL))
    )


def _head(ask: Ask, answer: Answer, response_id: str) -> list[str]:
    prefix = "chatcmpl-" if ask.wanted.is_chat else "cmpl-"
    is_right = response_id == answer.headers.get("x-request-id") and response_id.startswith(prefix)
    return [] if is_right else [f"id {response_id}, X-Request-Id {dict(answer.headers)}"]


def _take(one: Said, piece: Any, chunk: Any, wanted: Wanted) -> None:
    if one.finish is not None:
        one.wrong.append(f"a piece behind the end: {piece}")
    delta = piece["delta"] if wanted.is_chat else {"content": piece["text"]}
    new = delta.get("content") or ""
    if "role" in delta:
        one.roles += 1
        if one.text or one.ids or delta["role"] != "assistant" or new:
            one.wrong.append(f"a role delta out of place: {piece}")
    one.text += new
    one.finish = piece["finish_reason"]
    one.stop = piece.get("stop_reason")
    _take_ids(one, piece)
    if "prompt_token_ids" in chunk:
        one.prompt_ids = chunk["prompt_token_ids"]
    scores = piece["logprobs"]
    for key, value in _lists(scores).items():
        one.scores.setdefault(key, []).extend(value)
    says = new or "role" in delta or one.finish or scores or "token_ids" in piece
    if not (says or chunk.get("usage")):
        one.wrong.append(f"a piece that says nothing: {piece}")


def _lists(logprobs: dict[str, Any] | None) -> dict[str, list[Any]]:
    return {key: value for key, value in (logprobs or {}).items() if isinstance(value, list)}


def _take_ids(one: Said, piece: Any) -> None:
    if "token_ids" in piece:
        one.has_ids = True
        one.ids += piece["token_ids"]
    if "prompt_token_ids" in piece:
        one.prompt_ids = piece["prompt_token_ids"]


def _usage_of_stream(wanted: Wanted, chunks: list[Any]) -> list[str]:
    last = chunks[-1]
    if not wanted.include_usage:
        return ["usage that nobody asked for"] * any(c.get("usage") for c in chunks)
    if last["choices"] or not last.get("usage"):
        return [f"no usage at the end: {last}"]
    wrong = _usage(wanted, last["usage"])
    counts = [c["usage"]["completion_tokens"] for c in chunks if c.get("usage")]
    if wanted.running_usage != (len(counts) == len(chunks)):
        wrong.append(f"usage in {len(counts)} of {len(chunks)} chunks")
    if counts != sorted(counts):
        wrong.append(f"usage goes back: {counts}")
    return wrong + ["an empty chunk"] * any(not c["choices"] for c in chunks[:-1])


# --- whole


def _of_whole(ask: Ask, answer: Answer) -> list[str]:
    wanted, document = ask.wanted, orjson.loads(answer.body)
    kind = "chat.completion" if wanted.is_chat else "text_completion"
    wrong = _head(ask, answer, document["id"]) + _usage(wanted, document["usage"])
    if (document["object"], document["model"]) != (kind, MODEL):
        wrong.append(f"object {document['object']}, model {document['model']}")
    said: list[Said] = []
    for index, piece in enumerate(document["choices"]):
        one = Said(finish=piece["finish_reason"], stop=piece.get("stop_reason"))
        one.text = piece["message"]["content"] if wanted.is_chat else piece["text"]
        one.scores = _lists(piece["logprobs"])
        one.prompt_ids = document.get("prompt_token_ids")
        _take_ids(one, piece)
        one.wrong += ["out of order"] * (piece["index"] != index)
        said.append(one)
    return wrong + _choices(wanted, said)


# --- both


def _choices(wanted: Wanted, said: list[Said]) -> list[str]:
    seeds = range(SEEDS) if wanted.is_seed_drawn else (wanted.seed or 0,)
    found = [_against(wanted.seeded(seed), said) for seed in seeds if _may_be(wanted, said, seed)]
    if not found:
        return [f"no seed gives {[one.text for one in said]}"]
    return min(found, key=len)


def _may_be(wanted: Wanted, said: list[Said], seed: int) -> bool:
    """Whether it is worth comparing everything with this seed."""
    if not wanted.is_seed_drawn:
        return True
    if not said or not said[0].text.startswith(wanted.echo):
        return False
    rest = said[0].text[len(wanted.echo) :]
    for step in wanted.seeded(seed).steps(0):
        if not rest.startswith(step.text):
            return False
        rest = rest[len(step.text) :]
    return not rest


def _against(wanted: Wanted, said: list[Said]) -> list[str]:
    rights = rights_of(wanted)
    wrong = [f"{len(said)} choices, not {len(rights)}"] * (len(said) != len(rights))
    for index, (one, right) in enumerate(zip(said, rights, strict=False)):
        wrong += [f"choice {index}: {line}" for line in one.wrong + _choice(wanted, one, right)]
        if wanted.token_ids and one.prompt_ids is not None:
            prompt = list(wanted.prompts[index // wanted.n])
            wrong += ["wrong prompt_token_ids"] * (one.prompt_ids != prompt)
    shown = [one.prompt_ids is not None for one in said]
    is_shown = any(shown) if wanted.is_chat else all(shown)
    if is_shown != wanted.token_ids:
        wrong.append("prompt_token_ids missing or not asked for")
    return wrong


def _choice(wanted: Wanted, one: Said, right: Right) -> list[str]:
    wrong: list[str] = []
    if one.text != right.text:
        wrong.append(f"text {one.text!r}, not {right.text!r}")
    if (one.finish, one.stop) != (right.finish, right.stop):
        wrong.append(f"finish {one.finish}/{one.stop!r}, not {right.finish}/{right.stop!r}")
    if one.has_ids != wanted.token_ids:
        wrong.append("token_ids missing or not asked for")
    elif wanted.token_ids and tuple(one.ids) != right.ids:
        wrong.append(f"ids {one.ids}, not {right.ids}")
    if one.scores != (scores := _scores(wanted, right)):
        wrong.append(f"logprobs {one.scores}, not {scores}")
    return wrong


def _scores(wanted: Wanted, right: Right) -> dict[str, list[Any]]:
    count = wanted.logprobs
    if count is None:
        return {}
    if wanted.is_chat:
        entries = [(t, logprob(t), top(t, count)) for t in right.ids]
        content = [
            {**_entry(t, p), "top_logprobs": [_entry(*one) for one in others]}
            for t, p, others in entries
        ]
        return {"content": content}
    texts = [token_text(t) for t in right.ids]
    return {
        "tokens": texts,
        "token_logprobs": [logprob(t) for t in right.ids],
        "top_logprobs": [
            {token_text(i): p for i, p in (*top(t, count), (t, logprob(t)))} for t in right.ids
        ],
        "text_offset": [sum(map(len, texts[:i])) for i in range(len(texts))],
    }


def _entry(token: int, value: float) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": value, "bytes": list(TOKEN_BYTES[token])}


def _usage(wanted: Wanted, usage: Any) -> list[str]:
    """Of a seed that the router drew only the sum can be checked here."""
    prompt, generated = usage["prompt_tokens"], usage["completion_tokens"]
    wrong = [f"usage {usage}"] * (prompt != wanted.prompt_tokens)
    if usage["total_tokens"] != prompt + generated:
        wrong.append(f"usage does not add up: {usage}")
    if not wanted.is_seed_drawn:
        right = sum(len(one.ids) for one in rights_of(wanted))
        wrong += [f"completion_tokens {generated}, not {right}"] * (generated != right)
    return wrong

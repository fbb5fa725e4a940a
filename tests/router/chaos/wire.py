"""What an engine of ours says on the wire, to the byte: bodies and chunks of P, of D, and of one
that serves alone (docs/adr/0002). Pure. tests/router/test_mock_engine.py compares it with the real
server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from tests.router.chaos.truth import TOKEN_BYTES, Step, Wanted, logprob, token_text, top
from xpyd_core.request_id import parse_pair_id

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Call:
    """One inference request as the mock reads it. `part`: what this instance is in it."""

    wanted: Wanted
    part: Literal["P", "D", "alone"]
    uuid: str
    body: Json
    params: Json
    given: list[list[int]]
    emit_from: list[int]
    tag: str

    @classmethod
    def of(cls, kind: str, endpoint: str, request_id: str, raw: bytes) -> Call:
        """Reads a call that reached an engine of `kind`."""
        body: Json = orjson.loads(raw)
        params: Json = body.get("kv_transfer_params") or {}
        wanted = Wanted.of(endpoint, body)
        if "seed" in params:
            wanted = wanted.seeded(params["seed"])
        pair = parse_pair_id(request_id)
        part: Literal["P", "D", "alone"] = "alone"
        if pair is not None:
            part = "P" if kind == "P" else "D"
        none: list[list[int]] = [[] for _ in range(wanted.choices)]
        given: list[list[int]] = params.get("continue_from") or none
        lengths = [len(ids) for ids in given]
        return cls(
            wanted=wanted,
            part=part,
            uuid=pair.uuid if pair else request_id[-32:],
            body=body,
            params=params,
            given=given,
            emit_from=params.get("emit_from") or (lengths if kind == "P" else [0] * len(given)),
            tag=str(body.get("user", "")),
        )

    @property
    def is_continued(self) -> bool:
        return "continue_from" in self.params

    def head(self, *, chunk: bool) -> Json:
        """What every chunk and answer shares."""
        is_chat = self.wanted.is_chat
        own = f"{'chatcmpl' if is_chat else 'cmpl'}-{self.uuid}"
        created = self.params.get("created")
        kind = ("chat.completion" + ".chunk" * chunk) if is_chat else "text_completion"
        return {
            "id": self.params.get("response_id") or own,
            "object": kind,
            "created": 1700000000 if created is None else created,
            "model": self.body["model"],
        }

    def steps(self, choice: int) -> Iterator[Step]:
        hold = self.part == "P" and "client_max_tokens" in self.params
        return self.wanted.steps(choice, given=self.given[choice], hold=hold)

    def usage(self, generated: int) -> Json:
        prompt = self.wanted.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


@dataclass
class _Gained:
    """What a choice gained since it was last asked."""

    index: int
    text: str
    ids: list[int]
    scored: list[int]
    finish: str | None
    stop: str | None


def _walk(call: Call, choice: int) -> Iterator[_Gained]:
    """The choice's gains, step by step; what the client has of it is left out."""
    given = len(call.given[choice])
    for position, step in enumerate(call.steps(choice)):
        is_shown = position >= call.emit_from[choice] and step.token_id is not None
        text = step.text if is_shown or step.token_id is None else ""
        ids = [step.token_id] if is_shown and step.token_id is not None else []
        scored = ids if position >= given else []
        gained = _Gained(choice, text, ids, scored, step.finish, step.stop)
        if position < given and not (ids or step.finish):
            continue
        yield gained


def _score(token: int) -> Json:
    return {
        "token": token_text(token),
        "logprob": logprob(token),
        "bytes": list(TOKEN_BYTES[token]),
    }


def _logprobs(call: Call, ids: list[int], offset: int) -> Json:
    count = call.wanted.logprobs or 0
    if call.wanted.is_chat:
        content = [
            {
                **_score(t),
                "top_logprobs": [{**_score(i), "logprob": value} for i, value in top(t, count)],
            }
            for t in ids
        ]
        return {"content": content, "refusal": None}
    offsets: list[int] = []
    for token in ids:
        offsets.append(offset)
        offset += len(token_text(token))
    return {
        "tokens": [token_text(t) for t in ids],
        "token_logprobs": [logprob(t) for t in ids],
        "top_logprobs": [
            {token_text(i): value for i, value in (*top(t, count), (t, logprob(t)))} for t in ids
        ],
        "text_offset": offsets,
    }


def _joined(first: Json | None, second: Json) -> Json:
    if not first:
        return second
    return {k: [*first[k], *v] if isinstance(v, list) else v for k, v in second.items()}


def _whole_choice(call: Call, index: int) -> tuple[Json, int]:
    """A choice of a whole answer, and how many tokens it has in all."""
    wanted = call.wanted
    ids: list[int] = []
    scored: list[int] = []
    text, last = "", _Gained(index, "", [], [], None, None)
    for last in _walk(call, index):
        text += last.text
        ids += last.ids
        scored += last.scored
    logprobs = None
    if wanted.logprobs is not None:
        first = (call.params.get("first_logprobs") or [None] * wanted.choices)[index]
        sent = call.given[index][: call.emit_from[index]]
        offset = sum(len(token_text(i)) for i in sent)
        if first and not wanted.is_chat:
            offset = first["text_offset"][-1] + len(first["tokens"][-1])
        logprobs = _joined(first, _logprobs(call, scored, offset))
    choice: Json = {"index": index}
    if wanted.is_chat:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = wanted.echo + text
    choice |= {"logprobs": logprobs, "finish_reason": last.finish, "stop_reason": last.stop}
    if wanted.token_ids:
        choice["token_ids"] = ids
        if not wanted.is_chat:
            choice["prompt_token_ids"] = list(wanted.prompts[index // wanted.n])
    return choice, call.emit_from[index] + len(ids)


def whole(call: Call) -> bytes:
    """The answer that is not streamed."""
    wanted = call.wanted
    made = [_whole_choice(call, index) for index in range(wanted.choices)]
    usage = call.usage(sum(count for _, count in made))
    answer: Json = {**call.head(chunk=False), "choices": [choice for choice, _ in made]}
    answer["usage"] = usage
    if wanted.is_chat and wanted.token_ids:
        answer["prompt_token_ids"] = list(wanted.prompts[0])
    if call.part == "P":
        answer["kv_transfer_params"] = transfer_of(call)
    return orjson.dumps(answer)


def transfer_of(call: Call) -> Json:
    """P's fields: the router passes them on as they are, but for `reason`, which it keeps."""
    prompts = range(len(call.wanted.prompts))
    states = ("granted", "pending", "none")
    return {
        "reason": [""] * len(call.wanted.prompts),
        "transfer": [states[(int(call.uuid[:2], 16) + i) % 3] for i in prompts],
        "decode_incarnation": f"of-{call.uuid[::-1][:12]}",
        "prompt_digest": [call.wanted.digest(i) for i in prompts],
    }


def event(payload: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


class Stream:
    """The events of a streamed answer; iterate: one item per step of the engine."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._head = call.head(chunk=True)
        wanted = call.wanted
        self._offsets = [
            sum(len(token_text(i)) for i in ids[:k])
            for ids, k in zip(call.given, call.emit_from, strict=True)
        ]
        self._generated = sum(len(ids) for ids in call.given)
        self._begun: set[int] = set()
        self._extra: Json = {}
        if wanted.is_chat and wanted.token_ids and not any(call.given):
            self._extra = {"prompt_token_ids": list(wanted.prompts[0])}
        self._walks = {index: _walk(call, index) for index in range(wanted.choices)}

    def __iter__(self) -> Iterator[bytes]:
        opening = self._opening()
        while self._walks:
            data = opening
            opening = b""
            for index in list(self._walks):
                gained = next(self._walks[index])
                self._generated += len(gained.scored)
                if gained.finish:
                    del self._walks[index]
                data += self._chunk(gained)
            if data:
                yield data
        tail = b""
        if self._call.wanted.include_usage:
            usage = self._call.usage(self._generated)
            tail = event({**self._head, "choices": [], "usage": usage})
        yield tail + DONE

    def _event(self, choice: Json) -> bytes:
        wanted = self._call.wanted
        tail, self._extra = self._extra, {}
        if wanted.include_usage:
            tail["usage"] = self._call.usage(self._generated) if wanted.running_usage else None
        return event({**self._head, "choices": [choice], **tail})

    def _opening(self) -> bytes:
        call, wanted = self._call, self._call.wanted
        if not wanted.is_chat or call.is_continued:
            return b""
        data = b""
        for index in range(wanted.n):
            delta = {"role": "assistant", "content": ""}
            piece = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            data += self._event(piece)
        return data

    def _chunk(self, gained: _Gained) -> bytes:
        call, wanted = self._call, self._call.wanted
        index, is_first = gained.index, gained.index not in self._begun
        self._begun.add(index)
        text = wanted.echo * is_first + gained.text
        want_ids = call.is_continued or wanted.token_ids
        scores = None
        if wanted.logprobs is not None and gained.scored:
            scores = _logprobs(call, gained.scored, self._offsets[index])
            self._offsets[index] += sum(len(token_text(i)) for i in gained.scored)
        if not (text or gained.finish or scores or want_ids):
            return b""
        choice: Json = {"index": index}
        if wanted.is_chat:
            choice["delta"] = {"content": text} if text or not gained.finish else {}
        else:
            choice["text"] = text
        choice |= {"logprobs": scores, "finish_reason": gained.finish}
        if not wanted.is_chat or gained.finish:
            choice["stop_reason"] = gained.stop
        if want_ids:
            choice["token_ids"] = gained.ids
        if wanted.token_ids and not wanted.is_chat and is_first and not call.given[index]:
            choice["prompt_token_ids"] = list(wanted.prompts[index // wanted.n])
        return self._event(choice)

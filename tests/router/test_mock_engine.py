"""The chaos tests' mock engine says what the real server says: same calls, same answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from tests.router.chaos import truth
from tests.router.chaos.asks import Ask, draw
from tests.router.chaos.truth import Wanted
from tests.router.chaos.wire import Call, Stream, whole
from tests.worker.server_fakes import ByteTokenizer, Running, ScriptedEngine, run, serving
from xpyd_worker.engine.request import EngineRequest, TokenLogprob

UUID = "93923d63113b4b338973f24d19d4bf11"
PAIR = f"___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:21001_{UUID}"


class Tokenizer(ByteTokenizer):
    """The server's fake tokenizer with the mocks' texts."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return truth.decode(ids)

    def token_bytes(self, token_id: int) -> bytes:
        return truth.TOKEN_BYTES[token_id]


class Engine(ScriptedEngine):
    """The server's fake engine with the mocks' model; `wanted` is what it is asked next."""

    wanted: Wanted

    def __init__(self) -> None:
        def script(_request: EngineRequest, choice: int) -> Sequence[int]:
            return [self.wanted.token(choice, position) for position in range(truth.CONTEXT)]

        super().__init__(script)

    def _logprob(self, request: EngineRequest, token: int) -> TokenLogprob | None:
        count = request.sampling.logprobs
        if count is None:
            return None
        return TokenLogprob(token, truth.logprob(token), tuple(truth.top(token, count)))


def extended(before: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Every list joined."""
    out: dict[str, Any] = dict(more)
    for key in more:
        if isinstance(more[key], list):
            out[key] = before[key] + more[key]
    return out


def joined(raw: bytes) -> Any:
    """A stream by choice, whatever tokens share a chunk: all that it says, and its forms."""
    choices: dict[int, dict[str, Any]] = {}
    forms: set[str] = set()
    rest: list[Any] = []
    for line in raw.decode().split("\n\n"):
        if not line.startswith("data: {"):
            rest.append(line)
            continue
        chunk = orjson.loads(line[6:])
        forms.add(",".join(chunk))
        if not chunk["choices"]:
            rest.append(chunk)
        for choice in chunk["choices"]:
            forms.add(",".join(choice))
            said = choices.setdefault(choice["index"], {})
            for key, value in {**choice, **choice.get("delta", {})}.items():
                if isinstance(value, str | list) and key in said:
                    said[key] += value
                elif isinstance(value, dict) and key == "logprobs" and key in said:
                    said[key] = extended(said[key], choice[key])
                elif value is not None and key != "delta":
                    said[key] = value
    return choices, forms, rest


async def compare(server: Running, kind: str, endpoint: str, request_id: str, body: Any) -> None:
    call = Call.of(kind, endpoint, request_id, orjson.dumps(body))
    assert isinstance(server.engine, Engine)
    server.engine.wanted = call.wanted
    headers = {"X-Request-Id": request_id}
    answer = await server.client.post(
        f"/v1/{endpoint}", json={**body, "model": "fake"}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    if call.wanted.stream:
        mock = b"".join(Stream(call))
        assert joined(levelled(mock)) == joined(levelled(answer.content))
    else:
        mock = whole(call)
        assert without_report(levelled(mock)) == without_report(levelled(answer.content))


def levelled(data: bytes) -> bytes:
    """Without what each process makes for itself."""
    lines: list[bytes] = []
    for line in data.split(b"\n\n"):
        prefix = b"data: " if line.startswith(b"data: {") else b""
        if not line.removeprefix(prefix).startswith(b"{"):
            lines.append(line)
            continue
        document = orjson.loads(line.removeprefix(prefix))
        document["model"] = "m"
        if not document["id"].endswith("router"):
            document |= {"id": "own", "created": 0}
        if document.get("usage"):
            document["usage"].pop("prompt_tokens_details")
        lines.append(prefix + orjson.dumps(document))
    return b"\n\n".join(lines)


def without_report(raw: bytes) -> Any:
    """The digests are of another hash, the transfers of no real D: only their form is the same."""
    answer = orjson.loads(raw)
    params = answer.pop("kv_transfer_params", None)
    if params is not None:
        answer["kv_transfer_params"] = {
            "keys": sorted(params),
            "prompts": [len(params[key]) for key in ("transfer", "prompt_digest")],
        }
    return answer


def params_to_p(wanted: Wanted, body: Any, given: Any) -> Any:
    params: dict[str, Any] = {"seed": wanted.seed or 0, "client_max_tokens": body.get("max_tokens")}
    if any(given):
        params["continue_from"] = given
    limit = 1 + len(given[0])
    left = {k: v for k, v in body.items() if k not in ("stream_options", "max_completion_tokens")}
    left |= {"stream": False, "max_tokens": limit, "return_token_ids": True}
    left["min_tokens"] = min(body.get("min_tokens") or 0, limit)
    return {**left, "kv_transfer_params": params}


def params_to_d(wanted: Wanted, body: Any, given: Any) -> Any:
    params = {
        "seed": wanted.seed or 0,
        "continue_from": given,
        "emit_from": [len(ids) if body.get("stream") else 0 for ids in given],
        "response_id": "cmpl-router",
        "created": 5,
    }
    return {**body, "kv_transfer_params": params}


def first_ids(wanted: Wanted, count: int) -> list[list[int]]:
    """`count` ids of each choice, fewer where it ends before."""
    out: list[list[int]] = []
    for choice in range(wanted.choices):
        steps = [s.token_id for s in wanted.steps(choice) if s.token_id is not None]
        out.append(steps[:count])
    return out


async def to_p(server: Running, ask: Ask, rng: random.Random) -> None:
    wanted = ask.wanted
    is_single = wanted.choices == 1
    before = rng.randrange(max(1, min(wanted.limit - 1, 6))) if is_single else 0
    body = params_to_p(wanted, ask.body, first_ids(wanted, before))
    await compare(server, "P", ask.endpoint, PAIR, body)


async def to_d(server: Running, ask: Ask, rng: random.Random) -> None:
    if ask.wanted.limit > 1:
        given = first_ids(ask.wanted, rng.randrange(1, min(ask.wanted.limit, 8)))
        body = params_to_d(ask.wanted, ask.body, given)
        await compare(server, "D", ask.endpoint, PAIR, body)


async def alone(server: Running, ask: Ask, rng: random.Random) -> None:
    """As it is; and, streamed, behind what each choice said elsewhere: of some choices nothing."""
    await compare(server, "A", ask.endpoint, UUID, ask.body)
    wanted = ask.wanted
    if not wanted.stream or wanted.echo:
        return
    given = [first_ids(wanted, rng.randrange(4))[i] for i in range(wanted.choices)]
    nothing: list[list[int]] = [[] for _ in given]
    for ids in (nothing, given):
        await compare(server, "A", ask.endpoint, UUID, params_to_d(wanted, ask.body, ids))


@pytest.mark.parametrize("part", ["P", "D", "alone", "alone on P"])
def test_a_call_is_answered_as_the_real_server_does(part: str) -> None:
    role = {"D": "Decode", "alone": "Aggregated"}.get(part, "Prefill")

    async def work() -> None:
        async with serving(
            Engine(), role=role, tokenizer=Tokenizer(), max_model_len=truth.CONTEXT
        ) as server:
            for number in range(40):
                ask = draw(random.Random(number), number)
                rng = random.Random(number)
                if part == "alone" or (part == "alone on P" and ask.wanted.limit == 1):
                    await alone(server, ask, rng)
                elif part == "alone on P":
                    continue
                elif not ask.wanted.echo:
                    await (to_p if part == "P" else to_d)(server, ask, rng)

    run(work())

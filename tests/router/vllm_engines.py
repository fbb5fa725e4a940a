"""Engines that behave as vLLM 0.32 with NixlConnector does, by what its sources say.

The model is a function of all ids so far, so that any two ways to the same ids give the same text.
A P keeps what it computed until a D has read it; a D with the KV of another prompt generates
something else, with status 200, and one that needs more blocks than P names fails.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from aiohttp import web

from tests.router.fakes import Call, Fleet, HttpEngine, die, sse, start_stream
from xpyd_core.messages import Heartbeat

BLOCK_TOKENS = 16
CONTEXT_TOKENS = 512
ASKED_OF_P: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


compact = partial(json.dumps, separators=(",", ":"))


def generated_id(ids: Sequence[int]) -> int:
    """The greedy token behind `ids`."""
    return 300 + sum((n % 89 + 1) * i for n, i in enumerate(ids)) % 97


def text_of_ids(ids: Sequence[int]) -> str:
    return "".join(f" w{i - 300}" for i in ids)


def wrong_id(ids: Sequence[int]) -> int:
    """What comes out with another prompt's KV."""
    return 300 + (generated_id(ids) - 300 + 1) % 97


@dataclass
class Vllm:
    """One engine's state. `pinned`: ids by request id, of the P that holds them; shared by all."""

    pinned: dict[str, list[int]]
    dies_after: int | None = None
    """Chunks of a stream after which the process dies."""
    aborts_after: int | None = None
    """Tokens of an answer after which it ends, as in a vLLM that is told to end: 0 refuses it."""
    half_character_at: int | None = None
    """Position of a generated token whose text is held back until the next one."""
    pushes: bool = False
    cap: int | None = None
    """`max_new_tokens` of --override-generation-config."""
    external_tokens: list[int] = field(default_factory=list[int])
    """Of each request: how many tokens of its prompt came from P."""
    numbers: Iterator[int] = field(default_factory=count)

    async def __call__(
        self, engine: HttpEngine, call: Call, request: web.Request
    ) -> web.StreamResponse:
        if (complaint := self._refusal(call.body)) is not None:
            error = {"message": complaint, "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response({"error": error}, status=400)
        params: dict[str, Any] = call.body.get("kv_transfer_params") or {}
        prompts = self._prompts(call, params)
        if any(len(ids) + self._limit(call.body) > CONTEXT_TOKENS for ids in prompts):
            error = {"message": "maximum context length", "type": "BadRequestError", "code": 400}
            return web.json_response({"error": error}, status=400)
        knows = [True] * len(prompts)
        if params.get("do_remote_prefill"):
            knows = [self._pull(ids, params) for ids in prompts]
        else:
            self.external_tokens.append(0)
        outputs = [
            self._generate(ids, call.body, right=k)[: self.aborts_after]
            for ids, k in zip(prompts, knows, strict=True)
        ]
        if not call.body.get("stream"):
            answer = self._whole(engine, call, prompts, outputs, params)
            return web.json_response(answer, dumps=compact)
        return await self._stream(engine, call, request, prompts, outputs)

    @staticmethod
    def _refusal(body: dict[str, Any]) -> str | None:
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if body.get("stream_options") is not None and not body.get("stream"):
            return "Stream options can only be defined when `stream=True`."
        if "min_tokens" in body and type(body["min_tokens"]) is not int:
            return "min_tokens: Input should be a valid integer"
        if limit is not None and limit < 1:
            return "max_tokens must be at least 1"
        if limit is not None and body.get("min_tokens", 0) > limit:
            return "min_tokens must be less than or equal to max_tokens"
        params = body.get("kv_transfer_params")
        if params is not None and type(params) is not dict:
            return "kv_transfer_params: Input should be a valid dictionary"
        return None

    @staticmethod
    def _prompts(call: Call, params: dict[str, Any]) -> list[list[int]]:
        if "messages" in call.body:
            texts = (f"{m['role']}: {m['content']}\n" for m in call.body["messages"])
            return [params.get("prompt_token_ids") or list("".join(texts).encode())]
        prompt = call.body.get("prompt") or []
        embeddings = call.body.get("prompt_embeds") or []
        embeddings = [embeddings] if isinstance(embeddings, str) else embeddings
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        return [
            one if isinstance(one, list) else list(one.encode()) for one in (*embeddings, *prompt)
        ]

    def _limit(self, body: dict[str, Any]) -> int:
        wanted: int = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        return wanted if self.cap is None else min(wanted, self.cap)

    def _pull(self, ids: list[int], params: dict[str, Any]) -> bool:
        """Take P's KV for `ids`; whether it is theirs. All of the prompt counts as P's."""
        needed = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
        if any(params.get(name) is None for name in needed):
            self.external_tokens.append(0)
            return True
        had = self.pinned.pop(params["remote_request_id"], [])
        assert had or not params.get("remote_block_ids"), "its blocks were read already"
        self.external_tokens.append(len(ids))
        if not self.pushes:
            assert -(-len(ids) // BLOCK_TOKENS) <= len(params["remote_block_ids"][0])
        # vLLM computes the last token of a prompt again.
        return had[: len(ids)] == ids[: len(had)] and len(had) >= len(ids) - 1

    def _generate(self, ids: list[int], body: dict[str, Any], *, right: bool) -> list[int]:
        out: list[int] = []
        while len(out) < self._limit(body):
            out.append((generated_id if right else wrong_id)([*ids, *out]))
        return out

    @property
    def _end(self) -> str:
        return "length" if self.aborts_after is None else "abort"

    def _usage(self, prompts: list[list[int]], made: int) -> dict[str, int]:
        prompt = sum(map(len, prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
        }

    def _whole(
        self,
        engine: HttpEngine,
        call: Call,
        prompts: list[list[int]],
        outputs: list[list[int]],
        params: dict[str, Any],
    ) -> dict[str, Any]:
        is_chat, wants_ids = "messages" in call.body, call.body.get("return_token_ids")
        choices: list[dict[str, Any]] = []
        for index, (ids, out) in enumerate(zip(prompts, outputs, strict=True)):
            text = text_of_ids(out)
            choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": self._end}
            choice |= (
                {"message": {"role": "assistant", "content": text, "reasoning": None}}
                if is_chat
                else {"text": text}
            )
            if wants_ids:
                choice["token_ids"] = out
                if not is_chat:
                    choice["prompt_token_ids"] = ids
            choices.append(choice)
        answer = {
            "id": f"{'chat' if is_chat else ''}cmpl-{call.request_id}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 77,
            "model": call.body["model"],
            "choices": choices,
            "usage": self._usage(prompts, sum(map(len, outputs))),
            "kv_transfer_params": None,
        }
        if is_chat:
            answer["prompt_token_ids"] = prompts[0] if wants_ids else None
        if params.get("do_remote_decode"):
            answer["kv_transfer_params"] = self._pin(engine, call, prompts[0])
        return answer

    def _pin(self, engine: HttpEngine, call: Call, ids: list[int]) -> dict[str, Any]:
        request_id = f"cmpl-{call.request_id}-0-{next(self.numbers):08x}"
        self.pinned[request_id] = ids
        given = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, 2 + (len(ids) - 1) // BLOCK_TOKENS))],
            "remote_engine_id": f"engine-{engine.port}",
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(ids),
            "remote_blocks_expiry_time": None,
            "remote_registration_generation": 0,
            "transfer_mode": "push" if self.pushes else "pull",
            "remote_prefill_cached_tokens": 0,
        }
        if self.pushes:
            del given["remote_block_ids"]
        return given

    async def _stream(
        self,
        engine: HttpEngine,
        call: Call,
        request: web.Request,
        prompts: list[list[int]],
        outputs: list[list[int]],
    ) -> web.StreamResponse:
        response = await start_stream(request)
        for number, chunk in enumerate(self._chunks(call, prompts, outputs)):
            if number == self.dies_after:
                return await die(engine, call, request)
            await response.write(sse(chunk))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _chunks(
        self, call: Call, prompts: list[list[int]], outputs: list[list[int]]
    ) -> Iterator[dict[str, Any]]:
        body, is_chat = call.body, "messages" in call.body
        options: dict[str, Any] = body.get("stream_options") or {}
        wants_ids = body.get("return_token_ids")
        base = {
            "id": f"{'chat' if is_chat else ''}cmpl-{call.request_id}",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": 78,
            "model": body["model"],
        }

        def chunk(piece: dict[str, Any], made: int) -> dict[str, Any]:
            out = {**base, "choices": [piece]}
            if options.get("continuous_usage_stats"):
                out["usage"] = self._usage(prompts, made)
            return out

        if is_chat:
            role: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            first = chunk({**role, "logprobs": None, "finish_reason": None}, 0)
            yield {**first, "prompt_token_ids": prompts[0]} if wants_ids else first
        made = 0
        for index, out in enumerate(outputs):
            held = ""
            if not out:
                nothing: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
                yield chunk({"index": index, **nothing, "finish_reason": self._end}, made)
            for position, token in enumerate(out):
                made += 1
                text, held = held + text_of_ids([token]), ""
                is_last = position + 1 == len(out)
                if position == self.half_character_at and not is_last:
                    text, held = "", text
                piece: dict[str, Any] = {"index": index, "logprobs": None}
                piece |= {"delta": {"content": text}} if is_chat else {"text": text}
                piece["finish_reason"] = self._end if is_last else None
                if wants_ids:
                    piece["token_ids"] = [token]
                    if position == 0 and not is_chat:
                        piece["prompt_token_ids"] = prompts[index]
                yield chunk(piece, made)
        if options.get("include_usage"):
            yield {**base, "choices": [], "usage": self._usage(prompts, made)}


async def vllm_engine(
    fleet: Fleet, kind: str, pinned: dict[str, list[int]], **beat: Any
) -> tuple[HttpEngine, Vllm]:
    """One vLLM that says of itself that it speaks `nixl`, unless `beat` says otherwise."""
    said = {"dialect": "nixl", "models": ("m",), "prompt_ids": 1, "max_model_len": CONTEXT_TOKENS}
    engine = await fleet.engine(kind, is_ours=False, **{**said, **beat})
    vllm = Vllm(pinned, pushes=beat.get("dialect") == "nixl-push")
    engine.script = vllm
    return engine, vllm


async def silent_vllm(
    stack: contextlib.AsyncExitStack,
    kind: str,
    pinned: dict[str, list[int]],
    *,
    version: str = "0.32.0",
    port: int = 0,
) -> tuple[HttpEngine, Vllm]:
    """One vLLM that sends no beats: what it is, it says when it is asked."""
    engine = HttpEngine(Heartbeat(type="P", http_address="x:1", zmq_address="x:1"), port)
    card = {"id": "m", "object": "model", "max_model_len": CONTEXT_TOKENS}
    engine.pages = {
        "/v1/models": {"object": "list", "data": [card]},
        "/version": {"version": version},
    }
    vllm = Vllm(pinned)
    engine.script = vllm
    await engine.start()
    stack.push_async_callback(engine.stop)
    return engine, vllm

"""Engines whose chat answers a test has written: content, reasoning, tool calls.

`ChatEngine` is a Script (see fakes) of one instance that serves alone, and of the P and D of a pair
that continues: each delta is one token there, of which P gives the first.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from tests.router.fakes import Call, HttpEngine, sse, start_stream

Delta = dict[str, Any]


def content(*texts: str) -> list[Delta]:
    return [{"content": text} for text in texts]


def reasoning(*texts: str) -> list[Delta]:
    return [{"reasoning_content": text} for text in texts]


def tool_call(call_id: str, name: str, *arguments: str, index: int = 0) -> list[Delta]:
    """The deltas of one call, as OpenAI and vLLM send them."""
    head = {"index": index, "id": call_id, "type": "function"}
    head["function"] = {"name": name, "arguments": ""}
    rest = [{"index": index, "function": {"arguments": text}} for text in arguments]
    return [{"tool_calls": [one]} for one in (head, *rest)]


def joined(deltas: list[Delta]) -> dict[str, Any]:
    """The message of a whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for key in ("content", "reasoning_content"):
            if key in delta:
                message[key] = (message.get(key) or "") + delta[key]
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                made = {"id": part["id"], "type": "function", "function": dict(part["function"])}
                calls[part["index"]] = made
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


class ChatEngine:
    """A Script that says `deltas`."""

    def __init__(
        self,
        deltas: list[Delta],
        finish: str = "stop",
        stop_reason: Any = None,
        cached: int = 0,
        dies_at: int | None = None,
    ) -> None:
        self.deltas = deltas
        self.ending = {"finish_reason": finish, "stop_reason": stop_reason}
        self.cached = cached
        self.dies_at = dies_at
        """The delta at which its process dies, the first time that it comes there."""

    async def __call__(
        self, engine: HttpEngine, call: Call, request: web.Request
    ) -> web.StreamResponse:
        body = call.body
        params = body.get("kv_transfer_params") or {}
        head = {
            "id": params.get("response_id") or f"chatcmpl-{call.request_id}",
            "created": params.get("created") or 1234,
            "model": body["model"],
        }
        usage = {
            "prompt_tokens": 9,
            "completion_tokens": len(self.deltas),
            "total_tokens": 9 + len(self.deltas),
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if not body.get("stream"):
            return web.json_response(self._whole(params, head, usage))
        return await self._stream(request, body, head, usage)

    def _whole(
        self, params: dict[str, Any], head: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        is_prefill = "client_max_tokens" in params
        start = len((params.get("continue_from") or [[]])[0])
        said = self.deltas[start : start + 1] if is_prefill else self.deltas
        choice: dict[str, Any] = {"index": 0, "message": joined(said), "logprobs": None}
        choice |= {"finish_reason": "length", "token_ids": [start]} if is_prefill else self.ending
        answer = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
        if is_prefill:
            answer["kv_transfer_params"] = {"transfer": ["granted"], "prompt_digest": ["ab" * 32]}
        return answer

    async def _stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        head: dict[str, Any],
        usage: dict[str, Any],
    ) -> web.StreamResponse:
        response = await start_stream(request)
        ids = (body.get("kv_transfer_params") or {}).get("continue_from")
        head = {**head, "object": "chat.completion.chunk"}
        wants_usage = (body.get("stream_options") or {}).get("include_usage")
        more = {"usage": None} if wants_usage else {}

        async def say(delta: Delta, **choice: Any) -> None:
            made = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **choice}
            await response.write(sse({**head, "choices": [made], **more}))

        if ids is None:
            await say({"role": "assistant", "content": ""})
        start = len(ids[0]) if ids else 0
        for number, delta in enumerate(self.deltas[start:], start):
            if number == self.dies_at:
                self.dies_at = None
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            await say(delta, **({} if ids is None else {"token_ids": [number]}))
        await say({}, **self.ending, **({} if ids is None else {"token_ids": []}))
        if wants_usage:
            await response.write(sse({**head, "choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

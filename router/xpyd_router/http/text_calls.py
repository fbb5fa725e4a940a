"""`POST /tokenize` and `POST /detokenize`: sent on, as they are, to an instance of the model.
Anthropic's count_tokens and OpenAI's input_tokens are a /tokenize with another body and answer.

Every instance of a model has its tokenizer, so any that takes requests is asked, in turn; one that
fails is replaced by the next. No KV moves, and nothing counts against the router's limits: engines
bound the texts that wait for their threads, and no client's key has all of these. Stands before
Quart, behind `inference`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Coroutine, Generator, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Annotated

import msgspec

from xpyd_core.bodies import BodyCharge, check_text, read, refuse
from xpyd_core.errors import ApiError, ProtocolError
from xpyd_core.openai import MAX_NAME_CHARACTERS
from xpyd_router.admission import SPARE_PART
from xpyd_router.app_state import AppState
from xpyd_router.errors import (
    BROKEN,
    TAKES_NO_MORE,
    Answer,
    CallFailed,
    EngineRefused,
    unknown_model,
)
from xpyd_router.fleet.instances import Instance, Snapshot
from xpyd_router.http.asgi import (
    AsgiApp,
    ClientLeft,
    Receive,
    Scope,
    Send,
    id_headers,
    read_body,
    refusal,
    send_answer,
)
from xpyd_router.http.inference import INLINE_BYTES, read_on
from xpyd_router.http.keyed import OpenBodies, check_model, owner_of
from xpyd_router.keys.client import Client
from xpyd_router.request.answers import scrub
from xpyd_router.request.client_request import TEXT_PATHS, ClientHead, HeadReader
from xpyd_router.request.relay import Header
from xpyd_router.translations.messages import Messages
from xpyd_router.translations.responses import Responses
from xpyd_router.translations.seam import Api, tokens_of
from xpyd_router.upstream.client import UpstreamClient

_COUNTS = {f"/v1/{api.name}/{api.count_path}": api.name for api in (Messages, Responses)}
TEXT_ROUTES = (*TEXT_PATHS, *_COUNTS)
MAX_CALLS = 64
"""Calls at a time: engines let as many texts wait for their threads."""
SPARE_CALLS = MAX_CALLS // SPARE_PART
"""Of these, so many are for keys that have fewer: a flood of one key leaves the others room."""
_MAX_ASKED = 16
"""Instances that one request is sent to, at most."""

logger = logging.getLogger(__name__)


class _Named(msgspec.Struct, frozen=True, gc=False):
    """What the router reads of these bodies."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)] | None = None


class TextCalls:
    """See the module: an ASGI application that leaves `app` all other requests."""

    def __init__(
        self,
        state: AppState,
        upstream: UpstreamClient,
        bodies: OpenBodies,
        app: AsgiApp,
        *,
        reader: Executor,
        apis: Mapping[str, Api],
    ) -> None:
        self._reader = reader
        self._apis = apis
        self._config = state.config
        self._fleet = state.fleet
        self._clock = state.clock
        self._upstream = upstream
        self._bodies = bodies
        self._app = app
        self._heads = HeadReader(state.config.forward_headers)
        self._turns = itertools.count()
        self._open = 0
        self._open_of = Counter[Client]()
        """Of the calls, those of each key that has some."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        is_ours = (
            scope["type"] == "http" and scope["path"] in TEXT_ROUTES and scope["method"] == "POST"
        )
        if not is_ours:
            await self._app(scope, receive, send)
            return
        head = self._heads.read(scope["headers"])
        charge = self._bodies.charge(owner_of(scope))
        try:
            answer, headers = await self._answer(scope, head, receive, charge)
        except ClientLeft:
            return
        finally:
            charge.end()
        await send_answer(send, answer, headers)

    async def _answer(
        self, scope: Scope, head: ClientHead, receive: Receive, charge: BodyCharge
    ) -> tuple[Answer, list[Header]]:
        name, path = head.request_id, scope["path"]
        api = self._apis[_COUNTS[path]] if path in _COUNTS else None
        try:
            if head.complaint is not None:
                raise head.complaint
            body = await read_body(receive, scope, charge)
            owner = owner_of(scope)
            with self._place(owner):
                if api is None:
                    work = self._ask(path, body, head, owner)
                else:
                    work = self._count(api, body, head, owner)
                answer = await _until_left(work, receive)
        except (ApiError, EngineRefused) as error:
            return refusal(error, name, api)
        except (ClientLeft, asyncio.CancelledError):
            raise
        except Exception:
            logger.exception("a text call failed")
            return refusal(ApiError(500, "internal error of the router"), name, api)
        headers = [(b"content-type", answer.content_type.encode("latin-1"))]
        return answer, [*headers, *id_headers(name, api)]

    @contextlib.contextmanager
    def _place(self, owner: Client | None) -> Generator[None]:
        """One call at a time. ApiError where there are too many."""
        has_few = owner is None or self._open_of[owner] < SPARE_CALLS
        if self._open >= (MAX_CALLS if has_few else MAX_CALLS - SPARE_CALLS):
            raise ApiError(503, "too many texts are being tokenized", retry_after_s=1)
        self._open += 1
        if owner is not None:
            self._open_of[owner] += 1
        try:
            yield
        finally:
            self._open -= 1
            if owner is not None:
                self._open_of[owner] -= 1
                if not self._open_of[owner]:
                    del self._open_of[owner]

    async def _count(self, api: Api, body: bytes, head: ClientHead, owner: Client | None) -> Answer:
        """The answer to a request for the count of a prompt's tokens."""
        read = partial(api.tokenize_body, owner="" if owner is None else owner.name)
        if len(body) <= INLINE_BYTES:
            asked = read(body)
        else:
            asked = await read_on(self._reader, read, [body])
        answer = await self._ask("/tokenize", asked, head, owner)
        try:
            return answer._replace(body=api.count_body(tokens_of(answer.body)))
        except ProtocolError as error:
            logger.warning("/tokenize failed: %s", error)
            raise ApiError(502, "the instances failed", code="upstream_failed") from error

    async def _ask(self, path: str, body: bytes, head: ClientHead, owner: Client | None) -> Answer:
        """The answer of the first instance that gives one."""
        if len(body) <= INLINE_BYTES:
            model = _model_in(body)
        else:
            model = await read_on(self._reader, _model_in, [body])
        if owner is not None:
            check_model(owner, model or "", self._fleet.snapshot)
        found = _candidates(self._fleet.snapshot, model)
        first = next(self._turns) % len(found)
        deadline_s = self._clock() + self._config.request_timeout_s
        failures, cause = 0, ""
        for instance in (*found[first:], *found[:first])[:_MAX_ASKED]:
            if self._fleet.is_lost(instance.key):
                continue
            left_s = deadline_s - self._clock()
            try:
                return await self._call(
                    instance, path, body, head, min(self._config.prefill_timeout_s, left_s)
                )
            except CallFailed as failure:
                cause = failure.cause
                logger.warning("%s failed: %s", path, cause, extra={"instance": instance.name})
                if cause in BROKEN:
                    self._fleet.failed(instance, failure.cause, body)
                failures += cause != "refused"
            if failures >= self._config.max_tries or self._clock() >= deadline_s:
                break
        if cause == "timeout":
            raise ApiError(504, "the instances did not answer in time", code="timeout")
        if failures:
            raise ApiError(502, "the instances failed", code="upstream_failed")
        raise ApiError(503, "the instances take no requests", retry_after_s=1)

    async def _call(
        self, instance: Instance, path: str, body: bytes, head: ClientHead, timeout_s: float
    ) -> Answer:
        """What `instance` answers: CallFailed where another may do better, EngineRefused for 4xx.
        Its head is due in `timeout_s`, and then all of it."""
        lines = (
            f"POST {path} HTTP/1.1\r\nHost: {instance.key.http}\r\n"
            f"Content-Type: application/json\r\n{head.forwarded}Content-Length: {len(body)}\r\n\r\n"
        ).encode("latin-1")
        exchange = await self._upstream.start(
            instance.http, lines, body, instance=instance.key, timeout_s=timeout_s
        )
        try:
            exchange.end_within(timeout_s)
            answer = exchange.answer if exchange.is_whole else await exchange.read()
        finally:
            self._upstream.end(exchange)
        if answer.status < 300:
            return answer
        if answer.status in TAKES_NO_MORE:
            raise CallFailed("refused")
        if not 400 <= answer.status < 500:
            raise CallFailed("status")
        addresses = [str(one).encode() for one in (instance.http, instance.kv)]
        raise EngineRefused(answer._replace(body=scrub(answer.body, addresses, b"engine")))


def _model_in(body: bytes) -> str | None:
    """The model that `body` names. ApiError 400."""
    check_text(body)
    return read(_Named, body).model


def _candidates(snapshot: Snapshot, model: str | None) -> tuple[Instance, ...]:
    """The instances that may be asked, at least one. Raises ApiError: 400 where several models are
    served and none is named, 404 for an unknown one, 503 where no instance is ready."""
    if model is not None:
        found = snapshot.of_model(model).everyone
    else:
        serving = (snapshot.any_model, *snapshot.by_model.values())
        found = tuple({one.key: one for each in serving for one in each.everyone}.values())
        if len({one.beat.models for one in found}) > 1:
            raise refuse("model", "this router serves several models: name one of them")
    if found:
        return found
    if model is not None and not snapshot.is_empty and not snapshot.knows(model):
        raise unknown_model(model, snapshot.known_models)
    raise ApiError(503, "no instance is ready for this model", code="no_instances", retry_after_s=3)


async def _until_left(work: Coroutine[None, None, Answer], receive: Receive) -> Answer:
    """What `work` gives; ClientLeft, with `work` cancelled, where the client leaves first."""
    task, watch = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""A router process with engines that take and refuse what ours do: the engine's own parser checks
their bodies. For those who judge the router's surface from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import zmq
import zmq.asyncio
from aiohttp import web

from tests.e2e.harness import Fleet, empty_fleet, wait_for
from tests.router.fakes import Call, HttpEngine, now_us, replace_beat, serve_model
from xpyd_core.errors import ApiError
from xpyd_core.keys import beat_mac, read_keys
from xpyd_core.messages import Heartbeat, encode_heartbeat
from xpyd_worker.server.openai.params import parse_chat, parse_completion
from xpyd_worker.server.openai.prompts import parse_detokenize, parse_tokenize

MODEL = "demo"
SPARE = "spare"
CONTEXT_TOKENS = 64
ADMIN_KEY = "the-key-of-the-admin-in-tests"


async def strict(engine: HttpEngine, call: Call, request: web.Request) -> web.StreamResponse:
    """The contract's engine behind our engine's checks, with a short context."""
    try:
        if (said := _text_answer(call)) is not None:
            return web.json_response(said)
        is_chat = call.path.endswith("chat/completions")
        options = (parse_chat if is_chat else parse_completion)(orjson.dumps(call.body)).options
        # P is asked for one token, and told what D will be asked for.
        params = call.body.get("kv_transfer_params") or {}
        if max(options.max_tokens or 0, params.get("client_max_tokens") or 0) > CONTEXT_TOKENS:
            raise ApiError(400, "too long", param="max_tokens", code="context_length_exceeded")
    except ApiError as error:
        return web.json_response(orjson.loads(error.body()), status=error.status)
    return await serve_model(engine, call, request)


def _text_answer(call: Call) -> dict[str, Any] | None:
    """What a call that is no inference gets, behind our engine's checks; None for the others."""
    if call.path == "/tokenize":
        parse_tokenize(call.raw)
        return {"count": 2, "max_model_len": CONTEXT_TOKENS, "tokens": [5, 6], "token_strs": None}
    if call.path == "/detokenize":
        parse_detokenize(call.raw)
        return {"prompt": "San Francisco"}
    return None


class Engines:
    """Engines by name, and a thread that runs them until `stop`: all of one model, but for SPARE,
    which serves no other's requests and may be cordoned.
    """

    def __init__(self, discovery: str, key: bytes, names: Sequence[str]) -> None:
        self._discovery = discovery
        self._key = key
        self._names = names
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(20)
        self._loop.close()

    async def _run(self) -> None:
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://{self._discovery}")
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(context.destroy, 0)
            engines = [await self._engine(n, name) for n, name in enumerate(self._names, 1)]
            for engine in engines:
                stack.push_async_callback(engine.stop)
            while not self._stopping.is_set():
                for engine in engines:
                    frame = encode_heartbeat(replace_beat(engine.beat, {"sent_us": now_us()}))
                    await dealer.send_multipart([frame, beat_mac(self._key, frame)])
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), 0.5)

    @staticmethod
    async def _engine(number: int, name: str) -> HttpEngine:
        kind = "D" if name.startswith("d") else "P"
        group = "other" if name == SPARE else MODEL
        engine = HttpEngine(Heartbeat(type=kind, http_address="x:1", zmq_address="x:1"), 0, strict)
        await engine.start()
        engine.beat = Heartbeat(
            type=kind,
            http_address=f"127.0.0.1:{engine.port}",
            zmq_address=f"127.0.0.1:{20000 + number}",
            instance=name,
            incarnation="1",
            continuation=1,
            compatibility=group,
            models=(group,),
            period_ms=10_000,
        )
        return engine


@contextlib.contextmanager
def fleet_with(folder: Path, *names: str) -> Iterator[Fleet]:
    """A router process with an admin key, and engines of these names in a thread."""
    with empty_fleet(folder) as fleet:
        keys = folder / "admin-keys"
        keys.write_text(ADMIN_KEY)
        keys.chmod(0o600)
        router = fleet.start_router("--admin-key-file", str(keys))
        engines = Engines(f"{router.ip}:30001", read_keys(fleet.key_file)[0], names)
        engines.start()
        try:
            wait_for("the engines", lambda: set(fleet.states().items()) >= _ready(names))
            yield fleet
        finally:
            engines.stop()


def _ready(names: Sequence[str]) -> set[tuple[str, str]]:
    return {(name, "Ready") for name in names}

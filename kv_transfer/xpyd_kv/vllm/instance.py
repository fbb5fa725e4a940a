"""A vLLM in its fleet: heartbeats to the routers, and what the side API answers.

It lives in the process of vLLM's API server (`api_server.XpydPlugin`); what only the engine's
process knows comes by `link`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol

import msgspec

from xpyd_core.errors import UserError
from xpyd_core.heartbeat import HeartbeatSender
from xpyd_core.messages import MAX_MODELS, Heartbeat, InstanceState
from xpyd_core.pod_env import PodEnv, parse_discovery
from xpyd_core.request_id import Address, TlsAddress
from xpyd_core.tokenizer_files import ServedFiles, TokenizerFiles
from xpyd_kv.vllm import engine_api, link
from xpyd_kv.vllm.engine_api import VllmConfig
from xpyd_kv.vllm.options import (
    CONNECTOR,
    Options,
    engine_name,
    incarnation_of,
    read_options,
    role_of,
)
from xpyd_kv.vllm.scheduler import PROBE_S

_log = logging.getLogger(__name__)
_ROLES: Mapping[Literal["P", "D"], str] = {"P": "Prefill", "D": "Decode"}
_ANYWHERE = (None, "", "0.0.0.0", "::")
# A heartbeat says a state that is a second old at most; an engine answers between two steps.
_LOOK_S = 1.0
_ASK_S = 2.0
# An answer's head waits for it.
_OUTCOME_S = 0.5
# The connector's half is there before vLLM's server: only one that is stuck needs so long.
_START_S = 30.0
# No step takes so long, and between steps the engine's threads have their turns.
_SILENT_S = 30.0
# The engine's process takes 16 calls at once, the beats' among them.
_RELEASES = 8
# As long as a router waits for the answer.
_RELEASE_S = 2.0


class EngineClient(Protocol):
    """vLLM's client of its engine, as far as it is used."""

    vllm_config: VllmConfig

    @property
    def errored(self) -> bool: ...

    def get_num_unfinished_requests(self) -> int: ...

    def get_tokenizer(self) -> Any: ...  # noqa: ANN401 - a class of transformers


class Instance:
    """This vLLM in its fleet. The loop's thread."""

    def __init__(self, client: EngineClient, args: Namespace, pod: PodEnv) -> None:
        """UserError names the option that is wrong."""
        config = client.vllm_config
        if getattr(config.kv_transfer_config, "kv_connector", None) != CONNECTOR:
            raise UserError(f"VLLM_PLUGINS names xpyd: kv_connector must be {CONNECTOR}")
        self._client, self._config, self._args = client, config, args
        self._options: Options = read_options(config)
        self.keys = self._options.keys
        self.incarnation = incarnation_of(config)
        self._letter: Literal["P", "D"] = role_of(config)
        self.role = _ROLES[self._letter]
        self._http = _http_address(args, self._options)
        self._models = _models(config, args)
        self._pod = pod
        self._routers = parse_discovery(self._options.discovery) or pod.discovery
        self._state: InstanceState = "Starting"
        self._engine: link.EngineState | None = None
        self._heard_s = time.monotonic()
        self._drain_end_s: float | None = None
        self._files: asyncio.Task[ServedFiles | None] | None = None
        self._beats: HeartbeatSender | None = None
        self._handlers: dict[int, Callable[[], object]] = {}
        """vLLM's own, by signal: what the first signal does when no router sends more."""
        self._parting: asyncio.Task[None] | None = None
        self._was_signalled = False
        self._gone: set[asyncio.Task[None]] = set()
        self._curious: dict[str, asyncio.Future[str]] = {}
        """Answers that wait for the word of their KV, by uuid."""
        self._asking: asyncio.Task[None] | None = None
        self._releases = asyncio.Semaphore(_RELEASES)
        self._takes_ids = _takes_ids(config)

    # --- its life

    async def find_engine(self) -> None:
        """Wait until the connector in the engine's process answers. UserError where it does not."""
        deadline = time.monotonic() + _START_S
        while not await self._ask_state():
            if time.monotonic() > deadline:
                raise UserError(f"{CONNECTOR} in the engine's process does not answer")
            await asyncio.sleep(_LOOK_S / 10)

    async def run(self) -> None:
        """Beat until the server ends and cancels this."""
        self._beats = HeartbeatSender(
            self._routers,
            identity=f"{self._kv}/{self.incarnation}",
            source_host=self._options.host,
            period_s=self._options.heartbeat_period_s,
            make=self._beat,
            keys=self.keys,
            on_gone=self._on_gone,
        )
        try:
            self._beats.start()
            while not await self._is_healthy():  # noqa: ASYNC110 - another program's state
                await asyncio.sleep(_LOOK_S / 10)
            _log.info("serving on http://%s, routers: %s", self._http, self._routers or "none")
            while True:
                await self._look()
                await asyncio.sleep(_LOOK_S)
        finally:
            if self._parting is not None:
                self._parting.cancel()
            self._become("Gone")
            await self._beats.close()

    async def _look(self) -> None:
        """How the engine is now. What does not answer takes no requests."""
        answers = await self._ask_state() or time.monotonic() < self._heard_s + _SILENT_S
        if self._client.errored:
            self._become("Gone")
        elif self._drain_end_s is not None:
            self._become("Draining")
        else:
            self._become("Ready" if answers else "Starting")

    async def _ask_state(self) -> bool:
        try:
            answer = await self._ask("state", within_s=_ASK_S)
            self._engine = msgspec.convert(answer, link.EngineState)
        except (OSError, msgspec.ValidationError) as error:
            _log.debug("the engine did not say its state: %s", error)
            return False
        self._heard_s = time.monotonic()
        return True

    async def _ask(self, name: str, text: str = "", *, within_s: float = _ASK_S) -> Any:  # noqa: ANN401 - JSON
        call = partial(link.ask, self.incarnation, name, text, within_s=within_s)
        return await asyncio.to_thread(call)

    def _become(self, state: InstanceState) -> None:
        if state != self._state:
            self._state = state
            _log.info("this instance is %s", state)
            if self._beats is not None:
                self._beats.beat_now()

    async def _is_healthy(self) -> bool:
        """Whether GET /health of this server answers with 200."""
        try:
            async with asyncio.timeout(_ASK_S):
                reader, writer = await asyncio.open_connection(*self._http)
                try:
                    writer.write(f"GET /health HTTP/1.0\r\nHost: {self._http}\r\n\r\n".encode())
                    line = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False
        return line.split(b" ")[1:2] == [b"200"]

    # --- the end

    def hold_signals(self) -> None:
        """From now on vLLM's handlers of SIGTERM and SIGINT, which turn requests away at once, are
        called when no router sends more: the first signal begins the drain, a second one ends the
        wait. Before vLLM's launcher sets its handlers."""
        loop = asyncio.get_running_loop()
        add = loop.add_signal_handler

        def hold(number: int, callback: Callable[..., object], *args: object) -> None:
            if number not in (signal.SIGTERM, signal.SIGINT):
                add(number, callback, *args)
                return
            self._handlers[number] = partial(callback, *args)
            add(number, self._on_signal, number)

        # An event loop has no other way to say what its handlers are.
        loop.add_signal_handler = hold  # type: ignore[method-assign]

    def _on_signal(self, number: int) -> None:
        if self._was_signalled and self._parting is not None and not self._parting.done():
            self._parting.cancel()
            self._handlers[number]()
        self._was_signalled = True
        self._begin_drain(self._handlers[number])

    def _begin_drain(self, end: Callable[[], object]) -> None:
        """Have routers let go of this instance, then call `end`; asked again, go on."""
        if self._drain_end_s is None:
            self._drain_end_s = time.monotonic() + self._config.shutdown_timeout
            self._become("Draining")
            self._parting = asyncio.get_running_loop().create_task(self._part(end))

    async def _part(self, end: Callable[[], object]) -> None:
        """vLLM has its --shutdown-timeout for what is left behind this: where that is 0, requests
        are to be cut at once."""
        assert self._beats is not None
        left = await self._beats.part(float(self._config.shutdown_timeout))
        _log.info("routers have %d requests here", left.in_flight)
        await self._refuse_offers()
        end()

    async def _refuse_offers(self) -> None:
        try:
            await self._ask("drain")
        except OSError as error:
            _log.warning("the engine does not hear that it drains: %s", error)

    def _on_gone(self, address: Address) -> None:
        task = asyncio.get_running_loop().create_task(self._say_gone(address))
        self._gone.add(task)
        task.add_done_callback(self._gone.discard)

    async def _say_gone(self, address: Address) -> None:
        try:
            await self._ask("gone", str(address))
        except OSError as error:
            _log.warning("the engine does not hear that %s is gone: %s", address, error)

    # --- what the routes answer

    def live(self) -> dict[str, Any]:
        """The answer to GET /live; `failed` where vLLM's engine has ended."""
        status = "failed" if self._client.errored else self._state
        return {"status": status, "incarnation": self.incarnation}

    async def files(self) -> ServedFiles | None:
        """The tokenizer as routers take it; None for one that is not in the form of one file."""
        if self._files is None:
            self._files = asyncio.create_task(asyncio.to_thread(self._make_files))
        return await asyncio.shield(self._files)

    def drain(self) -> dict[str, Any]:
        """Begin what SIGTERM begins, or go on; what is left."""
        by_signal = partial(os.kill, os.getpid(), signal.SIGTERM)
        self._begin_drain(self._handlers.get(signal.SIGTERM, by_signal))
        assert self._drain_end_s is not None, "set by _begin_drain"
        left_s = max(0.0, self._drain_end_s - time.monotonic())
        running, waiting = self._load()
        engine = self._engine
        return {
            "state": self._state,
            "incarnation": self.incarnation,
            "running": running,
            "waiting": waiting,
            "requests": running + waiting,
            "idle": running + waiting == 0 and engine is not None and engine.is_idle,
            "seconds_left": round(left_s, 1),
        }

    async def release(self, uuid: str) -> None:
        """Free the KV of a request that does not come. OSError where the engine does not answer. Of
        a burst each waits its turn."""
        async with asyncio.timeout(_RELEASE_S), self._releases:
            await self._ask("release", uuid)

    async def kv_word(self, uuid: str) -> str:
        """What became of the KV of a D's request that has its first token, as the value of the
        router's header; '' where the engine does not know. Each is told once."""
        loop = asyncio.get_running_loop()
        future = self._curious.setdefault(uuid, loop.create_future())
        if self._asking is None:
            self._asking = loop.create_task(self._ask_words())
        return await asyncio.shield(future)

    async def _ask_words(self) -> None:
        """One call at a time, for all that wait: the engine's process takes few at once."""
        try:
            while self._curious:
                waiting, self._curious = self._curious, {}
                found: dict[str, str] = {}
                try:
                    answer = await self._ask("outcomes", ",".join(waiting), within_s=_OUTCOME_S)
                    found = msgspec.convert(answer, dict[str, str])
                except (OSError, msgspec.ValidationError) as error:
                    _log.debug("the engine did not say what became of KV: %s", error)
                finally:  # also where this process ends: no answer waits for a word for ever
                    for uuid, future in waiting.items():
                        future.set_result(found.get(uuid, ""))
        finally:
            self._asking = None

    async def probe(self, address: str) -> dict[str, Any]:
        """Send KV to the D at `address`; what came of it. OSError as for `release`."""
        return await self._ask("probe", address, within_s=PROBE_S + _ASK_S)

    # --- inside

    @property
    def _kv(self) -> Address:
        return Address(self._options.host, self._config.kv_transfer_config.kv_port)

    def _load(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        is_open = self._client.get_num_unfinished_requests()
        running = min(is_open, self._engine.running if self._engine is not None else 0)
        return running, is_open - running

    def _beat(self) -> Heartbeat:
        options, config, pod, engine = self._options, self._config, self._pod, self._engine
        assert engine is not None, "find_engine has waited for it"
        running, waiting = self._load()
        return Heartbeat(
            type=self._letter,
            http_address=str(self._http),
            tls=1 if isinstance(self._http, TlsAddress) else 0,
            zmq_address=str(self._kv),
            version=1,
            instance=options.instance or pod.instance or str(self._http),
            incarnation=self.incarnation,
            fleet=options.fleet or pod.fleet,
            pool=options.pool or pod.pool,
            revision=options.revision or pod.revision,
            fleet_revision=pod.fleet_revision,
            compatibility=engine.compatibility,
            models=self._models,
            max_model_len=config.model_config.max_model_len,
            state=self._state,
            period_ms=round(options.heartbeat_period_s * 1000),
            tensor=config.parallel_config.tensor_parallel_size,
            pipeline=config.parallel_config.pipeline_parallel_size,
            running=running,
            waiting=waiting,
            free_blocks=engine.free_blocks,
            total_blocks=engine.total_blocks,
            block_tokens=config.cache_config.block_size,
            kv_peers=engine.kv_peers,
            kv_leases=engine.kv_leases,
            dialect="pair-id",
            prompt_ids=1 if self._takes_ids else 0,
            engine=engine_name(),
        )

    def _make_files(self) -> ServedFiles | None:
        """Slow for a large vocabulary."""
        tokenizer = self._client.get_tokenizer()
        rust: Any = getattr(tokenizer, "backend_tokenizer", None)
        if rust is None:
            return None
        document: dict[str, Any] = json.loads(rust.to_str())
        # vLLM cuts and pads by them, for each request as it asks.
        document |= {"truncation": None, "padding": None}
        given = getattr(self._args, "chat_template", None)
        template = engine_api.load_chat_template(given) if given else tokenizer.chat_template
        named = {"default": template} if isinstance(template, str) else dict(template or {})
        return ServedFiles.of(
            TokenizerFiles(
                tokenizer=json.dumps(document, ensure_ascii=False),
                chat_templates=named,
                special_tokens=dict(tokenizer.special_tokens_map),
                # Templates get messages as they come.
                knows_developer=True,
                vocab_size=self._config.model_config.get_vocab_size(),
                max_model_len=self._config.model_config.max_model_len,
                block_size=self._config.cache_config.block_size,
                prefix_caching=bool(self._config.cache_config.enable_prefix_caching),
            )
        )


def _takes_ids(config: VllmConfig) -> bool:
    """Whether routers may give this vLLM tokens of an answer as its prompt. Not where it adds to
    requests what counts from the prompt's end, or looks at the output: see `_is_plain` of the
    router's dialects for what clients may ask. Penalties of repetition look at the prompt, too."""
    model = config.model_config
    added = model.get_diff_sampling_param()
    counts = any(map(added.get, ("max_tokens", "presence_penalty", "frequency_penalty")))
    return not (counts or model.logits_processors or config.watermark_config)


def _models(config: VllmConfig, args: Namespace) -> tuple[str, ...]:
    """The names that requests may ask for, LoRA adapters' among them. UserError where heartbeats
    have no room for them."""
    names = config.model_config.served_model_name
    adapters = getattr(args, "lora_modules", None) or ()
    served = (names,) if isinstance(names, str) else names
    found = tuple(dict.fromkeys((*served, *(adapter.name for adapter in adapters))))
    if len(found) > MAX_MODELS:
        raise UserError(
            f"VLLM_PLUGINS names xpyd: --served-model-name and --lora-modules have {len(found)} "
            f"names; heartbeats have room for {MAX_MODELS}"
        )
    return found


def _http_address(args: Namespace, options: Options) -> Address:
    """Where routers reach vLLM's HTTP server. UserError where they would not."""
    refusals: list[str] = []
    if args.host not in (*_ANYWHERE, options.host):
        refusals.append(f"--host {args.host} is not the host {options.host} of {CONNECTOR}")
    if getattr(args, "uds", None):
        refusals.append("--uds: routers connect by TCP")
    if getattr(args, "root_path", None):
        refusals.append("--root-path: routers know none")
    if (getattr(args, "api_server_count", None) or 1) > 1:
        refusals.append("--api-server-count must be 1")
    if getattr(args, "headless", False):
        refusals.append("--headless: there is no API server to beat")
    if refusals:
        raise UserError(f"VLLM_PLUGINS names xpyd: {'; '.join(refusals)}")
    is_tls = getattr(args, "ssl_certfile", None) or getattr(args, "ssl_keyfile", None)
    return (TlsAddress if is_tls else Address)(options.host, args.port)

"""A byte tokenizer, a scripted engine and a real HTTP server around them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import httpx

from tests.worker.grammar_kit import tokenizer_json
from xpyd_core.errors import UserError
from xpyd_core.heartbeat import Parting
from xpyd_core.request_id import TransferKey
from xpyd_kv.values import OfferedPrompt
from xpyd_tools.kv_probe import command
from xpyd_worker.engine.request import (
    ChoiceOutput,
    EngineOutput,
    EngineRequest,
    EngineStats,
    ErrorKind,
    SampledToken,
    TokenLogprob,
    TransferReport,
)
from xpyd_worker.grammar.compiler import GrammarCompiler
from xpyd_worker.model.generation import OPENAI_DEFAULTS, SamplingDefaults
from xpyd_worker.parsers.registry import NO_PARSERS, Parsers
from xpyd_worker.server.bridge import EngineBridge
from xpyd_worker.server.http.admin import Admin, DrainState, Process
from xpyd_worker.server.http.admission import Lifecycle
from xpyd_worker.server.http.bodies import BodyBudget
from xpyd_worker.server.http.inference import Api
from xpyd_worker.server.http.scaling import Part, Scalable, Scaling
from xpyd_worker.server.http.server import Server, create_app, listen, make_server
from xpyd_worker.server.service import InstanceInfo, KvPlace, ServedModel, Service, seeds
from xpyd_worker.server.telemetry.metrics import ServerMetrics

EOS = 256
BOS = 257
VOCAB = 258
# A prompt that the fake engine does not survive.
BUG = tuple(b"bug")
KEY = b"0123456789abcdef0123456789abcdef"


class ByteTokenizer:
    """Token i is byte i; 256 is EOS, 257 BOS, both special."""

    special_ids = frozenset({EOS, BOS})
    byte_ids: ClassVar[dict[int, int]] = {}
    has_chat_template = True
    vocab_size = VOCAB

    def to_json(self) -> str:
        pieces = [self.token_piece(i) if i > 255 else chr(i) for i in range(VOCAB)]
        return tokenizer_json(pieces, {pieces[i]: i for i in self.special_ids})

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def token_piece(self, token_id: int) -> str:
        return self.token_text(token_id)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<%d>" % token_id

    def apply_chat_template(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool,
        add_special_tokens: bool = False,
        continue_final_message: bool = False,
        tools: Any = (),
        documents: Any = (),
        variables: Any = MappingProxyType({}),
    ) -> list[int]:
        if messages[0]["role"] == "assistant":
            raise UserError("messages: must not begin with the assistant")
        text = "".join(
            f"{name}:{json.dumps(one)}\n"
            for name, one in (
                ("tools", tools),
                ("documents", documents),
                ("variables", dict(variables)),
            )
            if one
        )
        for message in messages:
            text += f"{message['role']}:{message['content']}"
            more = {k: v for k, v in message.items() if k not in ("role", "content", "name")}
            text += f"{json.dumps(more)}\n" if more else "\n"
        if continue_final_message:
            text = text.removesuffix("\n")
        elif "enable_thinking" in variables:
            text += "<think>\n" if variables["enable_thinking"] else "<think>\n\n</think>\n\n"
        return list(text.encode())


Script = Callable[[EngineRequest, int], Sequence[int]]


def say(text: str, *, eos: bool = True) -> Script:
    """Every choice says `text`, then ends."""
    return lambda _request, _choice: [*text.encode(), *([EOS] if eos else [])]


@dataclass
class ScriptedEngine:
    """Puts out scripted tokens, one per choice and step, on the loop. Follows the engine's rules
    for max_tokens, EOS, stop ids, continue_from and abort."""

    script: Script = field(default_factory=lambda: say("hello world"))
    deliver: Callable[[Sequence[EngineOutput]], None] = lambda _: None
    failure: BaseException | None = None
    step_s: float = 0.0
    silent: bool = False
    error: str = ""
    error_kind: ErrorKind = "internal"
    fail_after: int = 0
    report: TransferReport = field(default_factory=lambda: TransferReport("granted", "d-inc"))
    kv: str | dict[int, str] = ""
    """What became of the KV; by prompt where it differs."""
    offers: dict[TransferKey, OfferedPrompt] = field(default_factory=dict)
    requests: list[EngineRequest] = field(default_factory=list)
    aborted: list[tuple[str, tuple[int, ...] | None]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    living: dict[str, set[int]] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None: ...

    def stop(self, deadline_s: float) -> None: ...

    async def submitted(self, count: int) -> None:
        """Wait until so many requests have come."""
        while len(self.requests) < count:
            self.came.clear()
            await self.came.wait()

    def submit(self, request: EngineRequest) -> None:
        if request.prompt == BUG:
            raise ZeroDivisionError
        self.requests.append(request)
        self.came.set()
        self.living[request.request_id] = set(range(request.n))
        if not self.silent:
            task = asyncio.get_running_loop().create_task(self._run(request))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _run(self, request: EngineRequest) -> None:
        await asyncio.sleep(0)
        if self.error:
            self._fail(request)
            return
        position = [len(ids) for ids in request.continue_from] or [0] * request.n
        outputs = [
            list(request.continue_from[c] if request.continue_from else ())
            for c in range(request.n)
        ]
        first, started_s = True, time.monotonic()
        while self.living.get(request.request_id):
            choices: list[ChoiceOutput] = []
            for c in sorted(self.living[request.request_id]):
                ended = self._end(request, outputs[c]) if first else None
                token = None
                if ended is None:
                    script = self.script(request, request.first_choice + c)
                    token = script[position[c]] if position[c] < len(script) else EOS
                    position[c] += 1
                    outputs[c].append(token)
                    ended = self._end(request, outputs[c])
                stop_id = outputs[c][-1] if ended == "stop" else None
                tokens = (
                    () if token is None else (SampledToken(token, self._logprob(request, token)),)
                )
                choices.append(ChoiceOutput(c, tokens, ended, stop_id))
                if ended:
                    self.living[request.request_id].discard(c)
            finished = not self.living[request.request_id]
            scores = None
            if first and request.sampling.prompt_logprobs is not None:
                scores = (None, *(TokenLogprob(t, -1.0, ((t, -1.0),)) for t in request.prompt[1:]))
            if finished:
                del self.living[request.request_id]
            self.deliver(
                [
                    EngineOutput(
                        request.request_id,
                        tuple(choices),
                        finished,
                        prompt_logprobs=scores,
                        cached_tokens=16 if len(request.prompt) > 16 else 0,
                        transfer=self.report if finished and request.transfer else None,
                        kv=self.kv if isinstance(self.kv, str) else self.kv[request.first_choice],
                        started_s=started_s,
                    )
                ]
            )
            first = False
            if len(outputs[0]) == self.fail_after:
                self._fail(request)
            await asyncio.sleep(self.step_s)

    def _fail(self, request: EngineRequest) -> None:
        self.living.pop(request.request_id, None)
        ended = tuple(ChoiceOutput(c, (), "error") for c in range(request.n))
        last = EngineOutput(
            request.request_id,
            ended,
            True,
            kv=self.kv if isinstance(self.kv, str) else self.kv[request.first_choice],
            error=self.error or "x",
            error_kind=self.error_kind,
        )
        self.deliver([last])

    def _logprob(self, request: EngineRequest, token: int) -> TokenLogprob | None:
        top = request.sampling.logprobs
        if top is None:
            return None
        return TokenLogprob(token, -0.5, tuple((token + i, -0.5 - i) for i in range(top)))

    def _end(self, request: EngineRequest, ids: list[int]) -> str | None:
        sampling = request.sampling
        if not ids:
            return None
        if (ids[-1] == EOS and not sampling.ignore_eos) or ids[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(ids) >= sampling.max_tokens else None

    def abort(self, request_id: str, choices: tuple[int, ...] | None = None) -> None:
        self.aborted.append((request_id, choices))
        if choices is None:
            self.living.pop(request_id, None)
        elif request_id in self.living:
            self.living[request_id] -= set(choices)

    def kv_offered(self, key: TransferKey) -> OfferedPrompt | None:
        return self.offers.get(key)

    def kv_release(self, uuid: str) -> None:
        self.released.append(uuid)

    def reset_prefix_cache(self, done: Callable[[bool], None]) -> None:
        done(not self.living)

    def stats(self) -> EngineStats:
        return EngineStats(forwards=3, blocks_total=10, blocks_free=7, finished={"stop": 2})

    def is_idle(self) -> bool:
        return not self.living


@dataclass
class Running:
    """A server under test."""

    engine: ScriptedEngine
    api: Api
    url: str
    client: httpx.AsyncClient
    address: tuple[str, int]
    bridge: EngineBridge

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)


async def nobody_parts(timeout_s: float) -> Parting:
    """There are no routers."""
    return Parting()


@contextlib.asynccontextmanager
async def serving(
    engine: ScriptedEngine | None = None,
    *,
    role: Any = "Aggregated",
    max_model_len: int = 200,
    max_requests: int = 64,
    ready: bool = True,
    has_priorities: bool = False,
    seed: int | None = None,
    keys: tuple[bytes, ...] = (KEY,),
    tokenizer: ByteTokenizer | None = None,
    model: ServedModel | None = None,
    tracer: Any = None,
    bodies: BodyBudget | None = None,
    signed_by: tuple[bytes, ...] | None = None,
    defaults: SamplingDefaults = OPENAI_DEFAULTS,
    parsers: Parsers = NO_PARSERS,
    names: tuple[str, ...] = ("fake", "alias"),
    replicas: int = 1,
    kv_places: Sequence[KvPlace] = (),
    scalable: Scalable | None = None,
    part: Part = nobody_parts,
) -> AsyncIterator[Running]:
    """The API over `engine` on a loopback port."""
    engine = engine or ScriptedEngine()
    metrics = ServerMetrics()
    bridge = EngineBridge(metrics.requests)
    engine.deliver = bridge.deliver
    bridge.bind(engine)
    grammars = GrammarCompiler()
    metrics.watch(
        engine.stats,
        lambda _stats: (),
        model="fake",
        block_size=16,
        load_s=0.5,
        grammars=grammars.metrics,
    )
    lifecycle = Lifecycle()
    api = Api(lifecycle)
    api.tracer = tracer
    api.admission.bodies = bodies or api.admission.bodies

    def drain() -> DrainState:
        if lifecycle.state == "Ready":
            lifecycle.become("Draining")
        return DrainState(12.34, engine.is_idle())

    scaling = Scaling(api, max_num_seqs=4)
    if scalable is not None:
        scaling.bind(scalable, part)
    admin = Admin(api, metrics, Process(keys, "my-inc", drain, scaling))
    if ready:
        model = model or ServedModel(
            names,
            tokenizer or ByteTokenizer(),
            frozenset({EOS}),
            VOCAB,
            max_model_len,
            7,
            defaults=defaults,
            parsers=parsers,
        )
        api.service = Service(
            model,
            InstanceInfo(role, "my-inc", (KEY,), 1.5),
            bridge,
            max_requests,
            has_priorities=has_priorities,
            draw_seed=seeds(seed),
            malformed_calls=metrics.malformed_calls,
            grammars=grammars,
            replicas=replicas,
            kv_places=lambda: kv_places,
        )
        lifecycle.become("Ready")
    sockets = listen("127.0.0.1", 0)
    server: Server = make_server(create_app(api, admin, signed_by=signed_by))
    task = asyncio.create_task(server.serve(sockets=sockets))
    address = sockets[0].getsockname()
    url = f"http://127.0.0.1:{address[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as client:
            yield Running(engine, api, url, client, address, bridge)
    finally:
        server.should_exit = True
        await task
        if api.service is not None:
            api.service.threads.close()
            api.service.grammars.close()
        for left in list(engine.tasks):
            left.cancel()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what the kernel or another thread will make true."""
    while not holds():  # noqa: ASYNC110 - nobody tells this loop
        await asyncio.sleep(0.005)


def run(test: Any) -> None:
    """Run an async test body within 20 s."""

    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test

    asyncio.run(bounded())


def kv_probe(*flags: str) -> int:
    """The exit status of `xpyd kv-probe`."""
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(flags))

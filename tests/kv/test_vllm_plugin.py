"""The plugin in vLLM's API server: heartbeats and the side API, over real sockets.

The engine is the fake of vllm_engine; the web server is uvicorn with an application that has what
vLLM's has for plugins.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
import zmq
import zmq.asyncio
from pydantic import ValidationError
from tokenizers import Tokenizer

from tests.kv.test_vllm_connector import POOL, prefill, prompt, serve
from tests.kv.vllm_engine import FakeVllm, pair
from tests.kv.vllm_fakes import HOST, MODEL, FakeRequest, ids
from xpyd_core.errors import UserError
from xpyd_core.keys import call_mac, is_beat_mac, word_mac
from xpyd_core.messages import DrainAck, Heartbeat, decode_heartbeat, encode_word
from xpyd_core.tokenizer_files import decode_tokenizer_files
from xpyd_kv.vllm import instance, link
from xpyd_kv.vllm.api_server import XpydPlugin
from xpyd_kv.vllm.options import engine_name, incarnation_of
from xpyd_operator.document.engine import Engine

KEY = b"a secret of the whole fleet"
UUID = "0123456789abcdef" * 2
ADAPTERS = [SimpleNamespace(name=str(number)) for number in range(64)]


class App:
    """vLLM's application, as far as plugins see it."""

    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], Any] = {}
        self.is_healthy = True
        self.middleware: Any = None

    def add_middleware(self, middleware_class: Any, **options: Any) -> None:
        assert self.middleware is None
        self.middleware = middleware_class(self.answer, **options)

    def add_route(self, path: str, route: Any, methods: list[str]) -> None:
        self.routes |= {(path, method): route for method in methods}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await self.middleware(scope, receive, send)

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        route = self.routes.get((scope["path"], scope["method"]))
        if route is not None:
            return await route(scope, receive, send)
        status = 200 if scope["path"] == "/health" and self.is_healthy else 503
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body"})


class ApiServer:
    """The API server's process: its application, its client of the engine, its routers' port."""

    def __init__(self, engine: FakeVllm, port: int, routers: Any) -> None:
        self.app, self.plugin, self.port, self.routers = App(), XpydPlugin(), port, routers
        rust = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        rust.enable_truncation(7)
        tokenizer = SimpleNamespace(
            backend_tokenizer=rust,
            chat_template="{{ messages }}",
            special_tokens_map={"bos_token": "<s>"},
        )
        self.client = SimpleNamespace(
            vllm_config=engine.config,
            errored=False,
            get_num_unfinished_requests=lambda: len(engine.requests),
            get_tokenizer=lambda: tokenizer,
        )
        self.args = Namespace(host=HOST, port=port, chat_template=None)

    async def beat(self, state: str = "") -> Heartbeat:
        """The next heartbeat, or the next of this state."""
        while True:
            async with asyncio.timeout(20.0):
                self.sender, frame, mac = await self.routers.recv_multipart()
            assert is_beat_mac((KEY,), frame, mac)
            found = self.last = decode_heartbeat(frame)
            if not state or found.state == state:
                return found

    async def acknowledge(self, in_flight: int) -> None:
        """As a router that has taken the last beat, which says Draining."""
        last = self.last
        ack = DrainAck(incarnation=last.incarnation, sent_us=last.sent_us, in_flight=in_flight)
        frame = encode_word(ack)
        await self.routers.send_multipart([self.sender, frame, word_mac(KEY, frame)])

    async def call(
        self, path: str, body: Any = None, mac: str = "", etag: str = "", name: str = ""
    ) -> Any:
        """Status and document of one request."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.0\r\nX-Xpyd-Mac: {mac}\r\n"
        head += (
            f"If-None-Match: {etag}\r\nX-Request-Id: {name}\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        async with asyncio.timeout(20.0):
            answer = await reader.read()
        writer.close()
        top, _, rest = answer.partition(b"\r\n\r\n")
        return int(top.split()[1]), rest, top.decode()


@asynccontextmanager
async def api_server(engine: FakeVllm, **flags: Any) -> AsyncIterator[ApiServer]:
    """The plugin has beaten Starting; the server listens, `app.is_healthy` is the test's."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as routers:
        routers.setsockopt(zmq.LINGER, 0)
        port = routers.bind_to_random_port(f"tcp://{HOST}")
        engine.config.kv_transfer_config.kv_connector_extra_config["discovery"] = f"{HOST}:{port}"
        http = engine.port + 10
        server = ApiServer(engine, http, routers)
        vars(server.args).update(flags)
        server.plugin.attach_router(server.app)
        config = uvicorn.Config(server.app, host=HOST, port=http, log_config=None, lifespan="off")
        web = uvicorn.Server(config)
        # As vLLM's server has it: signals are its launcher's.
        web.capture_signals = nullcontext
        await server.plugin.init_state(server.client, None, server.args)
        serving = asyncio.create_task(web.serve())
        task = server.plugin._task
        assert task is not None
        try:
            yield server
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            if not server.client.errored:
                await server.beat("Gone")
            web.should_exit = True
            await serving


async def soon(happened: Callable[[], Any]) -> None:
    """Until another thread has done it."""
    async with asyncio.timeout(20.0):
        while not happened():  # noqa: ASYNC110 - a thread's state
            await asyncio.sleep(0.01)


@pytest.fixture
def signed(tmp_path: Path) -> dict[str, Any]:
    """Options of an engine whose fleet has a secret."""
    key = tmp_path / "kv.key"
    key.write_bytes(KEY + b"\n")
    return {"insecure": False, "key_file": str(key), "heartbeat_period_s": 0.2}


async def test_an_instance_is_ready_when_its_http_server_is_healthy(signed, monkeypatch):
    monkeypatch.setenv("XPYD_FLEET", "of-the-pod")
    more = {**signed, "fleet": "demo", "pool": "prefill", "instance": "demo-prefill-0"}
    adapter = SimpleNamespace(name="french", path="/models/french")
    with pair({"blocks": 64, **more}, signed) as (p, _):
        async with api_server(p, lora_modules=[adapter]) as server:
            server.app.is_healthy = False
            assert (await server.beat()).state == "Starting"
            server.app.is_healthy = True
            found = await server.beat("Ready")
    assert (found.type, found.http_address) == ("P", f"{HOST}:{p.port + 10}")
    assert (found.zmq_address, found.models) == (f"{HOST}:{p.port}", ("demo-model", "french"))
    assert (found.fleet, found.pool, found.instance) == ("demo", "prefill", "demo-prefill-0")
    assert found.incarnation == incarnation_of(p.config)
    assert (found.total_blocks, found.free_blocks, found.max_model_len) == (64, 63, 4096)
    assert found.block_tokens == 8
    assert len(found.compatibility) == 16
    assert (found.dialect, found.prompt_ids) == ("pair-id", 1)
    assert found.engine == engine_name()


@pytest.mark.parametrize(
    ("added", "takes_ids"),
    [
        ({"sampled": {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1}}, 1),
        ({"sampled": {"repetition_penalty": 1.1}}, 1),
        ({"sampled": {"max_tokens": 6}}, 0),
        ({"sampled": {"presence_penalty": 0.5}}, 0),
        ({"sampled": {"frequency_penalty": -0.5}}, 0),
        ({"processors": ["a.module:Processor"]}, 0),
        ({"watermark": {"key": 7}}, 0),
    ],
    ids=str,
)
async def test_a_vllm_that_counts_its_output_takes_no_token_of_it_as_prompt(
    added: dict[str, Any], takes_ids: int, signed
):
    with pair(signed, signed) as (_, d):
        model = d.config.model_config
        model.get_diff_sampling_param = lambda: added.get("sampled", {})
        model.logits_processors = added.get("processors")
        d.config.watermark_config = added.get("watermark")
        async with api_server(d) as server:
            assert (await server.beat()).prompt_ids == takes_ids


async def test_both_of_a_pair_have_one_compatibility_key(signed):
    with pair(signed, signed) as (p, d):
        async with api_server(p) as of_p, api_server(d) as of_d:
            first, second = await of_p.beat("Ready"), await of_d.beat("Ready")
    assert first.compatibility == second.compatibility
    assert (first.type, second.type) == ("P", "D")


async def test_beats_say_what_runs_waits_and_moved(signed):
    with pair(signed, {**signed, **POOL}) as (p, d):
        async with api_server(d) as server:
            serve(p, d, prompt(40))
            while not (peers := (await server.beat()).kv_peers):
                assert d.scheduler._half.connector.metrics.peers.latest()
            assert [(peer.peer, peer.moved) for peer in peers] == [(f"{HOST}:{p.port}", 1)]
            _, second = prefill(p, d, prompt(30, 1))
            d.add(second)
            d.step()
            while (await server.beat()).waiting != 1:
                assert d.requests
            d.run(p, until=lambda: second.answer is not None)
            while (await server.beat()).waiting:
                assert not d.requests


async def test_sigterm_is_vllm_s_when_no_router_sends_more(signed):
    heard, loop = asyncio.Event(), asyncio.get_running_loop()
    with pair(signed, {**signed, "wait_s": 0.3}) as (_, d):
        async with api_server(d) as server:
            loop.add_signal_handler(signal.SIGTERM, heard.set)  # as vLLM's launcher
            await server.beat("Ready")
            os.kill(os.getpid(), signal.SIGTERM)
            session = d.scheduler._half.connector.consumer.session
            for in_flight in (1, 0):
                await server.beat("Draining")
                assert not heard.is_set()
                assert not session._draining, "what P offers meanwhile is taken"
                await server.acknowledge(in_flight)
            async with asyncio.timeout(5.0):
                await heard.wait()
            status, body, _ = await server.call("/live")
            assert (status, json.loads(body)["status"]) == (200, "Draining")
            await soon(lambda: session._draining)


async def test_drain_needs_the_mac_of_this_process_and_ends_it(signed):
    heard, loop = asyncio.Event(), asyncio.get_running_loop()
    with pair(signed, signed) as (p, _):
        async with api_server(p) as server:
            loop.add_signal_handler(signal.SIGTERM, heard.set)
            await server.beat("Ready")
            mine = {"incarnation": incarnation_of(p.config)}
            assert (await server.call("/drain", mine))[0] == 403
            other = call_mac(KEY, "drain", "other")
            assert (await server.call("/drain", {"incarnation": "other"}, other))[0] == 409
            assert not heard.is_set()
            mac = call_mac(KEY, "drain", mine["incarnation"])
            status, body, _ = await server.call("/drain", mine, mac)
            said = json.loads(body)
            assert (status, said["state"], said["requests"]) == (202, "Draining", 0)
            assert 0 < said["seconds_left"] <= 30.0
            await server.beat("Draining")
            await server.acknowledge(0)
            async with asyncio.timeout(5.0):
                await heard.wait()


async def test_released_kv_is_given_back(signed):
    of_d = {**signed, **POOL, "wait_s": 0.3}
    with pair(signed, of_d) as (p, d):
        async with api_server(d) as server:
            await server.beat("Ready")
            _, second = prefill(p, d, prompt(60))
            p.run(d, until=lambda: not p.has_requests())
            store = d.scheduler._half.connector.store
            assert store.metrics().leases
            uuid = second.request_id.split("_")[-1][:32]
            mac = call_mac(KEY, "kv-release", uuid)
            assert (await server.call("/kv/release", {"uuid": uuid}))[0] == 403
            assert (await server.call("/kv/release", {"uuid": "x"}, mac))[0] == 400
            status, body, _ = await server.call("/kv/release", {"uuid": uuid}, mac)
            assert (status, json.loads(body)) == (200, {"released": uuid})
            await soon(lambda: not store.metrics().leases)


async def test_a_burst_of_releases_waits_its_turn(signed, monkeypatch):
    monkeypatch.setattr(instance, "_RELEASE_S", 30.0)
    with pair(signed, signed) as (_, d):
        async with api_server(d) as server:
            await server.beat("Ready")
            # As on a machine with many cores: the engine's process takes 16 calls at once.
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(40))
            uuids = [f"{number:032x}" for number in range(64)]
            macs = [call_mac(KEY, "kv-release", uuid) for uuid in uuids]
            calls = zip(uuids, macs, strict=True)
            answers = await asyncio.gather(
                *(server.call("/kv/release", {"uuid": uuid}, mac) for uuid, mac in calls)
            )
            assert [status for status, _, _ in answers] == [200] * 64


@asynccontextmanager
async def streaming(server: ApiServer, request: Any, run: Callable[[], None]) -> AsyncIterator[Any]:
    """A route of the server that answers with this request's token, as vLLM streams it: the head
    comes first, then the engine runs."""

    async def route(scope: Any, receive: Any, send: Any) -> None:
        lines = [(b"x-a", b"1"), (b"content-length", b"6")]
        await send({"type": "http.response.start", "status": 200, "headers": lines})
        await asyncio.to_thread(run)
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})

    server.app.routes["/v1/completions", "POST"] = route
    pair_id = request.request_id.removeprefix("cmpl-").rsplit("-", 2)[0]
    yield lambda name=pair_id: server.call("/v1/completions", {}, name=name)


def word_in(head: str) -> str:
    lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:])
    assert lines["x-a"] == "1"
    return lines.get("x-xpyd-kv", "")


async def test_an_answer_of_d_says_what_became_of_the_kv_once(signed):
    with pair(signed, {**signed, **POOL}) as (p, d):
        async with api_server(d) as server:
            await server.beat("Ready")
            _, request = prefill(p, d, prompt(40))
            d.add(request)
            run = partial(d.run, p, until=lambda: request.answer is not None)
            async with streaming(server, request, run) as ask:
                status, body, head = await ask()
                assert (status, body, word_in(head)) == (200, b"onetwo", "moved")
                assert word_in((await ask())[2]) == "", "the id of a request that is over"
                assert word_in((await ask("no-pair"))[2]) == ""


async def test_an_answer_of_d_says_why_kv_did_not_come(signed):
    with pair(signed, {**signed, "wait_s": 0.1}) as (p, d):
        async with api_server(d) as server:
            await server.beat("Ready")
            request = d.add(FakeRequest(ids(p, d)[1], prompt(40)))
            run = partial(d.run, p, until=lambda: request.answer is not None)
            async with streaming(server, request, run) as ask:
                _, _, head = await ask()
                assert word_in(head) == "recomputed; reason=no_offer"


async def test_an_engine_that_does_not_answer_holds_no_answer_up(signed, monkeypatch):
    monkeypatch.setattr(instance, "_OUTCOME_S", 0.05)
    with pair(signed, {**signed, **POOL}) as (p, d):
        async with api_server(d) as server:
            await server.beat("Ready")
            request = serve(p, d, prompt(40))
            d.scheduler._half._link.close()
            async with streaming(server, request, lambda: None) as ask:
                status, body, head = await ask()
                assert (status, body, word_in(head)) == (200, b"onetwo", "")


async def test_many_answers_at_once_ask_the_engine_together(signed):
    with pair(signed, {**signed, **POOL}) as (p, d):
        async with api_server(d) as server:
            await server.beat("Ready")
            # As on a machine with many cores: the engine's process takes 16 calls at once.
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(40))
            names = []
            for number in range(40):
                request = serve(p, d, prompt(20, number))
                names.append(request.request_id.removeprefix("cmpl-").rsplit("-", 2)[0])
            async with streaming(server, request, lambda: None) as ask:
                answers = await asyncio.gather(*map(ask, names))
            assert {word_in(head) for _, _, head in answers} == {"moved"}


async def test_a_p_probes_the_way_to_a_d_and_a_d_does_not(signed):
    with pair(signed, signed) as (p, d):
        async with api_server(p) as of_p, api_server(d) as of_d:
            await of_p.beat("Ready")
            await of_d.beat("Ready")
            body = {"address": f"{HOST}:{d.port}"}
            mac = call_mac(KEY, "kv-probe", body["address"])
            assert (await of_p.call("/kv/probe", body))[0] == 403
            assert (await of_d.call("/kv/probe", body, mac))[0] == 409
            status, answer, _ = await of_p.call("/kv/probe", body, mac)
            found = json.loads(answer)
            assert (status, found["ok"], found["digest_matches"]) == (200, True, True)
            assert found["bytes"] > 0


async def test_the_tokenizer_goes_to_routers_as_the_engine_has_it(signed):
    with pair(signed, signed) as (p, _):
        async with api_server(p) as server:
            await server.beat("Ready")
            status, body, head = await server.call("/tokenizer")
            files = decode_tokenizer_files(body)
            rust = Tokenizer.from_str(files.tokenizer)
            text = "a text of more than seven tokens, as the engine's own requests cut it"
            whole = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text).ids
            assert rust.encode(text).ids == whole
            assert (status, files.block_size, files.vocab_size) == (200, 8, 4096)
            assert files.chat_templates == {"default": "{{ messages }}"}
            etag = next(line for line in head.splitlines() if line.startswith("etag"))
            assert (await server.call("/tokenizer", etag=etag.split(": ")[1]))[0] == 304


async def test_an_engine_that_has_ended_or_is_silent_takes_no_requests(signed, monkeypatch):
    with pair(signed, signed) as (p, _):
        async with api_server(p) as server:
            await server.beat("Ready")
            monkeypatch.setattr(instance, "_SILENT_S", 0.0)
            p.scheduler._half._link.close()
            await server.beat("Starting")
            server.client.errored = True
            await server.beat("Gone")
            status, body, _ = await server.call("/live")
            assert (status, json.loads(body)["status"]) == (503, "failed")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda server: setattr(server.args, "host", "127.9.9.9"), "--host"),
        (lambda server: setattr(server.args, "uds", "/tmp/x"), "--uds"),
        (lambda server: setattr(server.args, "root_path", "/v"), "--root-path"),
        (lambda server: setattr(server.args, "api_server_count", 2), "--api-server-count"),
        (
            lambda server: setattr(
                server.client.vllm_config.kv_transfer_config, "kv_connector", "NixlConnector"
            ),
            "kv_connector",
        ),
        (lambda server: setattr(server.args, "lora_modules", ADAPTERS), "65 names"),
        (lambda server: setattr(server, "client", None), "render"),
    ],
)
async def test_settings_with_which_no_router_finds_the_instance_are_refused(change, reason, signed):
    with pair(signed, signed) as (p, _):
        server = ApiServer(p, 24090, None)
        change(server)
        with pytest.raises(UserError, match=reason):
            await server.plugin.init_state(server.client, None, server.args)
    if reason.startswith("--"):  # a fleet's document has no such flag, so no pod comes that far
        with pytest.raises(ValidationError, match=f"leave out .*{reason}"):
            Engine(type="VLLM", connector="Xpyd", image="v", args=(reason, "x"))


async def test_an_engine_that_does_not_answer_at_start_is_an_error(signed, monkeypatch):
    monkeypatch.setattr(instance, "_START_S", 0.1)
    with pair(signed, signed) as (p, _):
        server = ApiServer(p, 24090, None)
        p.scheduler._half._link.close()
        with pytest.raises(UserError, match="does not answer"):
            await server.plugin.init_state(server.client, None, server.args)


def test_two_engines_of_one_name_are_refused():
    first = link.LinkServer(UUID, {})
    try:
        with pytest.raises(UserError, match="another process"):
            link.LinkServer(UUID, {})
    finally:
        first.close()


def test_an_unknown_call_and_a_failed_one_have_no_answer():
    def fails(_: str) -> None:
        raise UserError("no")

    server = link.LinkServer(UUID, {"fails": fails, "says": lambda text: text * 2})
    try:
        assert link.ask(UUID, "says", "x", within_s=5.0) == "xx"
        for name in ("fails", "unknown"):
            with pytest.raises(OSError, match=name):
                link.ask(UUID, name, within_s=5.0)
    finally:
        server.close()

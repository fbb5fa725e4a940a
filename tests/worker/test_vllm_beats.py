"""What routers are told of a vLLM while it starts, serves, hangs, ends and drains."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.worker.test_server_heartbeat import KEY, router
from xpyd_core.keys import is_beat_mac
from xpyd_core.messages import Heartbeat, decode_heartbeat
from xpyd_core.pod_env import PodEnv
from xpyd_worker.vllm import Answers, EngineState, PairDialect

MODELS = b'{"object": "list", "data": [{"id": "demo", "max_model_len": 2048}, {"id": "lora"}]}'
METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="demo"} 3.0
vllm:num_requests_running_of_else{engine="0"} 9.0
vllm:num_requests_waiting{engine="0",model_name="demo"} 2.0
vllm:num_requests_waiting{engine="1",model_name="demo"} 4.0
"""
WELL = Answers(200, MODELS, METRICS)


def state(role: str = "Prefill", ip: str = "10.0.0.5") -> EngineState:
    incarnations = iter("abcdef")
    env = PodEnv(role=role, pod_ip=ip, instance="chat-0", fleet="default/chat", revision="r")
    return EngineState(env, 3.0, lambda: next(incarnations))


def test_a_beat_says_who_the_engine_is_and_what_it_has_to_do() -> None:
    engine = state()
    engine.take(WELL)
    assert engine.beat == Heartbeat(
        type="P",
        http_address="10.0.0.5:20001",
        zmq_address="10.0.0.5:21001",
        version=1,
        instance="chat-0",
        incarnation="a",
        fleet="default/chat",
        revision="r",
        models=("demo", "lora"),
        max_model_len=2048,
        state="Ready",
        period_ms=3000,
        running=3,
        waiting=6,
        dialect="pair-id",
        prompt_ids=1,
    )
    engine = state("Decode", "fd00::5")
    assert (engine.beat.type, engine.beat.http_address) == ("D", "[fd00::5]:20001")
    engine = state("Aggregated")
    assert (engine.beat.type, engine.beat.dialect, engine.beat.prompt_ids) == ("A", "", 0)


@pytest.mark.parametrize(
    ("version", "compatibility", "ids"),
    [
        (b'{"version": "0.32.0"}', "vllm 0.32.0", 1),
        (b'{"version": "0.31.1"}', "vllm 0.31.1", 0),
        (b"junk", "", 0),
    ],
)
def test_a_vllm_with_nixl_pairs_by_its_version(
    version: bytes, compatibility: str, ids: int
) -> None:
    engine = EngineState(PodEnv(role="Decode"), 3.0, lambda: "a", dialect="nixl")
    engine.take(WELL._replace(version=version))
    beat = engine.beat
    assert (beat.dialect, beat.compatibility, beat.prompt_ids) == ("nixl", compatibility, ids)


def test_a_vllm_with_nixl_pairs_also_by_the_name_that_it_is_given() -> None:
    env = PodEnv(role="Decode")
    engine = EngineState(env, 3.0, lambda: "a", dialect="nixl", compat="abc")
    engine.take(WELL._replace(version=b'{"version": "0.32.0"}'))
    assert engine.beat.compatibility == "vllm 0.32.0 abc"


@pytest.mark.parametrize("dialect", ["pair-id", "nixl"])
def test_a_vllm_that_counts_its_output_says_that_it_takes_no_ids(dialect: PairDialect) -> None:
    env = PodEnv(role="Decode")
    engine = EngineState(env, 3.0, lambda: "a", dialect=dialect, takes_ids=False)
    engine.take(WELL._replace(version=b'{"version": "0.32.0"}'))
    assert engine.beat.prompt_ids == 0


def test_a_process_that_ends_and_starts_again_is_another_instance() -> None:
    engine = state()
    seen: list[tuple[str, str]] = []
    said = [None, 0, 503, 200, 503, 0, 200, None, 503, 200]
    for health in said:
        engine.take(WELL if health == 200 else Answers(health))
        seen.append((engine.state, engine.beat.incarnation))
    assert seen == [
        *[("Gone", "")] * 3, ("Ready", "a"),
        *[("Starting", "a")] * 2, ("Ready", "a"),
        *[("Gone", "a")] * 2, ("Ready", "b"),
    ]  # fmt: skip


def test_a_leaving_engine_drains_until_nobody_listens_whatever_it_answers() -> None:
    engine = state()
    engine.take(WELL)
    engine.leave()
    for health in (200, 503, 0):
        engine.take(Answers(health))
        assert engine.state == "Draining"
    engine.take(Answers(None))
    assert engine.state == "Gone"


@pytest.mark.parametrize("junk", [b"", b"{}", b"\xff", b'{"data": [{"id": 3}]}', b'{"data": null}'])
def test_junk_for_models_and_metrics_keeps_what_is_known(junk: bytes) -> None:
    engine = state()
    engine.take(WELL)
    engine.take(Answers(200, junk, b"vllm:num_requests_running{} no number\n" + junk))
    assert (engine.beat.models, engine.beat.max_model_len) == (("demo", "lora"), 2048)
    assert (engine.beat.running, engine.beat.waiting) == (0, 0)


class _Vllm(ThreadingHTTPServer):
    """Answers what `xpyd vllm-beats` asks; `status`: of GET /health."""

    status = 200

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Answers)


class _Answers(BaseHTTPRequestHandler):
    server: _Vllm

    def do_GET(self) -> None:
        body = {"/v1/models": MODELS, "/metrics": METRICS}.get(self.path, b"")
        self.send_response(self.server.status if self.path == "/health" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Nothing."""


@contextmanager
def vllm(port: int = 0) -> Iterator[_Vllm]:
    server = _Vllm(port)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def test_the_command_beats_signed_follows_vllm_and_says_goodbye(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    with router() as (sock, router_port):

        async def until(state: str) -> Heartbeat:
            async with asyncio.timeout(30):
                while True:
                    _, frame, mac = await sock.recv_multipart()
                    assert is_beat_mac((KEY,), frame, mac)
                    beat = decode_heartbeat(frame)
                    if beat.state == state:
                        return beat

        with vllm() as server:
            port = server.server_address[1]
            environ = {
                **os.environ,
                "XPYD_ROLE": "Decode",
                "XPYD_POD_IP": "127.0.0.1",
                "XPYD_HTTP_PORT": str(port),
                "XPYD_DISCOVERY": f"127.0.0.1:{router_port}",
                "XPYD_KV_KEY_FILE": str(tmp_path / "key"),
            }
            argv = [sys.executable, "-m", "xpyd_core", "vllm-beats", "--heartbeat-period-ms=100"]
            process = await asyncio.to_thread(subprocess.Popen, argv, env=environ)
            try:
                first = await until("Ready")
                assert (first.type, first.models, first.waiting) == ("D", ("demo", "lora"), 6)
                server.status = 503
                assert (await until("Starting")).incarnation == first.incarnation
                server.shutdown()
                server.server_close()
                await until("Gone")
                with vllm(port):
                    assert (await until("Ready")).incarnation != first.incarnation
                    process.send_signal(signal.SIGTERM)
                    await until("Draining")
                    assert process.poll() is None
                await until("Gone")
                assert await asyncio.to_thread(process.wait, 20) == 0
            finally:
                process.kill()
                process.wait()


@pytest.mark.parametrize(
    ("flags", "environ", "says"),
    [
        ([], {}, "xpyd vllm-beats needs the fleet's secret"),
        (["--kv-insecure"], {}, "XPYD_DISCOVERY: expected the routers' HOST:PORT"),
        (["--kv-insecure", "--heartbeat-period-ms=1"], {"XPYD_DISCOVERY": "a:1"}, "at least 50"),
        (["--kv-insecure", "--drain-timeout=-1"], {"XPYD_DISCOVERY": "a:1"}, "at least 0"),
        (["--kv-insecure", "--compat=a"], {"XPYD_DISCOVERY": "a:1"}, "only with --dialect nixl"),
        (
            ["--kv-insecure", "--dialect=nixl", "--compat=a b"],
            {"XPYD_DISCOVERY": "a:1"},
            "--compat 'a b': expected 1 to 64",
        ),
    ],
)
def test_a_wrong_start_is_refused_with_what_is_missing(
    flags: list[str], environ: dict[str, str], says: str
) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("XPYD_")}
    argv = [sys.executable, "-m", "xpyd_core", "vllm-beats", *flags]
    done = subprocess.run(argv, env=clean | environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert says in done.stderr

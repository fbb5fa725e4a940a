"""`xpyd vllm-beats`: heartbeats for a vLLM of the same pod, which sends none itself.

Behind `--` stands the command of vLLM where it is to be started here, too: in a local fleet, whose
pod is one process.

It asks vLLM over HTTP how it is, and tells the routers, signed with the fleet's key. Where the pod
runs and who it is come from the pod's environment, as for `xpyd worker`. `EngineState` decides and
is pure; `_Beats` asks, sends and ends. See docs/adr/0050.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import logging
import os
import signal
import ssl
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, NamedTuple

import msgspec

from xpyd_core.cli import Command
from xpyd_core.errors import UserError
from xpyd_core.heartbeat import HeartbeatSender
from xpyd_core.keys import Keys, check_keys_given, fleet_keys
from xpyd_core.logs import add_logging_arguments, set_up_logging
from xpyd_core.messages import Heartbeat, InstanceState
from xpyd_core.pod_env import PodEnv, read_pod_env
from xpyd_core.request_id import Address, TlsAddress
from xpyd_core.vllm_answers import (
    check_compat_name,
    nixl_compatibility,
    read_models,
    read_version,
    takes_prompt_ids,
)
from xpyd_worker.kv.engine import LETTER

_log = logging.getLogger("xpyd.vllm")
PairDialect = Literal["pair-id", "nixl"]
_TIMEOUT_S = 2.0
_FAST_S = 0.5
"""Between two questions while vLLM starts or leaves."""
_MAX_ANSWER_BYTES = 4 * 1024 * 1024
EXIT_FAILED = 1
_RUNNING, _WAITING = b"vllm:num_requests_running", b"vllm:num_requests_waiting"
_EPILOG = """examples:
  XPYD_ROLE=Prefill XPYD_POD_IP=10.0.1.2 XPYD_DISCOVERY=router:30001 \\
      xpyd vllm-beats --kv-key-file kv.key
"""


class Answers(NamedTuple):
    """What vLLM said. `health`: the status of GET /health, 0: no answer, None: nobody listens."""

    health: int | None
    models: bytes = b""
    metrics: bytes = b""
    version: bytes = b""


class EngineState:
    """What the routers are told of the engine: answers in, beats out.

    A vLLM that was away and answers again is another process, with another incarnation.
    """

    def __init__(
        self,
        env: PodEnv,
        period_s: float,
        new_incarnation: Callable[[], str],
        *,
        dialect: PairDialect = "pair-id",
        takes_ids: bool = True,
        compat: str = "",
        is_tls: bool = False,
    ) -> None:
        """`takes_ids`: see --no-prompt-ids; `compat`: --compat; `is_tls`: --tls."""
        self._new_incarnation = new_incarnation
        self._compat = compat
        self._takes_ids = takes_ids
        self._is_leaving = False
        host = f"[{env.pod_ip}]" if ":" in env.pod_ip else env.pod_ip
        is_of_pair = env.role != "Aggregated"
        self.beat = Heartbeat(
            type=LETTER[env.role],  # pyright: ignore[reportArgumentType]  # checked by read_pod_env
            http_address=f"{host}:{env.http_port}",
            zmq_address=f"{host}:{env.kv_port}",
            version=1,
            instance=env.instance or f"{host}:{env.http_port}",
            fleet=env.fleet,
            pool=env.pool,
            revision=env.revision,
            fleet_revision=env.fleet_revision,
            state="Gone",
            period_ms=round(period_s * 1000),
            tls=1 if is_tls else 0,
            dialect=dialect if is_of_pair else "",
            # xpyd's connector refuses a vLLM before 0.32; others say their version.
            prompt_ids=1 if takes_ids and is_of_pair and dialect == "pair-id" else 0,
        )

    @property
    def state(self) -> InstanceState:
        """The engine's state; Gone: no process listens, or none did yet."""
        return self.beat.state

    def leave(self) -> None:
        """The pod ends: routers send nothing more."""
        self._is_leaving = True
        if self.state != "Gone":
            self._change(state="Draining")

    def take(self, answers: Answers) -> None:
        """Take what vLLM said."""
        if answers.health is None:
            self._change(state="Gone")
        elif self._is_leaving:
            pass  # what it said before holds, until nobody listens
        elif not 200 <= answers.health < 300:
            if self.state != "Gone":
                self._change(state="Starting")
        else:
            if self.state == "Gone":
                self._change(incarnation=self._new_incarnation())
            names, length = read_models(answers.models)
            if self.beat.dialect == "nixl" and (version := read_version(answers.version)):
                self._change(
                    compatibility=nixl_compatibility(version, self._compat),
                    prompt_ids=1 if self._takes_ids and takes_prompt_ids(version) else 0,
                )
            self._change(
                state="Ready",
                models=names or self.beat.models,
                max_model_len=length or self.beat.max_model_len,
                running=_gauge(answers.metrics, _RUNNING),
                waiting=_gauge(answers.metrics, _WAITING),
            )

    def _change(self, **fields: object) -> None:
        self.beat = msgspec.structs.replace(self.beat, **fields)


def _gauge(metrics: bytes, name: bytes) -> int:
    """The sum of a metric over its labels; 0 where it is not there."""
    total = 0.0
    for line in metrics.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in (b"{", b" "):
            try:
                total += float(line.rpartition(b" ")[2])
            except ValueError:
                continue
    return int(total) if 0 <= total < 1 << 53 else 0


@cache
def _same_pod() -> ssl.SSLContext:
    """vLLM is in the same pod: its certificate is its routers' to verify."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def ask(address: Address) -> Answers:
    """Ask a vLLM for its health, and, where that is fine, for models, metrics and version. Blocks
    for seconds at most."""
    try:
        health, _ = _get(address, "/health")
        if not 200 <= health < 300:
            return Answers(health)
        paths = ("/v1/models", "/metrics", "/version")
        return Answers(health, *(_get(address, path)[1] for path in paths))
    except ConnectionRefusedError:
        return Answers(None)
    except (OSError, http.client.HTTPException):
        return Answers(0)


def _get(address: Address, path: str) -> tuple[int, bytes]:
    # On loopback each pod speaks from its own address.
    source = (address.host, 0) if address.host.startswith("127.") else None
    where, timeout_s = (address.host, address.port), _TIMEOUT_S
    if isinstance(address, TlsAddress):
        connection = http.client.HTTPSConnection(
            *where, timeout=timeout_s, source_address=source, context=_same_pod()
        )
    else:
        connection = http.client.HTTPConnection(*where, timeout=timeout_s, source_address=source)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read(_MAX_ANSWER_BYTES)
        return answer.status, body if 200 <= answer.status < 300 else b""
    finally:
        connection.close()


class _Beats:
    """The process: asks until a signal, then until nobody listens."""

    def __init__(
        self,
        env: PodEnv,
        *,
        period_s: float,
        drain_timeout_s: float,
        keys: Keys,
        dialect: PairDialect,
        takes_ids: bool,
        compat: str,
        is_tls: bool,
        argv: Sequence[str],
    ) -> None:
        kind = TlsAddress if is_tls else Address
        self._address = kind(env.pod_ip, env.http_port)
        self._period_s = period_s
        self._drain_timeout_s = drain_timeout_s
        self._argv = argv
        self._engine = EngineState(
            env,
            period_s,
            lambda: os.urandom(8).hex(),
            dialect=dialect,
            takes_ids=takes_ids,
            compat=compat,
            is_tls=is_tls,
        )
        self._left = asyncio.Event()
        self._status = 0
        self._sender = HeartbeatSender(
            env.discovery,
            identity=f"{self._engine.beat.zmq_address}/{os.urandom(8).hex()}",
            source_host=env.pod_ip,
            period_s=period_s,
            make=lambda: self._engine.beat,
            keys=keys,
        )

    async def run(self) -> int:
        """The whole life; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._left.set)
        child = await self._start()
        ending = None if child is None else asyncio.create_task(self._await(child))
        try:
            await self._follow()
            self._engine.leave()
            self._sender.beat_now()
            end = loop.time() + self._drain_timeout_s
            if child is not None and child.returncode is None:
                # vLLM turns all requests away from then on.
                await self._sender.part(self._drain_timeout_s)
            if child is not None and child.returncode is None:
                child.terminate()
            while self._is_there(child) and loop.time() < end:
                await asyncio.sleep(_FAST_S)
                await self._ask()
        finally:
            if child is not None and child.returncode is None:
                child.kill()
            if ending is not None:
                await ending
                self._engine.take(Answers(None))
                self._sender.beat_now()
            await self._sender.close()
        return self._status

    async def _start(self) -> asyncio.subprocess.Process | None:
        if not self._argv:
            return None
        try:
            return await asyncio.create_subprocess_exec(*self._argv, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise UserError(f"{self._argv[0]}: {error.strerror}") from error

    async def _await(self, child: asyncio.subprocess.Process) -> None:
        """Its end is ours; one that nobody asked for is a failure."""
        status = await child.wait()
        if not self._left.is_set():
            self._status = status if status > 0 else EXIT_FAILED
            _log.error("vLLM ended by itself: status %d", status)
        self._left.set()

    def _is_there(self, child: asyncio.subprocess.Process | None) -> bool:
        return self._engine.state != "Gone" if child is None else child.returncode is None

    async def _follow(self) -> None:
        """Beat until the pod is to end."""
        is_beating = False
        while not self._left.is_set():
            await self._ask()
            if not is_beating and self._engine.state == "Ready":
                # Not before: routers would send requests that nobody takes.
                self._sender.start()
                is_beating = True
            await self._pause(self._period_s if self._engine.state == "Ready" else _FAST_S)

    async def _ask(self) -> None:
        before = self._engine.state
        self._engine.take(await asyncio.to_thread(ask, self._address))
        if self._engine.state != before:
            self._sender.beat_now()

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not through a signal."""
        try:
            async with asyncio.timeout(seconds):
                await self._left.wait()
        except TimeoutError:
            pass


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags; all else comes from the pod's environment."""
    add = parser.add_argument
    add("--heartbeat-period-ms", type=int, default=3000, metavar="MS", help="between two beats")
    text = "after SIGTERM, longest wait for vLLM's end"
    add("--drain-timeout", type=float, default=300.0, metavar="SECONDS", help=text)
    text = "of P and D: xpyd's connector (the default) or NixlConnector moves the KV"
    add("--dialect", choices=("pair-id", "nixl"), default="pair-id", help=text)
    text = "with nixl, which does not compare models: P and D pair only where they have one NAME"
    add("--compat", default="", metavar="NAME", help=text)
    text = "of P and D: no token of an answer may become prompt, since this vLLM counts its output"
    add("--no-prompt-ids", action="store_true", help=text)
    add("--tls", action="store_true", help="vLLM serves HTTPS (its flag --ssl-certfile)")
    add("--kv-key-file", metavar="FILE", help="signs the beats; default: XPYD_KV_KEY_FILE")
    add("--kv-insecure", action="store_true", help="the fleet has no secret")
    add_logging_arguments(parser)
    text = "behind --: the command of vLLM, which is started and ended here"
    add("command", nargs="*", metavar="COMMAND", help=text)


def _check_compat(name: str, dialect: PairDialect) -> None:
    if dialect != "nixl":
        raise UserError("--compat: only with --dialect nixl; xpyd's connector compares models")
    try:
        check_compat_name(name)
    except UserError as error:
        raise UserError(f"--compat {error}") from error


def _run(args: argparse.Namespace) -> int:
    set_up_logging(args.log_level, args.log_format)
    key_file = {"XPYD_KV_KEY_FILE": args.kv_key_file} if args.kv_key_file else {}
    env = read_pod_env({**os.environ, **key_file})
    check_keys_given(env.kv_key_file, insecure=args.kv_insecure, who="xpyd vllm-beats")
    if not env.discovery:
        raise UserError("XPYD_DISCOVERY: expected the routers' HOST:PORT")
    for flag, value, least in (
        ("--heartbeat-period-ms", args.heartbeat_period_ms, 50),
        ("--drain-timeout", args.drain_timeout, 0),
    ):
        if not least <= value <= 86_400_000:
            raise UserError(f"{flag} {value}: expected at least {least}")
    if args.compat:
        _check_compat(args.compat, args.dialect)
    keys = fleet_keys(env.kv_key_file, insecure=args.kv_insecure)
    period_s = args.heartbeat_period_ms / 1000

    async def beat() -> int:
        return await _Beats(
            env,
            period_s=period_s,
            drain_timeout_s=args.drain_timeout,
            keys=keys,
            dialect=args.dialect,
            takes_ids=not args.no_prompt_ids,
            compat=args.compat,
            is_tls=args.tls,
            argv=args.command,
        ).run()

    return asyncio.run(beat())


command = Command(
    help="send the heartbeats of a vLLM that runs in the same pod",
    configure=configure,
    run=_run,
    epilog=_EPILOG,
)

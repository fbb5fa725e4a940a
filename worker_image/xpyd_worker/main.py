"""The worker's process: HTTP first, then the model, then heartbeats; on SIGTERM the way back.

    asyncio: HTTP, heartbeats, signals     engine's thread     KV I/O thread

Why HTTP is in no process of its own: docs/adr/0131.

HTTP answers 503 while the model loads. A first signal, or POST /drain, drains; a second signal
stops at once. When the engine or the HTTP server ends by itself the process says goodbye and exits
with status 1.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import uvloop

from xpyd_core.errors import UserError
from xpyd_core.heartbeat import HeartbeatSender, Parting
from xpyd_core.keys import fleet_keys
from xpyd_core.messages import Heartbeat
from xpyd_core.parallel.checks import check_parallel
from xpyd_core.sizes import format_bytes
from xpyd_core.tls import WatchedContext
from xpyd_core.tls_connection import TlsServer
from xpyd_kv.connector.build import MakeStore
from xpyd_worker.config import WorkerConfig
from xpyd_worker.grammar.compiler import GrammarCompiler
from xpyd_worker.kv.engine import LETTER
from xpyd_worker.model.registry import read_checkpoint
from xpyd_worker.ranks.loss import Loss, RankLostError
from xpyd_worker.ranks.start.messages import Logs
from xpyd_worker.server.bridge import EngineBridge
from xpyd_worker.server.http.admin import Admin, DrainState, Process
from xpyd_worker.server.http.admission import Lifecycle
from xpyd_worker.server.http.inference import Api
from xpyd_worker.server.http.scaling import Scaling
from xpyd_worker.server.http.server import create_app, listen, make_server
from xpyd_worker.server.service import InstanceInfo, Service, seeds
from xpyd_worker.server.telemetry.metrics import ServerMetrics
from xpyd_worker.system import prepare_for_torch, process_age_s

if TYPE_CHECKING:
    from xpyd_worker.load.engine import LoadedEngine
    from xpyd_worker.load.replicas import LoadedReplicas
    from xpyd_worker.load.replicated_engine import ReplicatedEngine
    from xpyd_worker.server.telemetry.otel import OtlpTracer

    Loaded = LoadedEngine | LoadedReplicas

T = TypeVar("T")
_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A terminal or a wrapper like timeout(1) may deliver one signal twice.
_ONE_SIGNAL_S = 0.5
_POLL_S = 0.1
# A tenth of Python's own: eight streams of a model of 2 million parameters went from 4,060 to 4,840
# tokens a second, one of 443 million did not change.
_SWITCH_INTERVAL_S = 0.0005
_ENGINE_STOP_S = 10.0
_KV_CLOSE_S = 2.0
_TRACES_CLOSE_S = 2.0
EXIT_FAILED = 1
_LOGS = Logs()


def run(config: WorkerConfig, *, logs: Logs = _LOGS, store_factory: MakeStore | None = None) -> int:
    """Serve until a signal; the exit status. UserError for what the user can mend.

    `logs`: how ranks log. `store_factory` replaces D's KV store.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            worker = _Worker(config, logs, store_factory)
            status = runner.run(worker.serve())
    except RankLostError as error:
        _log.critical("the instance cannot start: %s", error)
        return error.status
    if worker.loss is not None:
        # Once more, behind what others had to say: the last line is what a container is known by.
        _log.critical("the instance ended: %s", worker.loss.text)
    return status


class _Worker:
    """One process' parts and their order."""

    def __init__(self, config: WorkerConfig, logs: Logs, store_factory: MakeStore | None) -> None:
        self._config = config
        self._logs = logs
        self.loss: Loss | None = None
        self._store_factory = store_factory
        self._keys = fleet_keys(config.kv_key_file, insecure=config.kv_insecure)
        if config.moves_kv and config.kv_insecure:
            _log.warning(
                "--kv-insecure: any host that reaches %s may read and write this engine's KV",
                config.kv_address,
            )
        self._incarnation = os.urandom(8).hex()
        self._tracer = _make_tracer(config, self._incarnation)
        self._metrics = ServerMetrics()
        self._bridge = EngineBridge(self._metrics.requests)
        self._lifecycle = Lifecycle()
        self._api = Api(self._lifecycle)
        self._api.tracer = self._tracer
        self._scaling = Scaling(self._api, config.max_num_seqs)
        process = Process(self._keys, self._incarnation, self._ask_drain, self._scaling)
        signed_by = None if config.accept_unsigned_pairs else self._keys
        admin = Admin(self._api, self._metrics, process)
        self._tls: TlsServer | None = None
        if config.tls is not None:
            self._tls = TlsServer(WatchedContext(config.tls, "--ssl-certfile"))
        app = create_app(self._api, admin, signed_by=signed_by)
        self._server = make_server(app, self._tls, only_certified=config.has_open_probes)
        self._begun_s = time.monotonic()
        self._grammars = GrammarCompiler()
        self._loaded: Loaded | None = None
        self._heartbeat: HeartbeatSender | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals = 0
        self._last_signal_s = 0.0
        self._drain_end_s: float | None = None
        self._woken = asyncio.Event()

    async def serve(self) -> int:
        """The whole life."""
        loop = self._loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        sockets = self._listen()
        server = self._server
        serving = asyncio.create_task(server.serve(sockets=sockets))
        watching = None if self._tls is None else asyncio.create_task(self._tls.context.watch())
        try:
            _log.info("loading %s", self._config.model)
            loaded = await run_unless(self._woken, self._load)
            if loaded is None:
                return 0
            return await self._serve_loaded(loaded, sockets[0].getsockname()[1], serving)
        finally:
            server.should_exit = True
            # What ended it by itself was logged where it was noticed.
            await asyncio.wait({serving})
            if self._tls is not None and watching is not None:
                watching.cancel()
                self._tls.close()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close, _TRACES_CLOSE_S)
            for number in _SIGNALS:
                # What still comes must not kill a process that is about to return its status.
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int) -> None:
        now = asyncio.get_running_loop().time()
        if self._signals and now < self._last_signal_s + _ONE_SIGNAL_S:
            return
        self._signals += 1
        self._last_signal_s = now
        _log.info("got %s", signal.Signals(number).name)
        self._woken.set()

    def _ask_drain(self) -> DrainState:
        """POST /drain. A signal that comes later goes on with this drain, it does not cut it."""
        if self._drain_end_s is None:
            _log.info("asked to drain")
            self._begin_drain()
        assert self._drain_end_s is not None, "set by _begin_drain"
        left = max(0.0, self._drain_end_s - asyncio.get_running_loop().time())
        return DrainState(left, self._loaded is None or self._loaded.engine.is_idle())

    def _begin_drain(self) -> None:
        """Say so to the routers; what they send until all of them know it is taken (`_drain`).
        Asked again, it does what was too early."""
        if self._drain_end_s is None:
            now = asyncio.get_running_loop().time()
            self._drain_end_s = now + self._config.drain_timeout_s
        if self._lifecycle.state == "Ready" and self._loaded is not None:
            self._lifecycle.is_awaited = bool(self._config.discovery)
            self._lifecycle.become("Draining")
            if not self._lifecycle.is_awaited:
                self._loaded.kv.drain()
        self._woken.set()

    def _refuse_more(self, loaded: Loaded, left: Parting) -> None:
        """No router sends anything more, or the wait for them is over."""
        self._lifecycle.is_awaited = False
        loaded.kv.drain()
        if left.silent:
            silent = ", ".join(map(str, left.silent))
            _log.warning("no word of %s: these routers may still send requests", silent)
        _log.info("routers have %d requests here", left.in_flight)

    def _listen(self) -> list[socket.socket]:
        config = self._config
        try:
            return listen(config.host, config.port)
        except OSError as error:
            raise UserError(
                f"--port: cannot listen on {config.host}:{config.port}: {error.strerror}"
            ) from error

    def _load(self) -> Loaded:
        """The loaded parts; slow, on the load's thread."""
        # What is wrong with a checkpoint is said before torch is imported, which takes seconds;
        # HTTP answers meanwhile.
        config = self._config
        checkpoint = read_checkpoint(config)
        check_parallel(checkpoint.model.shape, config.sizes, config.layer_partition)
        prepare_for_torch()
        # HTTP waits less long for an engine whose steps are short, and the other way round.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        from xpyd_worker.load.engine import load
        from xpyd_worker.load.replicas import load_replicas

        make = partial(load, incarnation=self._incarnation)
        if config.has_replicas:
            make = partial(load_replicas, changed=self._replicas_changed)
        loaded: Loaded = make(
            config,
            deliver=self._bridge.deliver,
            keys=self._keys,
            make_store=self._store_factory,
            logs=self._logs,
            checkpoint=checkpoint,
        )
        self._grammars.prepare(loaded.model.grammar_target)
        return loaded

    def _replicas_changed(self) -> None:
        """Any thread. Routers are not to pick a replica that is gone."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._beat_now)

    def _beat_now(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat_now()

    async def _serve_loaded(self, loaded: Loaded, port: int, serving: asyncio.Task[None]) -> int:
        config = self._config
        self._loaded = loaded
        self._bridge.bind(loaded.engine)
        loaded.start()
        heartbeat = self._heartbeat = HeartbeatSender(
            config.discovery,
            identity=f"{config.kv_address}/{self._incarnation}",
            source_host=config.host,
            period_s=config.heartbeat_period_s,
            make=lambda: self._beat(loaded, port),
            keys=self._keys,
            on_gone=loaded.kv.peer_gone,
        )
        if config.enable_elastic_ep:
            engine = cast("ReplicatedEngine", loaded.engine)
            self._scaling.bind(engine, heartbeat.part)
            if config.data_parallel_size_file is not None:
                self._scaling.follow(config.data_parallel_size_file, config.drain_timeout_s)
        try:
            info = InstanceInfo(config.role, self._incarnation, self._keys, config.kv_wait_s)
            self._api.service = Service(
                model=loaded.model,
                instance=info,
                bridge=self._bridge,
                max_requests=self._scaling.most_requests(config.data_parallel_size),
                probe=loaded.kv.probe,
                has_priorities=config.scheduling_policy == "priority",
                draw_seed=seeds(config.seed),
                kv_peers=loaded.kv.counted,
                malformed_calls=self._metrics.malformed_calls,
                grammars=self._grammars,
                replicas=config.data_parallel_size,
                kv_places=loaded.kv_places,
            )
            self._lifecycle.become("Ready")
            self._metrics.watch(
                loaded.stats,
                loaded.samples,
                model=loaded.model.names[0],
                block_size=config.block_size,
                load_s=self._age_s(),
                grammars=self._grammars.metrics,
            )
            self._lifecycle.listen(heartbeat.beat_now)
            heartbeat.start()
            self._say_ready(loaded, port)
            return await self._until_the_end(loaded, serving)
        finally:
            self._scaling.close()
            if self._api.service is not None:
                self._api.service.threads.close()
                self._grammars.close()
            if self._lifecycle.state != "Gone":
                self._lifecycle.become("Gone")
            await asyncio.to_thread(loaded.close, engine_s=_ENGINE_STOP_S, kv_s=_KV_CLOSE_S)
            await heartbeat.close()

    def _age_s(self) -> float:
        """Since the process' start; where the system does not say when that was, since ours."""
        age_s = process_age_s()
        return time.monotonic() - self._begun_s if age_s is None else age_s

    async def _until_the_end(self, loaded: Loaded, serving: asyncio.Task[None]) -> int:
        while not self._signals and self._drain_end_s is None:
            if self._has_failed(loaded, serving):
                return self._failure_status
            await self._pause(_POLL_S)
        self._begin_drain()
        return await self._drain(loaded, serving)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not through a signal or a drain's begin."""
        self._woken.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            pass

    async def _drain(self, loaded: Loaded, serving: asyncio.Task[None]) -> int:
        """Until no router has anything for this instance, and what is here is finished; at most
        --drain-timeout, or until a second signal."""
        loop = asyncio.get_running_loop()
        end = self._drain_end_s
        assert end is not None, "set by _begin_drain"
        assert self._heartbeat is not None, "set before the engine serves"
        _log.info("draining, at most %g s", self._config.drain_timeout_s)
        parting = asyncio.create_task(self._heartbeat.part(max(0.0, end - loop.time())))
        try:
            while self._is_wanted(loaded, parting):
                if self._has_failed(loaded, serving):
                    return self._failure_status
                if self._signals > 1 or loop.time() >= end:
                    self._say_cut(loaded)
                    break
                await self._pause(_POLL_S)
        finally:
            parting.cancel()
            await asyncio.gather(parting, return_exceptions=True)
        _log.info("drained")
        return 0

    def _is_wanted(self, loaded: Loaded, parting: asyncio.Task[Parting]) -> bool:
        """Whether somebody may still send something here, or waits for what is here."""
        if self._lifecycle.is_awaited and parting.done():
            self._refuse_more(loaded, parting.result())
        # A client that reads slowly still gets what was generated for it.
        answers = self._server.server_state.tasks
        is_busy = self._bridge.open_requests or answers or not loaded.engine.is_idle()
        return self._lifecycle.is_awaited or bool(is_busy)

    def _say_cut(self, loaded: Loaded) -> None:
        why = "a second signal" if self._signals > 1 else "--drain-timeout"
        requests, leases = self._bridge.open_requests, loaded.engine.stats().kv_leases
        _log.warning("%s: %d requests and KV of %d prompts are cut", why, requests, leases)

    @property
    def _failure_status(self) -> int:
        return EXIT_FAILED if self.loss is None else self.loss.status

    def _has_failed(self, loaded: Loaded, serving: asyncio.Task[None]) -> bool:
        """Whether the engine's thread or the HTTP server has ended by itself: then nothing can be
        served any more, and open requests fail."""
        if loaded.loss is not None:
            self.loss = loaded.loss
            _log.critical("the instance lost a rank: %s", self.loss.text)
        elif loaded.engine.failure is not None:
            _log.critical("the engine failed: %r", loaded.engine.failure)
        elif loaded.kv.loss.reason:
            _log.critical("the KV transfer failed: %s", loaded.kv.loss.reason)
        elif serving.done():
            why = None if serving.cancelled() else serving.exception()
            _log.critical("the HTTP server ended: %r", why)
        else:
            return False
        self._bridge.fail()
        self._lifecycle.fail()
        return True

    def _beat(self, loaded: Loaded, port: int) -> Heartbeat:
        config = self._config
        stats, replicas = loaded.engine.stats(), loaded.beats()
        return Heartbeat(
            type=LETTER[config.role],
            http_address=f"{_bracketed(config.host)}:{port}",
            zmq_address=str(config.kv_address),
            version=1,
            instance=config.instance or f"{_bracketed(config.host)}:{port}",
            incarnation=self._incarnation,
            fleet=config.fleet,
            pool=config.pool,
            revision=config.pod_revision,
            fleet_revision=config.fleet_revision,
            compatibility=loaded.compatibility,
            models=loaded.model.names,
            max_model_len=loaded.model.max_model_len,
            state=self._lifecycle.state,
            continuation=1,
            period_ms=round(config.heartbeat_period_s * 1000),
            running=stats.running,
            waiting=stats.waiting,
            free_blocks=stats.blocks_free,
            total_blocks=stats.blocks_total,
            block_tokens=config.block_size,
            kv_peers=loaded.kv.peers.latest(),
            kv_leases=stats.kv_leases,
            scaling_problem=self._scaling.why_fewer(replicas),
            tls=0 if self._tls is None else 1,
            replicas=replicas,
        )

    def _say_ready(self, loaded: Loaded, port: int) -> None:
        config = self._config
        routers = ",".join(map(str, config.discovery)) or "none"
        _log.info(
            "serving %s on %s://%s:%d",
            ", ".join(loaded.model.names),
            "http" if self._tls is None else "https",
            _bracketed(config.host),
            port,
            extra={
                "role": config.role,
                "dtype": loaded.ready.dtype,
                "max_model_len": loaded.model.max_model_len,
                "kv_blocks": loaded.ready.executor.num_blocks,
                "kv_cache": format_bytes(loaded.ready.cache_bytes).replace(" ", ""),
                "kv_address": str(config.kv_address) if config.moves_kv else "none",
                "routers": routers,
                "compatibility": loaded.compatibility,
            },
        )


def _make_tracer(config: WorkerConfig, incarnation: str) -> OtlpTracer | None:
    """UserError where tracing is asked for and its packages are not installed."""
    if config.otlp_traces_endpoint is None:
        return None
    try:
        from xpyd_worker.server.telemetry.otel import OtlpTracer
    except ModuleNotFoundError as error:
        raise UserError(
            f"--otlp-traces-endpoint: {error.name} is not installed; pip install 'xpyd[otel]'"
        ) from error
    instance = config.instance or f"{_bracketed(config.host)}:{config.port}/{incarnation}"
    return OtlpTracer(config.otlp_traces_endpoint, instance=instance, role=config.role)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def run_unless(stopped: asyncio.Event, work: Callable[[], T]) -> T | None:
    """`work()` on a thread of its own, or None when `stopped` is set before it ends.

    Raises what `work` raises. The thread is a daemon: a load that is not wanted holds nothing up.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            outcome: T | BaseException = work()
        except BaseException as error:  # raised again where `work` is awaited
            outcome = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)

    def settle(outcome: T | BaseException) -> None:
        if result.done():
            return
        if isinstance(outcome, BaseException):
            result.set_exception(outcome)
        else:
            result.set_result(outcome)

    threading.Thread(target=run, name="load", daemon=True).start()
    stopping = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({result, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return result.result() if result.done() else None
    finally:
        stopping.cancel()
        if not result.done():
            result.cancel()

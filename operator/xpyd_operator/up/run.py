"""`xpyd up`: check everything, then supervise here, or start a detached supervisor.

A fleet that already runs gets the changed document instead, and its supervisor plans the
difference. `python -m` this module is the detached supervisor; its options come as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import msgspec

from xpyd_core.cli import EXIT_INTERRUPTED
from xpyd_core.errors import UserError
from xpyd_core.kv_outcome import OUTCOMES
from xpyd_core.logs import set_up_logging
from xpyd_core.pod_env import HTTP_PORT, ROUTER_ADMIN_PORT, ROUTER_HTTP_PORT
from xpyd_operator.document.engines import Model
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.load import load_fleet, parse_fleet
from xpyd_operator.plan.fleet import pools_wanted
from xpyd_operator.plan.keep import backoff_s
from xpyd_operator.plan.template import fleet_want, layout_of
from xpyd_operator.plan.values import ROUTER
from xpyd_operator.up import control
from xpyd_operator.up.checks import (
    VLLM,
    check_layouts,
    check_local,
    cluster_only,
    downloaded_folder,
    locate_model,
    needs_download,
)
from xpyd_operator.up.client import FleetFailed, wait_settled
from xpyd_operator.up.control import (
    ApplyRequest,
    ControlRequest,
    ControlResponse,
    DownRequest,
    FleetView,
    KvRow,
    KvView,
    PodView,
    PoolView,
    ScaleRequest,
    StatusRequest,
)
from xpyd_operator.up.folder import (
    AddressClaim,
    FleetFolder,
    claim_addresses,
    explained,
    listen_from,
    state_root,
)
from xpyd_operator.up.logs import LogLimit, LogStreamer, PrefixWriter
from xpyd_operator.up.memory import MemoryPlan, read_machine
from xpyd_operator.up.pods import PodProcess
from xpyd_operator.up.programs import ROUTER_HOST, LocalSettings, Programs
from xpyd_operator.up.supervisor import Supervisor, plan_engines


def handle(supervisor: Supervisor, ask: ControlRequest, now: float) -> ControlResponse:
    """Handle a request. UserError: it is refused."""
    match ask:
        case StatusRequest():
            return ControlResponse(view=view_of(supervisor, now))
        case ScaleRequest(pool, replicas):
            return ControlResponse(lines=(supervisor.scale(pool, replicas),))
        case ApplyRequest(document, source, folder):
            _refuse_changes(supervisor, ask)
            fleet = parse_fleet(document.encode(), source=source, local=True)
            check_local(fleet, source=source, vllm=supervisor.pods.settings.vllm)
            if fleet.name != supervisor.fleet.name:
                raise UserError(f"{source}: metadata.name is not {supervisor.fleet.name!r}")
            return ControlResponse(lines=tuple(supervisor.apply(fleet, Path(folder))))
        case DownRequest(timeout_s):
            supervisor.stop(timeout_s)
            return ControlResponse()


def _refuse_changes(supervisor: Supervisor, ask: ApplyRequest) -> None:
    runs = supervisor.pods.settings
    for flag, asked, have in (
        ("--api-key-file", ask.api_key_file, runs.api_key_file),
        ("--ssl-certfile", ask.ssl_certfile, runs.certificate),
        ("--ssl-keyfile", ask.ssl_keyfile, runs.certificate_key),
        ("--vllm", ask.vllm, runs.vllm),
    ):
        if asked not in (None, have):
            name, runs_with = supervisor.fleet.name, have or "none"
            raise UserError(
                f"{flag}: {asked}: fleet {name} runs with {runs_with}; take it down to change it"
            )


def view_of(supervisor: Supervisor, now: float) -> FleetView:
    """The fleet as it is now; `now` in the supervisor's clock."""
    status, settings = supervisor.status, supervisor.pods.settings
    layouts = supervisor.fleet.spec.layouts()
    return FleetView(
        fleet=settings.fleet,
        endpoint=settings.endpoint,
        admin=settings.admin,
        ready=status is not None and status.ready,
        reason=status.reason if status else "Progressing",
        message=status.message if status else "",
        supervisor_pid=supervisor.identity.pid,
        pools=tuple(
            PoolView(
                p.name, _role(p.role), p.replicas, p.ready, p.revision, layouts.get(p.name, "")
            )
            for p in (status.pools if status else ())
        ),
        pods=tuple(_pod_view(pod, settings, now) for pod in supervisor.pods),
        problems=supervisor.problems,
        kv=_kv_view(supervisor),
    )


_MOST_ROWS = 50
"""Pairs that a status shows, those with most requests."""


def _kv_view(supervisor: Supervisor) -> KvView:
    kv = supervisor.kv
    counted = ((row, n) for row, n in supervisor.kv_counts.items() if n and row[2] in OUTCOMES)
    outcomes = (KvRow(*row, n) for row, n in counted)
    rows = sorted(outcomes, key=lambda row: -row.requests)[:_MOST_ROWS]
    verified = "Unknown" if kv.status is None else str(kv.status)
    return KvView(verified, kv.reason, kv.message, tuple(rows))


def _role(role: str) -> str:
    return "Router" if role == ROUTER else role


def _pod_view(pod: PodProcess, settings: LocalSettings, now: float) -> PodView:
    is_router = pod.pod.pool == ROUTER
    address = settings.address(pod.pod.number)
    state, reason = _state(pod, now)
    since = pod.seen.started_at if pod.is_alive else pod.seen.exited_at or now
    return PodView(
        name=pod.pod.name,
        pool=pod.pod.pool,
        role=_role(pod.pod.template.role),
        state=state,
        address=address,
        http=f"{ROUTER_HOST}:{settings.router_port}" if is_router else f"{address}:{HTTP_PORT}",
        kv="" if is_router else f"{address}:{pod.pod.kv_port}",
        pid=pod.identity.pid if pod.identity else 0,
        restarts=max(0, pod.restarts),
        failures=pod.seen.failures + (not pod.is_alive),
        age_s=round(now - since, 1),
        revision=pod.pod.revision,
        reason=reason,
        log=str(pod.log),
        exit_status=pod.last_exit,
        layout=layout_of(pod.pod.template),
        last_exit=pod.exit_text(),
    )


def _state(pod: PodProcess, now: float) -> tuple[str, str]:
    if pod.seen.draining_since is not None:
        return "Draining", pod.leaving_text(now)
    if pod.seen.exited_at is not None:
        delay_s, _ = backoff_s(pod.seen)
        left_s = max(0.0, pod.seen.exited_at + delay_s - now)
        return "Restarting", f"{pod.exit_text()}, again in {left_s:.0f} s"
    if pod.is_ready:
        return "Ready", ""
    return ("NotReady", "") if pod.was_ready else ("Starting", pod.exit_text())


_log = logging.getLogger("xpyd.up")
_STREAM_EVERY_S = 0.1
_DRAIN_FAILED_S = 5.0
DAEMON = (sys.executable, "-P", "-m", "xpyd_operator.up.run")
_OURS = Programs()


class UpOptions(msgspec.Struct, frozen=True):
    """The flags of `xpyd up`. `file` is absolute; `timeout_s` bounds the wait of --detach."""

    file: str
    port: int | None = None
    log_level: str = "info"
    log_format: str = "text"
    log_max_bytes: int | None = None
    log_max_files: int | None = None
    timeout_s: float = 300.0
    api_key_file: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    vllm: str | None = None

    @property
    def vllm_command(self) -> str:
        """The command of vLLM."""
        return VLLM if self.vllm is None else self.vllm

    @property
    def folder(self) -> Path:
        """Where the document's relative paths begin."""
        return Path(self.file).parent

    @property
    def log_limit(self) -> LogLimit:
        """How much of each log is kept."""
        default = LogLimit()
        return LogLimit(
            default.file_bytes if self.log_max_bytes is None else self.log_max_bytes,
            default.files if self.log_max_files is None else self.log_max_files,
        )


def run_up(
    options: UpOptions,
    *,
    detach: bool,
    programs: Programs = _OURS,
    daemon: tuple[str, ...] = DAEMON,
) -> int:
    """The command; tests replace `programs` and `daemon` by fakes."""
    fleet = load_fleet(Path(options.file), local=True)
    state = FleetFolder(state_root() / fleet.name)
    is_running = state.is_supervised()
    if not is_running:  # a supervisor knows its vLLM, and checks what it is handed
        check_local(fleet, source=options.file, vllm=options.vllm_command)
    if line := cluster_only(fleet):
        sys.stdout.write(line + "\n")
    if needs_download(fleet.spec.model):
        _download(fleet.spec.model)
    if is_running:
        return _apply_to_running(options, state)
    if orphans := state.orphans():
        raise UserError(
            f"fleet {fleet.name}: {len(orphans)} processes of a supervisor that died are still"
            f" there; end them with `xpyd down {fleet.name}`"
        )
    memory = plan_fleet_memory(fleet, options.folder)
    _listening(options.port).close()
    # Also here, where a detached supervisor's disk may have no room for the reason.
    with _locked(state):
        state.clear()
    sys.stdout.write(memory.table() + "\n")
    sys.stdout.flush()
    if detach:
        return _run_detached(options, state, daemon)
    return supervise(options, programs=programs, stream=True)


def _download(model: Model) -> None:
    """Bring the model into this user's cache. The program that does it shows a bar, or says why it
    cannot; Ctrl-C reaches it, too, and the next start goes on where it was."""
    command = [sys.executable, "-P", "-m", "xpyd_core", "model", "download", model.uri]
    command += [f"--revision={model.revision}"] if model.revision else []
    command += [f"--endpoint-url={model.endpoint_url}"] if model.endpoint_url else []
    command.append(f"--to={downloaded_folder(model)}")
    sys.stdout.write(f"downloading {model.uri}\n")
    sys.stdout.flush()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise UserError(f"spec.model.uri: {model.uri} was not downloaded: the reason is above")


def plan_fleet_memory(fleet: InferenceFleet, folder: Path) -> MemoryPlan:
    """The memory plan on this machine now; UserError when model or memory are missing, or where the
    model cannot be divided as its pools say."""
    model = locate_model(fleet.spec.model, folder)
    check_layouts(fleet, model)
    pools = pools_wanted(fleet_want(fleet, model=model), ())
    return plan_engines(fleet, pools, model, read_machine())


def supervise(options: UpOptions, *, programs: Programs = _OURS, stream: bool) -> int:
    """Be the supervisor until the fleet is down. `stream`: pods' lines go to standard output."""
    set_up_logging(options.log_level, options.log_format)
    fleet = load_fleet(Path(options.file), local=True)
    check_local(fleet, source=options.file, vllm=options.vllm_command)
    state = FleetFolder(state_root() / fleet.name)
    with (
        _locked(state),
        _claimed(state) as claim,
        _listening(options.port) as listener,
        listen_from(ROUTER_HOST, ROUTER_ADMIN_PORT) as admin,
    ):
        state.clear()
        state.write_key()
        settings = LocalSettings(
            fleet=fleet.name,
            index=claim.index,
            router_port=listener.getsockname()[1],
            admin_port=admin.getsockname()[1],
            key_file=state.key_file,
            socket_folder=state.sockets,
            memory=plan_fleet_memory(fleet, options.folder),
            log_level=options.log_level,
            log_format=options.log_format,
            log_limit=options.log_limit,
            api_key_file=options.api_key_file,
            certificate=options.ssl_certfile,
            certificate_key=options.ssl_keyfile,
            vllm=options.vllm_command,
        )
        if options.port is None and settings.router_port != ROUTER_HTTP_PORT:
            _log.info(
                "port %d is taken, the router gets %d", ROUTER_HTTP_PORT, settings.router_port
            )
        supervisor = Supervisor(
            fleet=fleet,
            folder=options.folder,
            state=state,
            settings=settings,
            claim=claim,
            listeners=(listener, admin),
            programs=programs,
        )
        signals = asyncio.run(_run(supervisor, state, stream=stream))
        state.forget()
    _log.info("fleet %s is down", fleet.name)
    return EXIT_INTERRUPTED if signal.SIGINT in signals else 0


@contextlib.contextmanager
def _locked(state: FleetFolder) -> Generator[None]:
    """Make this fleet's folder, and hold its lock until the end."""
    state.make()
    lock = state.lock()
    if lock is None:
        raise UserError(f"fleet {state.fleet} is already running")
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _claimed(state: FleetFolder) -> Generator[AddressClaim]:
    """Hold a free block of addresses until the end."""
    claim = claim_addresses(state.folder.parent)
    try:
        yield claim
    finally:
        for descriptor in claim.descriptors:
            os.close(descriptor)


async def _run(supervisor: Supervisor, state: FleetFolder, *, stream: bool) -> set[int]:
    """Run the fleet to its end; the signals that came."""
    loop = asyncio.get_running_loop()
    signals: set[int] = set()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _on_signal, supervisor, signals, number)
    loop.add_signal_handler(signal.SIGCHLD, supervisor.wake)
    with explained(state.folder):
        listener = control.listen(state.socket)
    server = await control.serve(listener, lambda ask: handle(supervisor, ask, time.monotonic()))
    streaming = asyncio.create_task(_stream(supervisor)) if stream else None
    try:
        await supervisor.run()
    finally:
        server.close()
        if streaming is not None:
            streaming.cancel()
            await asyncio.gather(streaming, return_exceptions=True)
    return signals


def _on_signal(supervisor: Supervisor, signals: set[int], number: int) -> None:
    signals.add(number)
    if supervisor.is_stopping:
        _log.warning("killing what is left")
        supervisor.kill()
    else:
        _log.info("draining; once more to kill")
        supervisor.stop()


async def _stream(supervisor: Supervisor) -> None:
    width = max((len(pod.pod.name) for pod in supervisor.pods), default=0)
    streamer = LogStreamer(PrefixWriter(sys.stdout, width))
    pods: dict[str, Path] = {}

    def poll() -> None:
        pods.update((pod.pod.name, pod.log) for pod in supervisor.pods)
        streamer.poll(pods.items())

    try:
        while True:
            poll()
            await asyncio.sleep(_STREAM_EVERY_S)
    finally:
        poll()


def _listening(asked: int | None) -> socket.socket:
    """The socket that clients connect to, which each router of the fleet inherits."""
    if asked is None:
        return listen_from(ROUTER_HOST, ROUTER_HTTP_PORT)
    try:
        return listen_from(ROUTER_HOST, asked, tries=1)
    except UserError as error:
        raise UserError(f"--port {asked}: {ROUTER_HOST}:{asked} is taken") from error


def _run_detached(options: UpOptions, state: FleetFolder, daemon: tuple[str, ...]) -> int:
    text = msgspec.json.encode(options).decode()
    with explained(state.folder):
        state.supervisor_log.unlink(missing_ok=True)
        # Appended to, so that it can be cut while it is written to.
        log = state.supervisor_log.open("ab")
    with log:
        child = subprocess.Popen(
            [*daemon, text],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        view = wait_settled(
            state, timeout_s=options.timeout_s, has_ended=lambda: child.poll() is not None
        )
    except (FleetFailed, KeyboardInterrupt):
        _end(child)  # half a fleet is of no use
        raise
    child.returncode = 0  # the supervisor outlives this process on purpose: Popen must not warn
    sys.stdout.write(
        f"fleet {view.fleet} is ready: {view.endpoint}\n"
        f"  metrics and instances: {view.admin}/metrics, {view.admin}/instances\n"
        f"  xpyd chat {view.fleet} 'Hello!'\n"
        f"  xpyd status {view.fleet}\n"
        f"  xpyd down {view.fleet}\n"
    )
    return 0


def _end(supervisor: subprocess.Popen[bytes]) -> None:
    """Drain its fleet, and kill it where that takes long, or at a second Ctrl-C."""
    supervisor.terminate()
    try:
        supervisor.wait(_DRAIN_FAILED_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        supervisor.terminate()
        supervisor.wait()


def _apply_to_running(options: UpOptions, state: FleetFolder) -> int:
    if options.port is not None:
        raise UserError(f"--port: fleet {state.fleet} is running; take it down to move it")
    if (options.log_max_bytes, options.log_max_files) != (None, None):
        raise UserError(
            f"--log-max-size, --log-max-files: fleet {state.fleet} is running; take it down to"
            " change how much of its logs is kept"
        )
    document = Path(options.file).read_text(encoding="utf-8")
    ask = control.ApplyRequest(
        document,
        source=options.file,
        folder=str(options.folder),
        vllm=options.vllm,
        api_key_file=options.api_key_file,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    answer = control.send_request(state.socket, ask)
    sys.stdout.write(f"fleet {state.fleet} is running; the document was handed over\n")
    sys.stdout.writelines(f"  {line}\n" for line in answer.lines)
    view = wait_settled(state, timeout_s=options.timeout_s)
    sys.stdout.write(f"fleet {view.fleet} is ready: {view.endpoint}\n")
    return 0


def main(programs: Programs = _OURS) -> int:
    """Be the detached supervisor that argv[1] describes; the exit status. Its output goes to
    supervisor.log."""
    options = msgspec.json.decode(sys.argv[1], type=UpOptions)
    try:
        return supervise(options, programs=programs, stream=False)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())

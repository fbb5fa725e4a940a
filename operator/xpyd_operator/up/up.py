"""`xpyd up`: check everything, then supervise here, or hand over to a detached supervisor.

A fleet that runs already gets the changed document instead: its supervisor plans the difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import msgspec

from xpyd_core.errors import UserError
from xpyd_core.logs import set_up_logging
from xpyd_core.pod_env import ROUTER_HTTP_PORT
from xpyd_operator.document import InferenceFleet, load_fleet
from xpyd_operator.plan import ROUTER, fleet_want, pools_wanted
from xpyd_operator.up import control, service
from xpyd_operator.up.checkpoint import locate_model, weights_bytes
from xpyd_operator.up.cluster_only import check_local, cluster_only
from xpyd_operator.up.console import PrefixWriter, Streamer
from xpyd_operator.up.layouts import check_layouts
from xpyd_operator.up.machine import read_machine
from xpyd_operator.up.memory import MemoryPlan, plan_memory
from xpyd_operator.up.pods import ROUTER_HOST, Program, Site, xpyd_program
from xpyd_operator.up.roster import check_addresses
from xpyd_operator.up.state import (
    AddressClaim,
    FleetState,
    claim_addresses,
    free_port,
    state_root,
)
from xpyd_operator.up.supervisor import Supervisor
from xpyd_operator.up.wait import FleetFailed, wait_settled

_log = logging.getLogger("xpyd.up")
_STREAM_EVERY_S = 0.1
_DRAIN_FAILED_S = 5.0
DAEMON = (sys.executable, "-P", "-m", "xpyd_operator.up.daemon")


class UpOptions(msgspec.Struct, frozen=True):
    """The flags of `xpyd up`. `file` is absolute; `timeout_s` bounds the wait of --detach."""

    file: str
    port: int | None = None
    log_level: str = "info"
    log_format: str = "text"
    timeout_s: float = 300.0

    @property
    def folder(self) -> Path:
        """Where the document's relative paths begin."""
        return Path(self.file).parent


def run_up(
    options: UpOptions,
    *,
    detach: bool,
    program: Program = xpyd_program,
    daemon: tuple[str, ...] = DAEMON,
) -> int:
    """The command; `program` and `daemon` are what tests replace by stand-ins."""
    fleet = _load(options)
    if line := cluster_only(fleet):
        sys.stdout.write(line + "\n")
    state = FleetState(state_root() / fleet.name)
    if state.is_supervised():
        return _apply_to_running(options, state)
    if orphans := state.orphans():
        raise UserError(
            f"fleet {fleet.name}: {len(orphans)} processes of a supervisor that died are still"
            f" there; end them with `xpyd down {fleet.name}`"
        )
    memory = plan_fleet_memory(fleet, options.folder)
    _router_port(options.port)
    sys.stdout.write(memory.table() + "\n")
    sys.stdout.flush()
    if detach:
        return _run_detached(options, state, daemon)
    return supervise(options, program=program, stream=True)


def _load(options: UpOptions) -> InferenceFleet:
    fleet = load_fleet(Path(options.file), local=True)
    check_local(fleet, source=options.file)
    return fleet


def plan_fleet_memory(fleet: InferenceFleet, folder: Path) -> MemoryPlan:
    """The memory plan on this machine now; UserError when model or memory are missing, or where the
    model cannot be divided as its pools say."""
    model = locate_model(fleet.spec.model.uri, folder)
    check_layouts(fleet, model)
    pools = pools_wanted(fleet_want(fleet, model=model), ())
    replicas = [pool.replicas for pool in pools if pool.name != ROUTER]
    check_addresses(sum(replicas))
    weights = weights_bytes(model, fleet.spec.engine.args)
    return plan_memory(fleet, replicas, read_machine(), weights_bytes=weights)


def supervise(options: UpOptions, *, program: Program = xpyd_program, stream: bool) -> int:
    """Be the supervisor until the fleet is down. `stream`: pods' lines go to standard output."""
    set_up_logging(options.log_level, options.log_format)
    fleet = _load(options)
    state = FleetState(state_root() / fleet.name)
    state.make()
    with _held(state) as claim:
        for log in state.logs.iterdir():
            log.unlink()
        state.write_key()
        site = Site(
            fleet=fleet.name,
            index=claim.index,
            router_port=_router_port(options.port),
            key_file=state.key_file,
            socket_folder=state.sockets,
            memory=plan_fleet_memory(fleet, options.folder),
            log_level=options.log_level,
            log_format=options.log_format,
        )
        if options.port is None and site.router_port != ROUTER_HTTP_PORT:
            _log.info("port %d is taken, the router gets %d", ROUTER_HTTP_PORT, site.router_port)
        supervisor = Supervisor(
            fleet=fleet,
            folder=options.folder,
            state=state,
            site=site,
            claim=claim,
            program=program,
        )
        asyncio.run(_run(supervisor, state, stream=stream))
        state.forget()
    _log.info("fleet %s is down", fleet.name)
    return 0


@contextlib.contextmanager
def _held(state: FleetState) -> Generator[AddressClaim]:
    """This fleet's lock and a free block of addresses, until the end."""
    lock = state.lock()
    if lock is None:
        raise UserError(f"fleet {state.fleet} is already running")
    try:
        claim = claim_addresses(state.folder.parent)
        try:
            yield claim
        finally:
            for descriptor in claim.descriptors:
                os.close(descriptor)
    finally:
        os.close(lock)


async def _run(supervisor: Supervisor, state: FleetState, *, stream: bool) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _on_signal, supervisor)
    loop.add_signal_handler(signal.SIGCHLD, supervisor.wake)
    listener = control.listen(state.socket)
    server = await control.serve(
        listener, lambda ask: service.handle(supervisor, ask, time.monotonic())
    )
    streaming = asyncio.create_task(_stream(supervisor)) if stream else None
    try:
        await supervisor.run()
    finally:
        server.close()
        if streaming is not None:
            streaming.cancel()
            await asyncio.gather(streaming, return_exceptions=True)


def _on_signal(supervisor: Supervisor) -> None:
    if supervisor.is_stopping:
        _log.warning("killing what is left")
        supervisor.kill()
    else:
        _log.info("draining; once more to kill")
        supervisor.stop()


async def _stream(supervisor: Supervisor) -> None:
    width = max((len(pod.pod.name) for pod in supervisor.roster), default=0)
    streamer = Streamer(PrefixWriter(sys.stdout, width))
    pods: dict[str, Path] = {}

    def poll() -> None:
        pods.update((pod.pod.name, pod.log) for pod in supervisor.roster)
        streamer.poll(pods.items())

    try:
        while True:
            poll()
            await asyncio.sleep(_STREAM_EVERY_S)
    finally:
        poll()


def _router_port(asked: int | None) -> int:
    if asked is None:
        return free_port(ROUTER_HOST, ROUTER_HTTP_PORT)
    try:
        return free_port(ROUTER_HOST, asked, tries=1)
    except UserError as error:
        raise UserError(f"--port {asked}: {ROUTER_HOST}:{asked} is taken") from error


def _run_detached(options: UpOptions, state: FleetState, daemon: tuple[str, ...]) -> int:
    state.make()
    text = msgspec.json.encode(options).decode()
    with state.supervisor_log.open("wb") as log:
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
    child.returncode = 0  # it outlives us on purpose: Popen must not warn
    sys.stdout.write(
        f"fleet {view.fleet} is ready: {view.endpoint}\n"
        f"  xpyd chat {view.fleet} 'Hello!'\n"
        f"  xpyd status {view.fleet}\n"
        f"  xpyd down {view.fleet}\n"
    )
    return 0


def _end(supervisor: subprocess.Popen[bytes]) -> None:
    """Drain its fleet, and kill it where that takes long."""
    supervisor.terminate()
    try:
        supervisor.wait(_DRAIN_FAILED_S)
    except subprocess.TimeoutExpired:
        supervisor.terminate()
        supervisor.wait()


def _apply_to_running(options: UpOptions, state: FleetState) -> int:
    if options.port is not None:
        raise UserError(f"--port: fleet {state.fleet} is running; take it down to move it")
    document = Path(options.file).read_text(encoding="utf-8")
    ask = control.AskApply(document, source=options.file, folder=str(options.folder))
    answer = control.ask(state.socket, ask)
    sys.stdout.write(f"fleet {state.fleet} is running; the document was handed over\n")
    sys.stdout.writelines(f"  {line}\n" for line in answer.lines)
    view = wait_settled(state, timeout_s=options.timeout_s)
    sys.stdout.write(f"fleet {view.fleet} is ready: {view.endpoint}\n")
    return 0

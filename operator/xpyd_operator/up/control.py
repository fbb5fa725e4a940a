"""The supervisor's control socket and its messages: one JSON line asks, one JSON line answers.

The socket has mode 0600 in a folder of mode 0700, so only the user can connect. Both lines are
limited in size and time. `apply` carries the document itself, which is checked again on arrival.
The answer to `status` is the view that `xpyd status` shows and `--output json` prints; its field
names are stable between versions, and new fields are only added.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from xpyd_core.errors import UserError, XpydError

ONE_RANK = "TP1xPP1"


class PodView(msgspec.Struct, frozen=True):
    """One instance. `state`: Starting, Ready, NotReady, Draining, Restarting or Orphaned.

    `http` and `kv` are its addresses (`kv` empty for the router), `reason` says why it is not
    Ready, `failures` counts exits in a row, `restarts` all of them; `exit_status` is the last
    process's (negative: the signal that killed it), null before a first exit, and `last_exit` says
    it in words. `layout`: how it splits the model, such as TP2xPP2; empty for the router.
    """

    name: str
    pool: str
    role: str
    state: str
    address: str
    http: str
    kv: str
    pid: int
    restarts: int
    failures: int
    age_s: float
    revision: str
    reason: str = ""
    log: str = ""
    exit_status: int | None = None
    layout: str = ""
    last_exit: str = ""


class PoolView(msgspec.Struct, frozen=True):
    """One pool; `desired` and `ready` count instances, `layout` is that of new ones."""

    name: str
    role: str
    desired: int
    ready: int
    revision: str
    layout: str = ""


class KvRow(msgspec.Struct, frozen=True):
    """Requests by what became of their KV; the router counts them since its start. An instance that
    served alone has the other's name empty."""

    prefill: str
    decode: str
    outcome: str
    cause: str
    requests: int


class KvView(msgspec.Struct, frozen=True):
    """Whether KV arrives, as a fleet's condition KVTransferVerified says it on Kubernetes.
    `verified`: True, False or Unknown."""

    verified: str
    reason: str
    message: str
    outcomes: tuple[KvRow, ...] = ()


class FleetView(msgspec.Struct, frozen=True):
    """One fleet. `endpoint` is for clients, `admin` the router's port of metrics and instances.
    `reason`: Ready, Progressing, Draining, Stopped or Orphaned. `problems` are
    sentences about what people should mend though the fleet serves. `kv`: None where no supervisor
    runs."""

    fleet: str
    endpoint: str
    ready: bool
    reason: str
    message: str
    supervisor_pid: int
    pools: tuple[PoolView, ...] = ()
    pods: tuple[PodView, ...] = ()
    problems: tuple[str, ...] = ()
    kv: KvView | None = None
    admin: str = ""


def view_json(view: FleetView) -> str:
    """The status as `--output json` prints it."""
    return msgspec.json.format(msgspec.json.encode(view), indent=2).decode()


def view_tables(view: FleetView) -> str:
    """The status as a table for people."""
    state = view.reason if not view.message else f"{view.reason} ({view.message})"
    pools = [("POOL", "ROLE", "DESIRED", "READY", "REVISION")]
    pools += [(p.name, p.role, str(p.desired), str(p.ready), p.revision) for p in view.pools]
    # Instances of one rank each have no layout to show.
    has_layouts = any(pod.layout not in ("", ONE_RANK) for pod in view.pods)
    layout = ("LAYOUT",) if has_layouts else ()
    pods: list[tuple[str, ...]] = [
        ("POD", "ROLE", *layout, "STATE", "HTTP", "PID", "RESTARTS", "AGE")
    ]
    for pod in view.pods:
        shown = f"{pod.state} ({pod.reason})" if pod.reason else pod.state
        pid = str(pod.pid) if pod.pid else "-"
        # As kubectl, which says there how long ago.
        restarts = f"{pod.restarts} ({pod.last_exit})" if pod.restarts else "0"
        layout = (pod.layout or "-",) if has_layouts else ()
        rest = (shown, pod.http, pid, restarts, age(pod.age_s))
        pods.append((pod.name, pod.role, *layout, *rest))
    head = [f"fleet {view.fleet}  {state}  {view.endpoint}"]
    if view.admin:
        head[0] += f"  (admin port: {view.admin})"
    parts = ["\n".join([*head, *(f"problem: {problem}" for problem in view.problems)])]
    kv = [("KV", "CAUSE", "PREFILL", "DECODE", "REQUESTS")]
    kv += [
        (row.outcome, row.cause or "-", row.prefill or "-", row.decode or "-", str(row.requests))
        for row in (view.kv.outcomes if view.kv else ())
    ]
    parts += [table(rows) for rows in (pools, pods, kv) if len(rows) > 1]
    return "\n\n".join(parts)


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def age(seconds: float) -> str:
    """12s, 5m, 3h, 2d"""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


MAX_LINE_BYTES = 4 << 20
DEADLINE_S = 10.0
MAX_CONNECTIONS = 8

_log = logging.getLogger(__name__)


class StatusRequest(msgspec.Struct, frozen=True, tag="status"):
    """The whole view."""


class ScaleRequest(msgspec.Struct, frozen=True, tag="scale"):
    """Give a pool so many replicas."""

    pool: str
    replicas: int


class ApplyRequest(msgspec.Struct, frozen=True, tag="apply"):
    """Take a changed document; `folder` is where its relative paths begin. The rest are flags that
    the user gave: they cannot change."""

    document: str
    source: str
    folder: str
    vllm: str | None = None
    api_key_file: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None


class DownRequest(msgspec.Struct, frozen=True, tag="down"):
    """Drain and exit. `timeout_s`: kill what is left then; None: the document's drain timeout."""

    timeout_s: float | None = None


ControlRequest = StatusRequest | ScaleRequest | ApplyRequest | DownRequest


class ControlResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """`error` is empty on success; `lines` say what happened."""

    error: str = ""
    lines: tuple[str, ...] = ()
    view: FleetView | None = None


class NotRunning(XpydError):
    """No supervisor answers on the socket."""


_ask_decoder = msgspec.json.Decoder(ControlRequest)
_answer_decoder = msgspec.json.Decoder(ControlResponse)


def listen(path: Path) -> socket.socket:
    """A socket at `path` for its owner alone; what a dead supervisor left there is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)
    try:
        with short_address(path) as address:
            path.unlink(missing_ok=True)
            listener.bind(address)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(old_mask)
    return listener


async def serve(
    listener: socket.socket, handle: Callable[[ControlRequest], ControlResponse]
) -> asyncio.Server:
    """Answer on `listener`. `handle` runs in the loop; its UserError becomes `error`."""
    open_connections = 0

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_connections
        open_connections += 1
        try:
            if open_connections <= MAX_CONNECTIONS:
                async with asyncio.timeout(DEADLINE_S):
                    line = await reader.readuntil(b"\n")
                    writer.write(msgspec.json.encode(_answer(line, handle)) + b"\n")
                    await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError) as error:
            _log.warning("control connection: %s", error)
        finally:
            open_connections -= 1
            writer.close()

    return await asyncio.start_unix_server(on_connect, sock=listener, limit=MAX_LINE_BYTES)


def _answer(line: bytes, handle: Callable[[ControlRequest], ControlResponse]) -> ControlResponse:
    try:
        return handle(_ask_decoder.decode(line))
    except msgspec.DecodeError as error:
        return ControlResponse(error=f"control request: {error}")
    except UserError as error:
        return ControlResponse(error=str(error))
    except OSError as error:
        return ControlResponse(error=f"the supervisor cannot do that now: {error}")


def send_request(path: Path, request: ControlRequest) -> ControlResponse:
    """Ask the supervisor behind `path`. NotRunning if there is none, UserError if it refused."""
    line = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(DEADLINE_S)
        try:
            with short_address(path) as address:
                connection.connect(address)
            connection.sendall(msgspec.json.encode(request) + b"\n")
            while not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES:
                part = connection.recv(1 << 16)
                if not part:
                    break
                line += part
        except OSError as error:
            raise NotRunning(f"{path}: {error.strerror or error}") from error
    try:
        answer = _answer_decoder.decode(line)
    except msgspec.DecodeError as error:
        raise NotRunning(f"{path}: no answer") from error
    if answer.error:
        raise UserError(answer.error)
    return answer


@contextmanager
def short_address(path: Path) -> Generator[str]:
    """`path` for bind and connect, whose limit is 107 bytes: through its folder's descriptor."""
    if len(os.fsencode(path)) <= 100:
        yield str(path)
        return
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    except FileNotFoundError as error:
        raise NotRunning(f"{path}: no such folder") from error
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)

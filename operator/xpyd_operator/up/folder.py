"""The folder of a local fleet, which outlives a call: ${XDG_STATE_HOME}/xpyd/FLEET.

    lock         locked (flock) by the supervisor while it lives
    fleet.json   what runs: supervisor, pods with their pids and addresses (FleetRecord)
    control.sock the supervisor's control socket
    key          the fleet's secret, mode 0600, made anew by each supervisor
    sockets/     where the engines find each other, for KV that need not go through TCP
    logs/        one file for each pod, and the supervisor's own when it is detached

Only the supervisor writes; `down` and `status` read, also after its death. The folder has mode
0700. A process is known by pid, start time and boot, which a reused pid does not share; signals go
through a pidfd that is checked after it was opened, so none reaches another process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from xpyd_core.errors import UserError

_START_TIME_FIELD = 22
_STATE_FIELD = 3


class ProcessId(msgspec.Struct, frozen=True):
    """One process of one boot. `start_ticks`: field 22 of /proc/PID/stat."""

    pid: int
    start_ticks: int
    boot: str

    def is_alive(self) -> bool:
        """Whether this very process runs; a zombie does not."""
        fields = _stat(self.pid)
        if fields is None or fields[_STATE_FIELD] in ("Z", "X"):
            return False
        return int(fields[_START_TIME_FIELD]) == self.start_ticks and _boot_id() == self.boot

    def signal(self, number: signal.Signals, *, group: bool = False) -> bool:
        """Send a signal to the process, or to its group, which it leads. False: it is gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            # The pidfd refers to the process that has the pid now; only then is it compared.
            if not self.is_alive():
                return False
            if group:
                # The leader lives, so its group's number cannot belong to another group.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


def identify(pid: int) -> ProcessId:
    """The identity of a process that certainly exists: one's own, or an unreaped child."""
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(pid)
    return ProcessId(pid, int(fields[_START_TIME_FIELD]), _boot_id())


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat by their number in proc(5), from 3 on; None: no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # Field 2 is the command in parentheses and may hold anything, also parentheses.
    return ["", "", "", *text[text.rindex(")") + 2 :].split()]


@cache
def _boot_id() -> str:
    """Read once: it does not change, and later there may be no descriptor left to read it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


MAX_RECORD_BYTES = 4 << 20
DISCOVERY_PORT = 30001
MAX_FLEETS = 254
_ROOM_BYTES = 1 << 20
"""Free space without which a fleet does not start: records, and the first lines of its logs."""
_BACKLOG = 4096
"""Clients that wait for a router that starts, as many as a router's own socket takes."""
_LOCK_TRIES = 20
_LOCK_RETRY_S = 0.02


class PodRecord(msgspec.Struct, frozen=True):
    """One pod's process."""

    name: str
    address: str
    process: ProcessId


class FleetRecord(msgspec.Struct, frozen=True):
    """What a supervisor writes to disk about its fleet."""

    fleet: str
    endpoint: str
    supervisor: ProcessId
    drain_timeout_s: float
    pods: tuple[PodRecord, ...] = ()


def state_root(environ: Mapping[str, str] | None = None) -> Path:
    """${XDG_STATE_HOME:-~/.local/state}/xpyd"""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_STATE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "state") / "xpyd"
    except RuntimeError as error:
        raise UserError(f"this user has no home folder; {_ELSEWHERE}") from error


_ELSEWHERE = "set XDG_STATE_HOME to a folder that you may write to"
_NO_ROOM = f"free some space there, or {_ELSEWHERE}"
_FIXES = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.ENOTDIR: f"a file is where a folder is needed: move it away, or {_ELSEWHERE}",
    errno.EEXIST: f"a file is where a folder is needed: move it away, or {_ELSEWHERE}",
}


@contextlib.contextmanager
def explained(folder: Path) -> Generator[None]:
    """Replace an OSError by a UserError that names the state folder and the fix."""
    try:
        yield
    except OSError as error:
        what = error.filename if isinstance(error.filename, str) else folder
        fix = _FIXES.get(error.errno or 0, _ELSEWHERE)
        raise UserError(f"state folder {what}: {error.strerror or error}; {fix}") from error


def _refuse_foreign(folder: Path) -> None:
    """UserError where the folder is another user's: root would leave files there that its owner
    cannot write, and who owns the folder can read the key."""
    owner = folder.stat().st_uid
    if owner != os.geteuid():
        try:
            name = pwd.getpwuid(owner).pw_name
        except KeyError:
            name = f"user {owner}"
        raise UserError(
            f"state folder {folder}: it belongs to {name}; run xpyd as {name}, or {_ELSEWHERE}"
        )


@dataclass(frozen=True)
class FleetFolder:
    """The folder of one fleet."""

    folder: Path

    @property
    def fleet(self) -> str:
        """The fleet's name."""
        return self.folder.name

    @property
    def key_file(self) -> Path:
        """The fleet's secret."""
        return self.folder / "key"

    @property
    def record(self) -> Path:
        """What runs."""
        return self.folder / "fleet.json"

    @property
    def socket(self) -> Path:
        """The control socket."""
        return self.folder / "control.sock"

    @property
    def sockets(self) -> Path:
        """The folder of the engines' KV sockets."""
        return self.folder / "sockets"

    @property
    def logs(self) -> Path:
        """The folder of the pods' logs."""
        return self.folder / "logs"

    @property
    def supervisor_log(self) -> Path:
        """The output of a detached supervisor."""
        return self.folder / "supervisor.log"

    def log_of(self, pod: str) -> Path:
        """The log of one pod."""
        return self.logs / f"{pod}.log"

    def make(self) -> None:
        """Create the folders, readable by their owner alone. UserError where that cannot be."""
        with explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for folder in (self.folder.parent, self.folder):
                _refuse_foreign(folder)
            for folder in (self.folder, self.logs, self.sockets):
                folder.mkdir(exist_ok=True)
                folder.chmod(0o700)

    def clear(self) -> None:
        """Begin with empty logs, and check that there is room for new ones. The lock must be held.

        UserError where the disk is full.
        """
        room = self.folder / "room"
        with explained(self.folder):
            for log in self.logs.iterdir():
                log.unlink()
            try:
                with room.open("wb") as file:
                    file.write(bytes(_ROOM_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
            finally:
                room.unlink(missing_ok=True)

    def write_key(self) -> None:
        """A new secret in the key file."""
        with explained(self.folder):
            self.key_file.unlink(missing_ok=True)
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
            with os.fdopen(os.open(self.key_file, flags, 0o600), "w") as file:
                file.write(secrets.token_hex(32) + "\n")

    def write_record(self, record: FleetRecord) -> None:
        """Replace fleet.json atomically, so that a reader never sees a part of it."""
        fresh = self.folder / "fleet.json.new"
        fresh.write_bytes(msgspec.json.encode(record))
        fresh.replace(self.record)

    def read_record(self) -> FleetRecord | None:
        """fleet.json, None where there is none or it is not readable as one."""
        try:
            with self.record.open("rb") as file:
                return msgspec.json.decode(file.read(MAX_RECORD_BYTES), type=FleetRecord)
        except (OSError, msgspec.DecodeError):
            return None

    def forget(self) -> None:
        """Remove the runtime files; logs stay."""
        with explained(self.folder):
            for name in ("control.sock", "fleet.json", "fleet.json.new", "key"):
                (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.sockets, ignore_errors=True)  # a killed engine leaves its socket

    def lock(self) -> int | None:
        """The supervisor's lock as an open descriptor, None while another supervisor has it."""
        for _ in range(_LOCK_TRIES):  # another is_supervised() may hold it for an instant
            with explained(self.folder):
                descriptor = _flock(self.folder / "lock")
            if descriptor is not None:
                return descriptor
            time.sleep(_LOCK_RETRY_S)
        return None

    def is_supervised(self) -> bool:
        """Whether a supervisor lives."""
        with explained(self.folder):
            try:
                descriptor = _flock(self.folder / "lock", shared=True)
            except (FileNotFoundError, NotADirectoryError):
                return False
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None

    def orphans(self) -> tuple[PodRecord, ...]:
        """Pods that still run although their supervisor does not."""
        record = self.read_record()
        if record is None or self.is_supervised():
            return ()
        return tuple(pod for pod in record.pods if pod.process.is_alive())


def find_fleets(root: Path) -> list[FleetFolder]:
    """Fleets that run, or of which processes are left, sorted by name."""
    with explained(root):
        try:
            names = sorted(name for name in os.listdir(root) if not name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
    found = (FleetFolder(root / name) for name in names)
    return [state for state in found if state.is_supervised() or state.orphans()]


def find_fleet(root: Path, name: str | None) -> FleetFolder:
    """The named fleet, or the only one; UserError says which there are."""
    running = find_fleets(root)
    names = ", ".join(state.fleet for state in running)
    if name is None:
        if len(running) == 1:
            return running[0]
        if not running:
            raise UserError("no fleet is running; start one with `xpyd up -f FILE`")
        raise UserError(f"several fleets are running, say which: {names}")
    for state in running:
        if state.fleet == name:
            return state
    raise UserError(f"fleet {name!r} is not running; running: {names or 'none'}")


@dataclass(frozen=True)
class AddressClaim:
    """The claim to 127.1.`index`.*, held as long as one process has the descriptors open."""

    index: int
    descriptors: tuple[int, ...]


def claim_addresses(root: Path) -> AddressClaim:
    """The first free fleet index.

    A lock file keeps it from this user's other fleets and a bound UDP port from other users'. The
    pods inherit both, so the addresses stay taken while orphans live.
    """
    folder = root / ".index"
    for index in range(1, MAX_FLEETS + 1):
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = _flock(folder / str(index))
        if lock is None:
            continue
        udp = _bind(f"127.1.{index}.1", DISCOVERY_PORT, socket.SOCK_DGRAM)
        tcp = _bind(f"127.1.{index}.1", DISCOVERY_PORT, socket.SOCK_STREAM)
        if tcp is not None:
            tcp.close()
        if udp is not None and tcp is not None:
            return AddressClaim(index, (lock, udp.detach()))
        if udp is not None:
            udp.close()
        os.close(lock)
    raise UserError(f"no free addresses: all of 127.1.1.* to 127.1.{MAX_FLEETS}.* are taken")


def listen_from(host: str, first: int, *, tries: int = 100) -> socket.socket:
    """A listening socket on the first port from `first` on that can be had on `host`."""
    for port in range(first, min(first + tries, 65536)):
        found = _bind(host, port, socket.SOCK_STREAM)
        if found is not None:
            return found
    raise UserError(f"no free port on {host} from {first} to {first + tries - 1}; say --port")


def _bind(host: str, port: int, kind: socket.SocketKind) -> socket.socket | None:
    bound = socket.socket(socket.AF_INET, kind)
    try:
        if kind == socket.SOCK_STREAM:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        if kind == socket.SOCK_STREAM:
            bound.listen(_BACKLOG)  # with SO_REUSEADDR only listen() fails on a port in use
    except OSError:
        bound.close()
        return None
    return bound


def _flock(path: Path, *, shared: bool = False) -> int | None:
    # Who only looks whether it is locked makes no file.
    flags = os.O_RDONLY if shared else os.O_CREAT | os.O_RDWR
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise
    return descriptor

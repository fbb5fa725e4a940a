"""NCCL through ctypes, over the library that torch brings: its calls and its bounds.

Communicators are non-blocking: `init` and `group` return while NCCL still works, and until
`is_ready` says so nothing else may be asked of that communicator but `abort`. All calls may raise
NcclError; any thread may call, one at a time for each communicator. Only what has been stable since
NCCL 2.17 is used. Unverified on hardware: what needs no GPU is tested, communicators are not.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from xpyd_core.errors import UserError
from xpyd_kv.metrics import Names

ID_BYTES = 128
SENDER, RECEIVER = 0, 1
"""Ranks: P and D."""


class NcclError(OSError):
    """NCCL refused or failed; the communicator is of no use any more."""


class Buffer(NamedTuple):
    """`length` bytes of device memory from `address` on: one message."""

    address: int
    length: int


MAX_CHANNELS = 32
# What a communicator of two ranks takes on each GPU: 100 MB with 16 channels, 52 MB with 8, so 6 MB
# for each channel and 4 MB besides.
_BYTES_PER_CHANNEL = 6_000_000
_BYTES_BESIDES = 4_000_000


def communicator_bytes(channels: int) -> int:
    """Memory that one communicator takes on each of its two GPUs, about."""
    return _BYTES_BESIDES + channels * _BYTES_PER_CHANNEL


@dataclass(frozen=True)
class NcclLimits:
    """UserError for a number of channels that NCCL does not take."""

    channels: int = 8
    """The channels of one communicator; more are faster and take more memory and more of the
    GPU."""
    max_communicators: int = 64
    """At once on one GPU. Pairs beyond that move KV through their sockets."""
    make_s: float = 10.0
    """Until both ranks must have met."""
    frame_s: float = 10.0
    """Until the messages of a frame must be through."""
    abort_s: float = 5.0
    """Until an aborted communicator must have let go of the GPU."""
    idle_s: float = 60.0
    """P ends a communicator after this time without a frame, D after twice this time."""

    def __post_init__(self) -> None:
        if not 1 <= self.channels <= MAX_CHANNELS:
            raise UserError(f"NCCL channels: {self.channels}; expected 1 to {MAX_CHANNELS}")

    @property
    def most_bytes(self) -> int:
        """Memory of all communicators that may be there at once."""
        return self.max_communicators * communicator_bytes(self.channels)


@dataclass
class NcclMetrics:
    """Counts for metrics; the driver's thread writes them, any thread may read them."""

    communicators: int = 0
    """The communicators that exist now or are being made."""
    memory_bytes: int = 0
    """The memory that they take, about, with the memory that receives what has no place of its
    own."""
    made: int = 0
    ended: Names = field(default_factory=Names)
    """By reason: idle, closed (with its connection), failed, hung."""


_SUCCESS, _IN_PROGRESS = 0, 7
_INT8 = 0
_MAGIC = 0xCAFEBEEF
_OLDEST = 21700
_UNDEFINED = -(2**31)
_FILE = "libnccl.so.2"


class _Id(ctypes.Structure):
    _fields_ = (("internal", c_char * ID_BYTES),)


class _NcclConfig(ctypes.Structure):
    """ncclConfig_t of 2.17; `size` tells a later NCCL which one it is."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
    )


def load(current: Callable[[], AbstractContextManager[None]]) -> Nccl:
    """The library of the installed torch. `current` makes our GPU the calling thread's for a while.
    UserError when there is none, or one that is too old."""
    for path in (*_beside_torch(), _FILE):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        return Nccl(library, current)
    raise UserError(f"KV transport nccl: {_FILE} is not installed; a torch with CUDA brings it")


def _beside_torch() -> list[Path]:
    """Where torch's wheels put it. Looked for without importing torch."""
    found = importlib.util.find_spec("nvidia")
    roots = [] if found is None else list(found.submodule_search_locations or ())
    return [path for root in roots if (path := Path(root) / "nccl" / "lib" / _FILE).exists()]


class Nccl:
    """The library."""

    def __init__(
        self, library: ctypes.CDLL, current: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._library = library
        self._current = current
        library.ncclGetErrorString.restype = c_char_p
        library.ncclGetLastError.restype = c_char_p
        library.ncclCommInitRankConfig.argtypes = (c_void_p, c_int, _Id, c_int, c_void_p)
        number = c_int()
        self._check("ncclGetVersion", library.ncclGetVersion(byref(number)))
        self.version = number.value
        """Major, minor and patch as NCCL writes them: 23007 is 2.30.7. Both ranks must have the
        same one."""
        if self.version < _OLDEST:
            raise UserError(f"KV transport nccl: NCCL {self.version} is too old; 2.17 or newer")

    def new_id(self) -> bytes:
        """ID_BYTES by which both ranks of a new communicator find each other."""
        its = _Id()
        self._check("ncclGetUniqueId", self._library.ncclGetUniqueId(byref(its)))
        return bytes(its)

    def init(self, comm_id: bytes, rank: int, *, channels: int) -> int:
        """Begin to make this rank of a 2-rank communicator with at most `channels` channels, on our
        GPU: its handle."""
        config = _NcclConfig(
            size=ctypes.sizeof(_NcclConfig),
            magic=_MAGIC,
            version=_OLDEST,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=1,
            max_ctas=channels,
            net_name=None,
        )
        comm = c_void_p()
        its = _Id.from_buffer_copy(comm_id)
        with self._current():
            status = self._library.ncclCommInitRankConfig(byref(comm), 2, its, rank, byref(config))
        self._check("ncclCommInitRankConfig", status)
        return comm.value or 0

    def is_ready(self, comm: int) -> bool:
        """Whether what was begun has been enqueued (or made). NcclError for an asynchronous error
        of the communicator, whenever it happened."""
        state = c_int()
        status = self._library.ncclCommGetAsyncError(c_void_p(comm), byref(state))
        self._check("ncclCommGetAsyncError", status, comm)
        self._check("asynchronous error", state.value, comm)
        return state.value == _SUCCESS

    def group(self, comm: int, buffers: Sequence[Buffer], *, sends: bool, stream: int) -> None:
        """Begin to enqueue one group on `stream` (a driver's handle): a message to, or from, the
        other rank for each buffer, in order."""
        name = "ncclSend" if sends else "ncclRecv"
        call, peer = getattr(self._library, name), c_int(RECEIVER if sends else SENDER)
        rest = (c_int(_INT8), peer, c_void_p(comm), c_void_p(stream))
        with self._current():
            self._check("ncclGroupStart", self._library.ncclGroupStart(), comm)
            try:
                for address, length in buffers:
                    self._check(name, call(c_void_p(address), c_size_t(length), *rest), comm)
            finally:
                # Also after an error: an open group would swallow this thread's next calls.
                status = self._library.ncclGroupEnd()
        self._check("ncclGroupEnd", status, comm)

    def abort(self, comm: int) -> None:
        """End the communicator and what it has under way, here alone; the handle is gone. May take
        for ever: only on a thread that no other thread joins without a deadline."""
        self._check("ncclCommAbort", self._library.ncclCommAbort(c_void_p(comm)))

    def _check(self, name: str, status: int, comm: int | None = None) -> None:
        if status in (_SUCCESS, _IN_PROGRESS):
            return
        text: bytes = self._library.ncclGetErrorString(c_int(status)) or b""
        detail: bytes = self._library.ncclGetLastError(c_void_p(comm)) or b""
        raise NcclError(f"{name}: {text.decode()}; {detail.decode(errors='replace')}".rstrip("; "))

"""The seam's Nccl through ctypes, over the library that torch brings. Unverified on hardware: what
needs no GPU (finding it, its version, ids, refusals) is tested, communicators are not.

Only what has been stable since NCCL 2.17 is used; the configuration is that version's, which every
later one takes.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

from xpyd_core.errors import UserError
from xpyd_kv.transport.nccl.api import ID_BYTES, RECEIVER, SENDER, Buffer, NcclError

_SUCCESS, _IN_PROGRESS = 0, 7
_INT8 = 0
_MAGIC = 0xCAFEBEEF
_OLDEST = 21700
_UNDEFINED = -(2**31)
_FILE = "libnccl.so.2"


class _Id(ctypes.Structure):
    _fields_ = (("internal", c_char * ID_BYTES),)


class _Config(ctypes.Structure):
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


def load(current: Callable[[], AbstractContextManager[None]]) -> CtypesNccl:
    """The library of the installed torch. `current` makes our GPU the calling thread's for a while.
    UserError when there is none, or one that is too old."""
    for path in (*_beside_torch(), _FILE):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        return CtypesNccl(library, current)
    raise UserError(f"KV transport nccl: {_FILE} is not installed; a torch with CUDA brings it")


def _beside_torch() -> list[Path]:
    """Where torch's wheels put it. Looked for without importing torch."""
    found = importlib.util.find_spec("nvidia")
    roots = [] if found is None else list(found.submodule_search_locations or ())
    return [path for root in roots if (path := Path(root) / "nccl" / "lib" / _FILE).exists()]


class CtypesNccl:
    """See Nccl."""

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
        self._version = number.value
        if self._version < _OLDEST:
            raise UserError(f"KV transport nccl: NCCL {self._version} is too old; 2.17 or newer")

    @property
    def version(self) -> int:
        return self._version

    def new_id(self) -> bytes:
        its = _Id()
        self._check("ncclGetUniqueId", self._library.ncclGetUniqueId(byref(its)))
        return bytes(its)

    def init(self, comm_id: bytes, rank: int, *, channels: int) -> int:
        config = _Config(
            size=ctypes.sizeof(_Config),
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
        state = c_int()
        status = self._library.ncclCommGetAsyncError(c_void_p(comm), byref(state))
        self._check("ncclCommGetAsyncError", status, comm)
        self._check("asynchronous error", state.value, comm)
        return state.value == _SUCCESS

    def group(self, comm: int, buffers: Sequence[Buffer], *, sends: bool, stream: int) -> None:
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
        self._check("ncclCommAbort", self._library.ncclCommAbort(c_void_p(comm)))

    def _check(self, name: str, status: int, comm: int | None = None) -> None:
        if status in (_SUCCESS, _IN_PROGRESS):
            return
        text: bytes = self._library.ncclGetErrorString(c_int(status)) or b""
        detail: bytes = self._library.ncclGetLastError(c_void_p(comm)) or b""
        raise NcclError(f"{name}: {text.decode()}; {detail.decode(errors='replace')}".rstrip("; "))

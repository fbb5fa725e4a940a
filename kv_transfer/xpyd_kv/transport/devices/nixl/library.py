"""The one typed wrapper of the package `nixl`: what of it we use, with our errors.

It is an optional extra, so nothing here imports it before `load`. The package's own agent class
fixes the progress thread at a busy loop, which takes a whole core of an idle P; its bindings, which
it exports too, let us say how long that thread may sleep.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Generator, Sequence
from importlib import metadata
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from xpyd_core.errors import UserError
from xpyd_kv.transport.devices.nixl.regions import HOST, NixlRegion, Row

PIP = "pip install 'xpyd[nixl]'"
"""The command that installs NIXL."""
# Tested; a row in units (strided descriptors) came with 1.5.
_OLDEST, _FIRST_UNTESTED = (1, 5), (1, 6)
# How long P's progress thread sleeps when nothing comes: one percent of a core, measured, and no
# slower than less. 0 spins.
_PROGRESS_SLEEP_US = 1000
_BACKEND = "UCX"


class NixlError(OSError):
    """NIXL refused or failed; the connection that it was for ends."""


def version() -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version("nixl")
    except metadata.PackageNotFoundError:
        return None


def check(found: str | None) -> str:
    """A version that was tested. UserError, with what to do, for another, or for none."""
    if found is None:
        raise UserError(f"KV transport nixl: the package nixl is not installed; {PIP}")
    if not _OLDEST <= _numbers(found) < _FIRST_UNTESTED:
        raise UserError(f"KV transport nixl: nixl {found} is not one that was tested; {PIP}")
    return found


def load() -> Nixl:
    """The library. UserError, with what to do, when it cannot be used."""
    found = check(version())
    try:
        return Nixl(cast("_Module", importlib.import_module("nixl")), found)
    except ImportError as error:
        raise UserError(f"KV transport nixl: nixl {found} cannot be loaded: {error}") from error


def _numbers(text: str) -> tuple[int, ...]:
    """Major and minor; () for what has no such numbers."""
    parts = text.split(".")[:2]
    return tuple(int(part) for part in parts) if all(map(str.isdecimal, parts)) else ()


class Nixl:
    """The loaded package."""

    def __init__(self, module: _Module, its_version: str) -> None:
        self._module = module
        self.version = its_version

    def agent(self, *, has_progress_thread: bool) -> Agent:
        """A new agent, under a name of its own. NixlError when UCX cannot start."""
        return Agent(self._module, has_progress_thread=has_progress_thread)


class Remote:
    """A peer that an agent has met."""

    def __init__(self, name: bytes) -> None:
        self.name = name


class Prepared:
    """A row's units, as an agent knows them."""

    def __init__(self, handle: int) -> None:
        self.handle = handle


class Transfer:
    """A read that is under way."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.is_through = False


class Agent:
    """One NIXL agent with UCX. Its memory may be read by all who get its metadata. One thread at a
    time; all methods raise NixlError, also after `close`."""

    def __init__(self, module: _Module, *, has_progress_thread: bool) -> None:
        self._module = module
        config = module.nixlAgentConfig()
        config.useProgThread = has_progress_thread
        config.useListenThread = False
        config.pthrDelay = _PROGRESS_SLEEP_US
        # No local variable may name it: an error's traceback keeps those, and so the agent alive.
        self._agent: _Agent | None = None
        with _translated("createBackend: where UCX_TLS is set, it must have tcp in it"):
            self._agent = module.nixlAgent(f"xpyd-{os.urandom(16).hex()}", config)
            self._backends = [self._agent.createBackend(_BACKEND, {})]

    def register(self, regions: Sequence[NixlRegion]) -> None:
        """Let peers read these, and read into them ourselves. Takes long for much memory."""
        for region in regions:
            with _translated("registerMem"):
                self._live().registerMem(self._registration(region), self._backends)

    def deregister(self, regions: Sequence[NixlRegion]) -> None:
        """Their opposite; nothing may be under way."""
        for region in regions:
            with _translated("deregisterMem"):
                self._live().deregisterMem(self._registration(region), self._backends)

    def metadata(self) -> bytes:
        """Return the metadata by which a peer reads our registered memory: addresses and keys."""
        with _translated("getLocalMD"):
            return self._live().getLocalMD()

    def meet(self, its_metadata: bytes) -> Remote:
        """A peer, from its metadata."""
        with _translated("loadRemoteMD"):
            return Remote(self._live().loadRemoteMD(its_metadata))

    def prepare(self, row: Row, unit: int, remote: Remote | None = None) -> Prepared:
        """Return the units of a peer's row or (None) of our own; the row is checked once."""
        name = self._module.NIXL_INIT_AGENT if remote is None else remote.name
        strided = [
            (region.address, unit, max(0, region.device), unit, region.length // unit)
            for region in row.regions
        ]
        kind = self._kind(row.regions[0])
        with _translated("prepXferDlist"):
            return Prepared(self._live().prepXferDlist(name, kind, _array(strided), self._backends))

    def read_units(
        self, ours: Prepared, numbers: Sequence[int], theirs: Prepared, its_numbers: Sequence[int]
    ) -> Transfer:
        """Begin to read units into units; neighbours become one read."""
        indices, its_indices = (np.array(side, dtype=np.int32) for side in (numbers, its_numbers))
        with _translated("makeXferReq"):
            handle = self._live().makeXferReq(
                self._module.NIXL_READ,
                ours.handle,
                indices,
                theirs.handle,
                its_indices,
                b"",
                self._backends,
                False,
            )
        return self._post(handle)

    def read(
        self, targets: Sequence[NixlRegion], sources: Sequence[NixlRegion], remote: Remote
    ) -> Transfer:
        """Begin to read any bytes: each of `sources` into its place in `targets`, which has its
        length and is registered. The regions of a side are of one device."""
        with _translated("createXferReq"):
            handle = self._live().createXferReq(
                self._module.NIXL_READ,
                self._descriptors(targets),
                self._descriptors(sources),
                remote.name,
                b"",
                self._backends,
            )
        return self._post(handle)

    def is_done(self, transfer: Transfer) -> bool:
        """Whether it is through; asking also makes it go on."""
        if transfer.is_through:
            return True
        with _translated("getXferStatus"):
            status = self._live().getXferStatus(transfer.handle)
        if status == self._module.NIXL_IN_PROG:
            return False
        self._end(transfer)
        return True

    def close(self) -> None:
        """End it, and with it all that is under way: nothing is written after this. Nothing less
        does it: neither releasing a transfer nor forgetting the peer stops one."""
        self._agent = None

    def _post(self, handle: int) -> Transfer:
        transfer = Transfer(handle)
        with _translated("postXferReq"):
            status = self._live().postXferReq(handle, b"")
        if status != self._module.NIXL_IN_PROG:
            self._end(transfer)
        return transfer

    def _end(self, transfer: Transfer) -> None:
        transfer.is_through = True
        with _translated("releaseXferReq"):
            self._live().releaseXferReq(transfer.handle)

    def _kind(self, region: NixlRegion) -> object:
        return self._module.DRAM_SEG if region.device == HOST else self._module.VRAM_SEG

    def _registration(self, region: NixlRegion) -> object:
        row = (region.address, region.length, max(0, region.device), "")
        return self._module.nixlRegDList(self._kind(region), [row])

    def _descriptors(self, regions: Sequence[NixlRegion]) -> object:
        rows = [(region.address, region.length, max(0, region.device)) for region in regions]
        return self._module.nixlXferDList(self._kind(regions[0]), _array(rows))

    def _live(self) -> _Agent:
        if self._agent is None:
            raise NixlError("the agent is closed")
        return self._agent


@contextlib.contextmanager
def _translated(what: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        # The bindings' errors have no base class in common but this one.
        raise NixlError(f"NIXL {what}: {error}") from error


def _array(rows: Sequence[tuple[int, ...]]) -> NDArray[np.uint64]:
    return np.array(rows, dtype=np.uint64)


# --- what we use of the bindings


class _NixlConfig(Protocol):
    useProgThread: bool
    useListenThread: bool
    pthrDelay: int


class _Agent(Protocol):
    def createBackend(self, name: str, options: dict[str, str]) -> int: ...
    def registerMem(self, regions: object, backends: list[int]) -> None: ...
    def deregisterMem(self, regions: object, backends: list[int]) -> None: ...
    def getLocalMD(self) -> bytes: ...
    def loadRemoteMD(self, metadata: bytes) -> bytes: ...
    def prepXferDlist(
        self, name: str | bytes, kind: object, strided: NDArray[np.uint64], backends: list[int]
    ) -> int: ...
    def makeXferReq(
        self,
        operation: object,
        ours: int,
        numbers: NDArray[np.int32],
        theirs: int,
        its_numbers: NDArray[np.int32],
        notification: bytes,
        backends: list[int],
        skip_merge: bool,
    ) -> int: ...
    def createXferReq(
        self,
        operation: object,
        targets: object,
        sources: object,
        name: bytes,
        notification: bytes,
        backends: list[int],
    ) -> int: ...
    def postXferReq(self, handle: int, notification: bytes) -> object: ...
    def getXferStatus(self, handle: int) -> object: ...
    def releaseXferReq(self, handle: int) -> None: ...


class _Module(Protocol):
    NIXL_INIT_AGENT: str
    NIXL_READ: object
    NIXL_IN_PROG: object
    DRAM_SEG: object
    VRAM_SEG: object

    def nixlAgentConfig(self) -> _NixlConfig: ...
    def nixlAgent(self, name: str, config: _NixlConfig) -> _Agent: ...
    def nixlRegDList(self, kind: object, rows: list[tuple[int, int, int, str]]) -> object: ...
    def nixlXferDList(self, kind: object, rows: NDArray[np.uint64]) -> object: ...

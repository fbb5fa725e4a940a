"""Collectives of ranks that share a host, over memory that all of them have mapped.

The first of the group makes it, the others open it: an anonymous file (memfd) that they open
through its maker's table of descriptors. It has no name, so nothing is left of it when the last
process that has it has ended, however that ended. Its size is fixed and its pages are there from
the start: no access to it can fail. What is done in it is native/collectives.cpp's. Where that was
not built, or a rank cannot open the memory, all ranks of the group agree to stay with Gloo.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor

from xpyd_worker.kernels.cpu.library import TYPES
from xpyd_worker.parallel import native
from xpyd_worker.parallel.api import GroupError
from xpyd_worker.parallel.distributed import Rendezvous, Store, named

_log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 10
"""The part of a tensor that goes through the memory at once: two of them fit a core's cache for
each rank of a small group (docs/adr/0031). Larger tensors go in pieces."""
SHARES_FROM_BYTES = 32 << 10
"""The size from which three ranks and more add up a share each; below the second meeting costs
more."""
_NAME = "xpyd-collectives"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NONCE_BYTES = 32
SPIN_S = 50e-6
"""How long a rank looks for the others at most before it sleeps, where each has a core: to sleep
and to be woken takes about that long."""


@dataclass(frozen=True)
class Host:
    """What a group has to itself of a host."""

    ranks: int
    """How many ranks compute on the machine at the same time, of all groups."""

    cores: int

    @property
    def spin_s(self) -> float:
        """A rank that waits must not take the core of the rank that it waits for."""
        return SPIN_S if self.cores >= self.ranks else 0.0


class SharedMemoryCollectives:
    """See FastReduce; an all-gather and an all-to-all, too, for what is in the host's memory. Made
    by `open_shared_memory`."""

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        rank_in_group: int,
        *,
        memory: mmap.mmap,
        processes: list[int],
        within_s: float,
        spin_s: float,
    ) -> None:
        """Takes over the memory, and `processes`: descriptors of the ranks' (-1: none)."""
        library = native.library()
        assert library is not None
        self._library, self._name, self._ranks = library, name, ranks
        self._memory, self._processes = memory, processes
        # Both hold addresses that the member has.
        self._at: ctypes.c_char | None = ctypes.c_char.from_buffer(memory)
        self._descriptors = (ctypes.c_int32 * len(processes))(*processes)
        self._member = native.Member(
            shared=ctypes.addressof(self._at),
            processes=ctypes.addressof(self._descriptors),
            rank=rank_in_group,
            ranks=len(ranks),
            piece_bytes=PIECE_BYTES,
            most_spin_ns=int(spin_s * 1e9),
            within_ns=int(within_s * 1e9),
        )
        self._reference = ctypes.byref(self._member)
        self._shares_from = SHARES_FROM_BYTES if len(ranks) > 2 else PIECE_BYTES + 1

    def takes(self, x: Tensor) -> bool:
        """See FastReduce."""
        return x.dtype in TYPES and x.is_contiguous()

    def all_reduce(self, x: Tensor) -> None:
        """See FastReduce."""
        failed = self._library.xpyd_all_reduce(
            self._reference, TYPES[x.dtype], x.data_ptr(), x.numel(), self._shares_from
        )
        if failed:
            raise self._error("all_reduce", failed)

    def all_gather(self, out: Tensor, share: Tensor, rows: int) -> None:
        """`out` [rows, size, n] of all ranks' `share` [rows, n], both contiguous. With one row
        `share` may be this rank's place in `out`. Raises GroupError."""
        failed = self._library.xpyd_all_gather(
            self._reference,
            share.data_ptr(),
            out.data_ptr(),
            rows,
            share.numel() // rows * share.element_size(),
        )
        if failed:
            raise self._error("all_gather", failed)

    def all_to_all(
        self, out: Tensor, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> None:
        """`receive` rows of each rank into `out`, for `send` rows of `x` to each; both contiguous,
        rows by rank. Raises GroupError. See docs/adr/0116."""
        row_bytes = out.stride(0) * out.element_size()
        numbers = ctypes.c_int64 * len(send)
        failed = self._library.xpyd_all_to_all(
            self._reference,
            x.data_ptr(),
            out.data_ptr(),
            numbers(*send),
            numbers(*receive),
            row_bytes,
        )
        if failed:
            raise self._error("all_to_all", failed)

    def close(self) -> None:
        """Leave: ranks that wait in it fail. The memory goes with the last rank that has it."""
        if self._at is None:
            return
        self._library.xpyd_leave(self._reference)
        # The memory cannot be unmapped while its address is held.
        self._at = None
        self._memory.close()
        for descriptor in self._processes:
            if descriptor >= 0:
                os.close(descriptor)

    def _error(self, what: str, outcome: int) -> GroupError:
        blamed = self._member.blamed
        who = [rank for at, rank in enumerate(self._ranks) if blamed >> at & 1]
        within_s = self._member.within_ns / 1e9
        why = {
            native.MISSING: f"did not take part within {within_s:g} s",
            native.ENDED: "did not take part: the process has ended",
            native.CLOSED: "did not take part: the group is closed there",
            native.ELSEWHERE: "did not take part: another call, size or type of tensor there",
        }[outcome]
        return GroupError(f"{what} in group {self._name}: {named(who) or 'a rank'} {why}")


def open_shared_memory(
    store: Store, name: str, ranks: tuple[int, ...], *, at: Rendezvous, host: Host
) -> SharedMemoryCollectives | None:
    """`ranks`, this one among them. None, on all of them, where one of them cannot; then the log
    says why. GroupError where one says nothing."""
    key, pages, word = f"memory/{name}", None, ""
    with ExitStack() as stack:
        try:
            pages = _pages(store, key, ranks, at)
            stack.callback(pages.close)
        except NotShared as error:
            word = str(error)
        store.put(f"{key}/{store.rank}", (word or str(os.getpid())).encode())
        words = [store.take(f"{key}/{r}", of=r, within_s=at.connect_s).decode() for r in ranks]
        refused = {
            rank: word for rank, word in zip(ranks, words, strict=True) if not word.isdigit()
        }
        if pages is None or refused:
            if pages is not None:
                pages.memory.close()
            if store.rank == ranks[0]:
                why = "; ".join(f"rank {rank}: {word}" for rank, word in refused.items())
                _log.warning("group %s goes over Gloo instead of shared memory: %s", name, why)
            return None
    return SharedMemoryCollectives(
        name,
        ranks,
        ranks.index(store.rank),
        memory=pages.memory,
        processes=[_process(int(pid)) for pid in words],
        within_s=at.step_s,
        spin_s=host.spin_s,
    )


def _pages(store: Store, key: str, ranks: tuple[int, ...], at: Rendezvous) -> Pages:
    """The group's memory; its first rank makes it, and says where it is in any case."""
    is_first, made = store.rank == ranks[0], None
    try:
        size_bytes = _size_bytes(len(ranks))
        if is_first:
            made = make_pages(size_bytes)
    finally:
        if is_first:
            store.put(key, (made.where if made else "").encode())
    if made is not None:
        return made
    where = store.take(key, of=ranks[0], within_s=at.connect_s).decode()
    return open_pages(where, size_bytes)


def _size_bytes(ranks: int) -> int:
    library = native.library()
    if library is None:
        raise NotShared("the collectives were not compiled here")
    if ranks > native.MOST_RANKS:
        raise NotShared(f"{ranks} ranks; {native.MOST_RANKS} at most")
    return native.HEAD_BYTES + 2 * ranks * PIECE_BYTES


def _process(pid: int) -> int:
    """A descriptor that tells when it ends. -1 for this one, and where the system has none: then
    the deadline tells."""
    if pid == os.getpid():
        return -1
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


# --- the memory


class NotShared(Exception):
    """These processes cannot have memory in common; says why."""


@dataclass(frozen=True)
class Pages:
    """`memory` begins with the bytes by which its openers know it; it has a descriptor of its own.
    `close` this one once all have it."""

    memory: mmap.mmap
    descriptor: int
    where: str
    """What `open_pages` takes."""

    def close(self) -> None:
        """`where` holds no longer."""
        os.close(self.descriptor)


def make_pages(size_bytes: int) -> Pages:
    """Zeros, but for the first 32 bytes. NotShared where the system refuses."""
    nonce = secrets.token_hex(_NONCE_BYTES // 2)
    with _as_not_shared("memory cannot be made"):
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with _closed_on_error(descriptor):
            os.posix_fallocate(descriptor, 0, size_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            memory = _mapped(descriptor, size_bytes)
            memory[:_NONCE_BYTES] = nonce.encode()
            return Pages(memory, descriptor, f"{os.getpid()} {descriptor} {nonce}")


def open_pages(where: str, size_bytes: int) -> Pages:
    """What another process of this host made. NotShared where that is on another host, or the
    system forbids to look at other processes."""
    if not where:
        raise NotShared("there is none")
    pid, number, nonce = where.split()
    path = f"/proc/{int(pid)}/fd/{int(number)}"
    with _as_not_shared("memory cannot be opened"):
        # On another host that number may be anything: look before it is opened.
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise NotShared("the ranks are not on one host")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        with _closed_on_error(descriptor):
            if os.fstat(descriptor).st_size != size_bytes:
                raise NotShared("the ranks are not of one version")
            memory = _mapped(descriptor, size_bytes)
            if memory[:_NONCE_BYTES] != nonce.encode():
                memory.close()
                raise NotShared("the ranks are not on one host")
            return Pages(memory, descriptor, where)


def _mapped(descriptor: int, size_bytes: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


@contextmanager
def _closed_on_error(descriptor: int) -> Generator[None]:
    try:
        yield
    except BaseException:
        os.close(descriptor)
        raise


@contextmanager
def _as_not_shared(what: str) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise NotShared(f"{what}: {error}") from error

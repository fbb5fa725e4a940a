"""Memory that some processes of one host have, and nobody else: made by one, opened by the others.

An anonymous file (memfd) that the others open through its maker's table of descriptors. It has no
name, so nothing is left of it when the last process that has it has ended, however that ended. Its
size is fixed and its pages are there from the start: whoever touches it cannot fail.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

_NAME = "xpyd-collectives"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NONCE_BYTES = 32


class NotShared(Exception):
    """These processes cannot have memory in common; says why."""


@dataclass(frozen=True)
class Pages:
    """`memory` begins with the bytes by which its openers know it; it has a descriptor of its own.
    `close` this one once all have it."""

    memory: mmap.mmap
    descriptor: int
    where: str
    """For `open_pages`."""

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
    system lets nobody look at other processes."""
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

"""A real small file system for tests of a full disk: a tmpfs, mounted for one test.

Mounting needs root; where it is refused the test is skipped with the system's reason.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_FILLER = "filler"


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of `size` on `folder`, which is made."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no program `mount`")
    if done.returncode:
        pytest.skip(f"no small disk can be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazily: a process that is just ending may have a file open.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, *, leave: int = 0) -> None:
    """Leave about so many bytes free; 0: not one."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize - leave
    with (folder / _FILLER).open("ab", buffering=0) as file:
        with contextlib.suppress(OSError):
            file.write(bytes(max(0, free)))
        while not leave:
            try:
                file.write(b"\0")
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return


def free(folder: Path) -> None:
    """Give back what `fill` took."""
    (folder / _FILLER).unlink()

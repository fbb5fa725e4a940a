"""The folder that a checkpoint is downloaded into, and whose turn it is to do so.

Beside the folder NAME lie `.NAME.download`, where files grow, and `.NAME.lock`. A journal in the
former says which parts and files are written for good, so that a later run goes on where a killed
one ended. One rename makes the folder whole: no reader ever sees half of it.

The lock is flock(2), which the kernel frees when its holder dies, and a record that its owner
renews: file systems of a network may know flock on one machine only, or not at all. A record that
does not change for LEASE_S by the reader's own clock is a dead owner's. If two should ever believe
that it is theirs, both write the same verified bytes to the same places.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from xpyd_worker.download.plan import (
    MANIFEST,
    DownloadError,
    HeldFile,
    Manifest,
    Part,
    RemoteFile,
    full_text,
    is_held,
    read_manifest,
)

LEASE_S = 30.0
_BEAT_S = 5.0
_SETTLE_S = 1.0
_LOOK_S = 1.0
_JOURNAL = ".journal"
_GROWING = ".part"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class _Owner(msgspec.Struct, frozen=True):
    """The record in a lock. `boot`: the kernel that runs the owner; `beat` grows."""

    owner: str
    boot: str
    beat: int


class FolderLock:
    """One of several programs, on one or more machines, works on a folder. Used once.

    `owner`: a name for people that no other program has.
    """

    def __init__(self, folder: Path, owner: str, *, lease_s: float = LEASE_S) -> None:
        self._path = folder.parent / f".{folder.name}.lock"
        self._owner = owner
        self._boot = _boot()
        self._lease_s = lease_s
        self._seen = ("", time.monotonic())
        self._ended = threading.Event()

    @contextlib.contextmanager
    def held(self, *, wait_s: float, waits: Callable[[str], None]) -> Generator[None]:
        """Wait until it is ours, at most `wait_s`; `waits` gets the present owner's name."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
        try:
            self._acquire(descriptor, time.monotonic() + wait_s, waits)
            beats = threading.Thread(target=self._beat, args=(descriptor,), daemon=True)
            beats.start()
            try:
                yield
            finally:
                self._ended.set()
                beats.join()
                os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)  # frees flock, too

    def _acquire(self, descriptor: int, until: float, waits: Callable[[str], None]) -> None:
        while True:
            locked = _flock(descriptor)
            record = _read_owner(descriptor)
            if locked is not False and self._is_free(descriptor, record, locked=bool(locked)):
                self._write(descriptor, 0)
                if locked:
                    return
                time.sleep(_SETTLE_S)  # another one may have written at once: the last one has it
                mine = _read_owner(descriptor)
                if mine is not None and mine.owner == self._owner:
                    return
                continue
            who = record.owner if record else "another program"
            if time.monotonic() > until:
                raise DownloadError(
                    "DownloadFailed", f"{self._path}: {who} still downloads this model: wait longer"
                )
            waits(who)
            time.sleep(_LOOK_S)

    def _is_free(self, descriptor: int, record: _Owner | None, *, locked: bool) -> bool:
        if record is None or record.owner == self._owner:
            return True
        if locked and record.boot == self._boot:
            return True  # this kernel freed the lock: its owner is dead
        content = os.pread(descriptor, 4096, 0).decode("utf-8", "replace")
        if content != self._seen[0]:
            self._seen = (content, time.monotonic())
        return time.monotonic() - self._seen[1] > self._lease_s

    def _write(self, descriptor: int, beat: int) -> None:
        record = msgspec.json.encode(_Owner(self._owner, self._boot, beat))
        os.pwrite(descriptor, record + b"\n", 0)
        os.ftruncate(descriptor, len(record) + 1)

    def _beat(self, descriptor: int) -> None:
        beat = 0
        while not self._ended.wait(_BEAT_S):
            beat += 1
            # A full volume: the lock itself has still its block, and flock holds.
            with contextlib.suppress(OSError):
                self._write(descriptor, beat)


def _flock(descriptor: int) -> bool | None:
    """Whether it is ours; None: this file system has no such locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        return None if error.errno in _NO_FLOCK else False


def _read_owner(descriptor: int) -> _Owner | None:
    """None: it is free. A record that is being written is of an owner without a name."""
    content = os.pread(descriptor, 4096, 0)
    try:
        return msgspec.json.decode(content, type=_Owner)
    except msgspec.DecodeError:
        return _Owner("another program", "", 0) if content else None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class _Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the journal: a part that is written, or with `sha256` a file that is verified."""

    part: Part
    sha256: str = ""


@contextlib.contextmanager
def explained(folder: Path, *, needs: int = 0) -> Generator[None]:
    """Turns what the volume refuses into a DownloadError with the fix."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            text = full_text(str(folder), needs=needs, has=free_bytes(folder))
            raise DownloadError("VolumeFull", text) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            text = f"{folder}: cannot be written ({error.strerror}): let user {os.getuid()} write"
            raise DownloadError("AccessDenied", f"{text} there, or name another folder") from error
        raise DownloadError("DownloadFailed", f"{folder}: {error}") from error


def free_bytes(folder: Path) -> int:
    """What the volume of a folder, or of the next one above that exists, has left for us."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def finished(folder: Path) -> Manifest | None:
    """What a whole folder holds; None: it has no manifest."""
    try:
        return read_manifest((folder / MANIFEST).read_bytes())
    except OSError:
        return None


def damaged(folder: Path, manifest: Manifest) -> list[str]:
    """Files of a finished folder that are missing or have another size."""
    sizes: dict[str, int] = {}
    for file in manifest.files:
        with contextlib.suppress(OSError):
            sizes[file.name] = (folder / file.name).stat().st_size
    return is_held(manifest, sizes)


class GrowingFolder:
    """The folder's files while they come. Its methods may be called by several threads."""

    def __init__(self, folder: Path) -> None:
        self._target = folder
        self.path = folder.parent / f".{folder.name}.download"
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []

    def open(self) -> None:
        """Make it, or take over what an earlier run left."""
        self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            for line in (self.path / _JOURNAL).read_bytes().splitlines():
                # The last line may be cut.
                with contextlib.suppress(msgspec.DecodeError):
                    self._entries.append(msgspec.json.decode(line, type=_Entry))

    def take_back(self, manifest: Manifest) -> None:
        """Make a finished folder one that grows again, without its damaged files."""
        bad = set(damaged(self._target, manifest))
        shutil.rmtree(self.path, ignore_errors=True)
        self._target.rename(self.path)
        (self.path / MANIFEST).unlink()
        for held in manifest.files:
            if held.name not in bad:
                part = Part(held.name, held.tag, 0, held.size)
                self._note(_Entry(part, held.sha256))

    def held(self, file: RemoteFile) -> HeldFile | None:
        """The file where it is there and verified, of the same tag and size."""
        for entry in self._entries:
            if entry.sha256 and (entry.part.name, entry.part.tag) == (file.name, file.tag):
                with contextlib.suppress(OSError):
                    if (self.path / file.name).stat().st_size == file.size:
                        return HeldFile(file.name, file.size, file.tag, entry.sha256)
        return None

    def parts(self, file: RemoteFile) -> list[Part]:
        """The parts of a file that are written; none where its bytes are gone."""
        try:
            size = (self.path / (file.name + _GROWING)).stat().st_size
        except OSError:
            return []
        mine = (e.part for e in self._entries if e.part.name == file.name and not e.sha256)
        return [part for part in mine if part.tag == file.tag and part.end <= size]

    def begin(self, file: RemoteFile) -> Path:
        """The path at which the file grows, with its whole size."""
        path = self.path / (file.name + _GROWING)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, file.size)
        finally:
            os.close(descriptor)
        return path

    def wrote(self, part: Part) -> None:
        """Remember a part; its bytes are on the disk."""
        self._note(_Entry(part))

    def drop(self, file: RemoteFile) -> None:
        """Forget a file whose bytes are wrong."""
        with self._lock:
            self._entries = [e for e in self._entries if e.part.name != file.name]
            lines = b"".join(msgspec.json.encode(entry) + b"\n" for entry in self._entries)
            (self.path / _JOURNAL).write_bytes(lines)
        (self.path / (file.name + _GROWING)).unlink(missing_ok=True)

    def finish(self, file: RemoteFile, sha256: str) -> HeldFile:
        """Give a verified file its name."""
        # Noted first: a note without the file costs a look, a file without its note all its bytes.
        self._note(_Entry(Part(file.name, file.tag, 0, file.size), sha256))
        (self.path / (file.name + _GROWING)).rename(self.path / file.name)
        return HeldFile(file.name, file.size, file.tag, sha256)

    def complete(self, manifest: Manifest) -> None:
        """Remove what is not the manifest's, write it, and give the folder its name."""
        names = {file.name for file in manifest.files}
        for path in self.path.iterdir():
            if path.name not in names and path.is_file():
                path.unlink()
        descriptor = os.open(self.path / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.write(descriptor, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.path.rename(self._target)
        above = os.open(self._target.parent, os.O_RDONLY)
        try:
            os.fsync(above)
        finally:
            os.close(above)

    def _note(self, entry: _Entry) -> None:
        with self._lock:
            self._entries.append(entry)
            with (self.path / _JOURNAL).open("ab") as file:
                file.write(msgspec.json.encode(entry) + b"\n")

"""Downloads one checkpoint into one folder: threads that fetch parts, behind the folder's lock.

    download(want) -> Downloaded     done at once where the folder is whole
      FolderLock                     one program at a time
      source.files -> plan.wanted    what there is, and what of it is needed
      _Transfer                      parts in parallel, each retried until its file's deadline
      GrowingFolder.complete         one rename

A thread that fetched the last part of a file verifies it. Wrong bytes are fetched once more; then
the source itself is wrong.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal
from uuid import uuid4

from xpyd_worker.download.folder import (
    LEASE_S,
    FolderLock,
    GrowingFolder,
    damaged,
    explained,
    finished,
    free_bytes,
)
from xpyd_worker.download.plan import (
    PART_BYTES,
    Digester,
    DownloadError,
    HeldFile,
    Manifest,
    Part,
    RemoteFile,
    backoffs,
    deadline_s,
    full_text,
    missing_shards,
    parts_of,
    wanted,
)
from xpyd_worker.download.sources import Broken, RemoteFolder, open_source

_CHUNK = 1 << 20
_INDEX = "model.safetensors.index.json"
_LEAST_BYTES_PER_S = 256 << 10


@dataclass(frozen=True)
class Limits:
    """What a download may take. `retry_s`: how long a part that gets no byte is tried again, and
    a file's deadline beyond what its bytes take; `wait_s`: for another program's download."""

    parallel: int = 8
    part_bytes: int = PART_BYTES
    retry_s: float = 300.0
    wait_s: float = 6 * 3600.0
    lease_s: float = LEASE_S


@dataclass(frozen=True)
class Want:
    """Which checkpoint goes where. `verify`: read all of a whole folder's bytes, too."""

    uri: str
    folder: Path
    revision: str = ""
    endpoint: str = ""
    verify: bool = False
    limits: Limits = field(default_factory=Limits)


Phase = Literal["Listing", "Waiting", "Downloading", "Complete", "Failed"]


@dataclass
class Progress:
    """How far a download is. The transfer's threads write it, others read it."""

    phase: Phase = "Listing"
    done_bytes: int = 0
    total_bytes: int = 0
    files: int = 0
    total_files: int = 0
    message: str = ""
    """For Waiting: whom it waits for; for Failed: why and the fix."""
    reason: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, size: int, files: int = 0) -> None:
        """Count bytes and files."""
        with self._lock:
            self.done_bytes += size
            self.files += files


@dataclass(frozen=True)
class Downloaded:
    """A whole folder. `fetched_bytes` 0: nothing had to come."""

    folder: Path
    manifest: Manifest
    fetched_bytes: int


def download(want: Want, progress: Progress | None = None) -> Downloaded:
    """Make `want.folder` the whole checkpoint. UserError, of which DownloadError says why."""
    shown = Progress() if progress is None else progress
    # Opened first: what is wrong with an address is said also where the folder is whole.
    source = open_source(
        want.uri,
        revision=want.revision,
        endpoint=want.endpoint,
        connections=want.limits.parallel + 2,
    )
    folder = want.folder.absolute()
    if (whole := _whole(want, folder, shown)) is not None:
        return whole
    owner = f"{socket.gethostname()}/{os.getpid()}/{uuid4().hex[:8]}"
    with explained(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder, owner, lease_s=want.limits.lease_s)

        def waits(who: str) -> None:
            shown.phase, shown.message = "Waiting", who

        with lock.held(wait_s=want.limits.wait_s, waits=waits):
            if (whole := _whole(want, folder, shown)) is not None:
                return whole
            return _Transfer(want, folder, source, shown).run()


def _whole(want: Want, folder: Path, progress: Progress) -> Downloaded | None:
    """The folder as it is, where nothing is left to do."""
    manifest = finished(folder)
    if manifest is None:
        if folder.exists():
            raise DownloadError(
                "InvalidModel", f"{folder}: it exists and is no download's: name another folder"
            )
        return None
    has = manifest.uri, manifest.revision, manifest.endpoint
    if has != (want.uri, want.revision, want.endpoint):
        held = " ".join(filter(None, has))
        raise DownloadError("InvalidModel", f"{folder}: it holds {held}: name another folder")
    if damaged(folder, manifest):
        return None
    if want.verify:
        for file in manifest.files:
            if _sha256(folder / file.name) != file.sha256:
                (folder / file.name).unlink()
                return None
    size = sum(file.size for file in manifest.files)
    progress.phase, progress.done_bytes, progress.total_bytes = "Complete", size, size
    progress.files = progress.total_files = len(manifest.files)
    return Downloaded(folder, manifest, 0)


def _sha256(path: Path) -> str:
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


class _Transfer:
    """One run of one download, behind the lock. Used once."""

    def __init__(self, want: Want, folder: Path, source: RemoteFolder, progress: Progress) -> None:
        self._want = want
        self._source = source
        self._limits = want.limits
        self._target = folder
        self._growing = GrowingFolder(folder)
        self._progress = progress
        self._fetched = 0
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._held: dict[str, HeldFile] = {}

    def run(self) -> Downloaded:
        """Fetch what is missing."""
        self._progress.phase, self._progress.message = "Listing", ""
        if (old := finished(self._target)) is not None:
            self._growing.take_back(old)
        else:
            self._growing.open()
        files = wanted(self._listed(), source=self._source.label)
        self._look(files)
        left = [file for file in files if file.name not in self._held]
        self._check_room(left)
        self._progress.phase = "Downloading"
        with explained(self._growing.path, needs=self._missing_bytes(left)):
            self._fetch([file for file in left if not file.name.endswith(".safetensors")])
            self._check_shards(files)
            self._fetch([file for file in left if file.name.endswith(".safetensors")])
            manifest = Manifest(
                self._want.uri,
                self._want.revision,
                self._want.endpoint,
                self._source.commit,
                tuple(self._held[file.name] for file in files),
            )
            self._growing.complete(manifest)
        self._progress.phase = "Complete"
        return Downloaded(self._target, manifest, self._fetched)

    def _listed(self) -> list[RemoteFile]:
        until = time.monotonic() + self._limits.retry_s
        for wait_s in backoffs():
            try:
                return self._source.files()
            except Broken as error:
                if time.monotonic() + wait_s > until:
                    raise self._unreachable(error) from error
                time.sleep(wait_s)
        raise AssertionError("backoffs() has no end")

    def _look(self, files: tuple[RemoteFile, ...]) -> None:
        """What an earlier run left of these files."""
        progress = self._progress
        progress.total_files, progress.total_bytes = len(files), sum(file.size for file in files)
        for file in files:
            held = self._growing.held(file)
            if held is not None:
                self._held[file.name] = held
                progress.add(file.size, files=1)
            else:
                progress.add(file.size - self._missing_bytes([file]))

    def _missing_bytes(self, files: list[RemoteFile]) -> int:
        return sum(part.end - part.begin for file in files for part in self._parts(file))

    def _parts(self, file: RemoteFile) -> list[Part]:
        return parts_of(file, self._growing.parts(file), self._limits.part_bytes)

    def _check_room(self, files: list[RemoteFile]) -> None:
        needs, has = self._missing_bytes(files), free_bytes(self._growing.path)
        if needs > has:
            raise DownloadError("VolumeFull", full_text(str(self._target), needs=needs, has=has))

    def _check_shards(self, files: tuple[RemoteFile, ...]) -> None:
        if _INDEX not in self._held:
            return
        index = (self._growing.path / _INDEX).read_bytes()
        if missing := missing_shards(index, (file.name for file in files)):
            raise DownloadError(
                "NotFound",
                f"{self._source.label}: {_INDEX} names {len(missing)} files that are not there"
                f" ({', '.join(missing[:3])}): upload them",
            )

    def _fetch(self, files: list[RemoteFile]) -> None:
        """Fetch these files, several parts at once; the first failure ends all."""
        jobs: queue.SimpleQueue[tuple[_Growing, Part]] = queue.SimpleQueue()
        now = time.monotonic()
        for file in files:
            parts = self._parts(file)
            allowed_s = deadline_s(file.size, 2 * self._limits.retry_s, _LEAST_BYTES_PER_S)
            growing = _Growing(file, self._growing.begin(file), len(parts), now + allowed_s)
            for part in parts:
                jobs.put((growing, part))
            if not parts:  # all is there, and was not verified
                self._end(growing)
        threads = [
            threading.Thread(target=self._work, args=(jobs,), daemon=True)
            for _ in range(min(self._limits.parallel, jobs.qsize()))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: nobody writes any more once the lock is another's
            self._stop.set()
            for thread in threads:
                thread.join()
            raise
        if self._failure is not None:
            raise self._failure

    def _work(self, jobs: queue.SimpleQueue[tuple[_Growing, Part]]) -> None:
        try:
            while not self._stop.is_set():
                growing, part = jobs.get_nowait()
                self._fetch_part(growing, part)
                with self._lock:
                    growing.left -= 1
                    is_last = not growing.left
                if is_last:
                    self._end(growing)
        except queue.Empty:
            return
        except Exception as error:  # a thread's edge: run() raises it
            with self._lock:
                self._failure = self._failure or error
            self._stop.set()

    def _fetch_part(self, growing: _Growing, part: Part) -> None:
        """Fetch one part; each attempt begins where the one before it ended."""
        at, until = part.begin, time.monotonic() + self._limits.retry_s
        waits = backoffs()
        descriptor = os.open(growing.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            while at < part.end and not self._stop.is_set():
                before, problem = at, "the connection ended early"
                try:
                    for chunk in self._chunks(growing.file, at, part.end):
                        os.pwrite(descriptor, chunk, at)
                        at += len(chunk)
                        self._progress.add(len(chunk))
                except Broken as error:
                    problem = str(error)
                if at >= part.end:
                    break
                now = time.monotonic()
                if at > before:
                    until, waits = now + self._limits.retry_s, backoffs()
                wait_s = next(waits)
                if now + wait_s > min(until, growing.until):
                    raise self._unreachable(Broken(f"{part.name}: {problem}"))
                self._stop.wait(wait_s)
            if at == part.end:
                os.fdatasync(descriptor)  # the journal must not know more than the disk
                self._growing.wrote(part)
        finally:
            os.close(descriptor)
        with self._lock:
            self._fetched += at - part.begin

    def _chunks(self, file: RemoteFile, begin: int, end: int) -> Iterator[bytes]:
        """What a source sends, cut where it sends too much."""
        with contextlib.closing(self._source.read(file, begin, end)) as chunks:
            for chunk in chunks:
                yield chunk[: end - begin]
                begin += len(chunk)
                if begin >= end or self._stop.is_set():
                    return

    def _end(self, growing: _Growing) -> None:
        """Verify a file whose bytes are all there; wrong ones are fetched once more."""
        file, digester = growing.file, Digester(growing.file)
        with growing.path.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                digester.update(chunk)
        wrong = digester.mismatch()
        if not wrong:
            self._held[file.name] = self._growing.finish(file, digester.sha256)
            self._progress.add(0, files=1)
            return
        self._growing.drop(file)
        self._progress.add(-file.size)
        if growing.again:
            raise DownloadError(
                "ChecksumMismatch",
                f"{self._source.label}: {file.name}: {wrong}, twice: upload the file again",
            )
        again = _Growing(file, self._growing.begin(file), 0, growing.until, again=True)
        for part in self._parts(file):  # all: they were dropped
            self._fetch_part(again, part)
        if not self._stop.is_set():
            self._end(again)

    def _unreachable(self, error: Broken) -> DownloadError:
        return DownloadError(
            "DownloadFailed",
            f"{self._source.label}: {error}; tried for {self._limits.retry_s:.0f} s: look whether"
            " the source can be reached from here",
        )


@dataclass
class _Growing:
    """A file under way. `left`: its parts that are not there; `until`: its deadline."""

    file: RemoteFile
    path: Path
    left: int
    until: float
    again: bool = False

"""Pods' log files and their way to the terminal: bounded in size, followed, with prefixes.

Pods append to their files themselves (O_APPEND), so they go on logging when the supervisor dies. A
file over its limit is copied to `.1` and truncated; a line written in between is lost. What was in
`.1` is in `.2` then, and so on. Where the disk has no room for a copy, the lines are dropped: the
bound holds.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, TextIO, cast

from xpyd_core.errors import UserError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""What the system says where a disk is full, or a user's share of it."""
MOST_LOG_FILES = 100
LEAST_LOG_BYTES = 4096
_MAX_LINE_BYTES = 64 << 10
_SPAN = re.compile(r"(\d{1,6})([smhd])")
_SPAN_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*")


@dataclass(frozen=True)
class LogLimit:
    """How much of each pod's log is kept."""

    file_bytes: int = 8 << 20
    """A file that is longer is cut; it is looked at every 5 s."""
    files: int = 2
    """Files of one pod, with the one that it writes to; from 1 to MOST_LOG_FILES."""


def older(path: Path, number: int = 1) -> Path:
    """Where the lines before the current file are; those of 2 are older than those of 1."""
    return path.with_name(f"{path.name}.{number}")


def rotate(path: Path, limit: LogLimit) -> bool:
    """Keep the file below its limit. True: it was cut, readers begin anew."""
    try:
        if path.stat().st_size <= limit.file_bytes:
            return False
        kept = limit.files - 1
        if kept:
            # The oldest goes first: its room may be what the copy needs.
            older(path, kept).unlink(missing_ok=True)
            for number in range(kept - 1, 0, -1):
                if older(path, number).exists():
                    older(path, number).replace(older(path, number + 1))
            _copy(path, older(path))
        os.truncate(path, 0)
    except OSError:
        return False
    return True


def _copy(path: Path, target: Path) -> None:
    try:
        shutil.copyfile(path, target)
    except OSError as error:
        target.unlink(missing_ok=True)
        if error.errno not in NO_ROOM:
            raise


class LogFollower:
    """Reads the lines that were added to one file since the last call."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0
        self._rest = b""

    def poll(self) -> list[str]:
        """New whole lines; a line without end waits, unless it is too long."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:  # it was cut
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                new = file.read(1 << 20)
        except OSError:
            return []
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]


def line_time(line: str) -> datetime | None:
    """When a line was logged, from its text or JSON format; None: it belongs to the one before."""
    text = line
    if line.startswith("{"):
        try:
            entry: object = json.loads(line)
        except ValueError:
            return None
        text = str(cast("dict[str, Any]", entry).get("time")) if isinstance(entry, dict) else ""
    match = _TIME.match(text)
    if match is None:
        return None
    try:
        time = datetime.fromisoformat(match[0])
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def lines_since(path: Path, since: datetime | None) -> Iterator[str]:
    """All kept lines, or those from `since` on, oldest file first."""
    wanted = since is None
    numbers = range(MOST_LOG_FILES - 1, 0, -1)
    for file in (*(older(path, number) for number in numbers), path):
        if not file.exists():
            continue
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not wanted and since is not None:
                    time = line_time(line)
                    wanted = time is not None and time >= since
                if wanted:
                    yield line.rstrip("\n")


def tail(path: Path, count: int) -> list[str]:
    """The last `count` lines of what is kept."""
    return list(lines_since(path, None))[-count:]


def parse_span(text: str) -> timedelta:
    """`30s`, `5m`, `2h` or `1d`."""
    match = _SPAN.fullmatch(text)
    if match is None:
        raise UserError(f"--since {text!r}: expected a span such as 30s, 5m, 2h or 1d")
    return timedelta(**{_SPAN_UNITS[match[2]]: int(match[1])})


_SAME_LINE_S = 3.0
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


def is_coloured(stream: TextIO) -> bool:
    """Whether it is a terminal and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


class PrefixWriter:
    """Writes `pod | line`, one colour for each pod where the stream has colours."""

    def __init__(self, stream: TextIO, width: int = 0) -> None:
        self._stream = stream
        self._coloured = is_coloured(stream)
        self._width = width
        self._colours: dict[str, int] = {}

    def write(self, pod: str, lines: Iterable[str]) -> None:
        """The lines of one pod, flushed."""
        self._width = max(self._width, len(pod))
        prefix = f"{pod:<{self._width}} |"
        if self._coloured:
            colour = self._colours.setdefault(pod, _COLOURS[len(self._colours) % len(_COLOURS)])
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        for line in lines:
            self._stream.write(f"{prefix} {line}\n")
        self._stream.flush()


class LogStreamer:
    """Follows the logs of a changing set of pods."""

    def __init__(self, writer: PrefixWriter, *, from_end: bool = False) -> None:
        self._writer = writer
        self._from_end = from_end
        self._followers: dict[str, LogFollower] = {}

    def poll(self, pods: Iterable[tuple[str, Path]]) -> bool:
        """Write what is new of each (name, log file); whether there was anything."""
        found = False
        for name, log in pods:
            follower = self._followers.get(name)
            if follower is None:
                follower = self._followers[name] = LogFollower(log, from_end=self._from_end)
            while lines := follower.poll():
                self._writer.write(name, lines)
                found = True
        self._from_end = False  # later pods are new from their first line on
        return found


class Progress:
    """What is being waited for, on standard error: one line that is rewritten on a terminal;
    elsewhere a line when the text changes, at most one a second, and every three seconds."""

    def __init__(self, every_s: float = 1.0) -> None:
        self._started_s = time.monotonic()
        self._every_s = every_s
        self._said_s = self._started_s
        self._text: str = ""
        self._width = 0

    @property
    def elapsed_s(self) -> float:
        """Since the wait began."""
        return time.monotonic() - self._started_s

    def say(self, text: str) -> None:
        """Print `text` if it is time."""
        waited_s = time.monotonic() - self._said_s
        rewrites = sys.stderr.isatty()
        due_s = self._every_s if rewrites or text != self._text else _SAME_LINE_S
        if waited_s < due_s:
            return
        self._said_s, self._text = time.monotonic(), text
        line = f"{self.elapsed_s:4.0f} s  {text}"
        if rewrites:
            # Cut to the terminal: a wrapped line cannot be rewritten.
            line = line[: shutil.get_terminal_size().columns - 1]
            sys.stderr.write(f"\r{line:<{self._width}}")
            self._width = len(line)
        else:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The wait is over: leave the terminal's line."""
        if self._width:
            sys.stderr.write(f"\r{'':<{self._width}}\r")
            sys.stderr.flush()
            self._width = 0

"""Pods' log files: bounded in size, read from any process, with times for --since.

Pods write to their files themselves (O_APPEND), so they log on when the supervisor dies. A file
over its limit is copied to `.1` and truncated; a line written in between is lost.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from xpyd_core.errors import UserError

MAX_LOG_BYTES = 8 << 20
_MAX_LINE_BYTES = 64 << 10
_SPAN = re.compile(r"(\d{1,6})([smhd])")
_SPAN_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*")


def older(path: Path) -> Path:
    """Where the lines before the current file are."""
    return path.with_name(path.name + ".1")


def rotate(path: Path, limit_bytes: int = MAX_LOG_BYTES) -> bool:
    """Keep the file below its limit. True: it was cut, readers begin anew."""
    try:
        if path.stat().st_size <= limit_bytes:
            return False
        shutil.copyfile(path, older(path))
        with path.open("r+b") as file:
            file.truncate(0)
    except OSError:
        return False
    return True


class Follower:
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
    """All kept lines, or those from `since` on, older file first."""
    wanted = since is None
    for file in (older(path), path):
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

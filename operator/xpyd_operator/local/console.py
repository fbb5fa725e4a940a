"""What goes to the terminal: pods' lines with a prefix, and a line of progress."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from xpyd_operator.local.podlogs import Follower

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


def is_coloured(stream: TextIO) -> bool:
    """A terminal, and nobody said NO_COLOR."""
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


class Streamer:
    """Follows the logs of a changing set of pods."""

    def __init__(self, writer: PrefixWriter, *, from_end: bool = False) -> None:
        self._writer = writer
        self._from_end = from_end
        self._followers: dict[str, Follower] = {}

    def poll(self, pods: Iterable[tuple[str, Path]]) -> bool:
        """Write what is new of each (name, log file); whether there was anything."""
        found = False
        for name, log in pods:
            follower = self._followers.get(name)
            if follower is None:
                follower = self._followers[name] = Follower(log, from_end=self._from_end)
            while lines := follower.poll():
                self._writer.write(name, lines)
                found = True
        self._from_end = False  # who comes later is new from its first line on
        return found


class Progress:
    """One line a second on standard error while something is waited for."""

    def __init__(self, every_s: float = 1.0) -> None:
        self._started_s = time.monotonic()
        self._next_s = self._started_s + every_s
        self._every_s = every_s

    @property
    def elapsed_s(self) -> float:
        """Since the wait began."""
        return time.monotonic() - self._started_s

    def say(self, text: str) -> None:
        """Print `text` if the last line is a second old."""
        if time.monotonic() < self._next_s:
            return
        self._next_s += self._every_s
        sys.stderr.write(f"{self.elapsed_s:4.0f} s  {text}\n")
        sys.stderr.flush()

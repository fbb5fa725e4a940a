"""What goes to the terminal: pods' lines with a prefix, and a line of progress."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from xpyd_operator.up.podlogs import Follower

_SAME_LINE_S = 3.0
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

    def end(self) -> None:
        """The wait is over: leave the terminal's line."""
        if self._width:
            sys.stderr.write(f"\r{'':<{self._width}}\r")
            sys.stderr.flush()
            self._width = 0

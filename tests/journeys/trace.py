"""Which functions of the product run between two moments, in order: what a journey is made of.

A `Trace` is installed before the threads of a journey start, and records while it is on. Only files
of the packages count: fakes, libraries and the standard library do not. Every entry of a frame is a
call: a coroutine that continues behind an await too, and a comprehension where Python makes a frame
of it, as in the measurement of e6b247c that docs/architecture.md shows.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "kv_transfer", "router", "worker_image", "operator", "tools")
_ROOTS = tuple(f"{ROOT / package}/" for package in PACKAGES)


@dataclass
class Calls:
    """Code that was entered, in order."""

    made: list[CodeType] = field(default_factory=list)

    @property
    def by_file(self) -> dict[str, int]:
        """Number of calls by file, relative to the tree, in order of first entry."""
        found: dict[str, int] = {}
        for code in self.made:
            name = str(Path(code.co_filename).relative_to(ROOT))
            found[name] = found.get(name, 0) + 1
        return found

    @property
    def functions(self) -> int:
        return len(set(self.made))

    def __len__(self) -> int:
        return len(self.made)


class Trace:
    """Records while it is on, on all threads that started since `installed`."""

    def __init__(self) -> None:
        self._calls = Calls()
        self._is_on = False
        self._begins_behind = ""

    @contextmanager
    def installed(self) -> Iterator[Trace]:
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            yield self
        finally:
            self._is_on, self._begins_behind = False, ""
            sys.setprofile(None)
            threading.setprofile(None)

    def start(self, *, behind: str = "") -> None:
        """Forget what was recorded and record from now on, or from the next return of a function of
        the product named `behind`."""
        self._calls = Calls()
        self._begins_behind = behind
        self._is_on = not behind

    def stop(self) -> Calls:
        self._is_on, self._begins_behind = False, ""
        return self._calls

    @property
    def is_on(self) -> bool:
        return self._is_on

    def has_left(self, function: str, *, by: str) -> bool:
        """Whether `by` was entered behind the last entry of `function`; both are qualified names.
        A coroutine is entered again behind each await."""
        for code in reversed(self._calls.made):
            if code.co_qualname in (function, by):
                return code.co_qualname == by
        return False

    def _event(self, frame: FrameType, event: str, _arg: object) -> None:
        code = frame.f_code
        if self._begins_behind and event == "return" and code.co_name == self._begins_behind:
            self._is_on = self._is_on or code.co_filename.startswith(_ROOTS)
        if not self._is_on or event != "call" or code.co_name == "<module>":
            return
        if code.co_filename.startswith(_ROOTS):
            self._calls.made.append(code)


def common(rounds: list[Calls]) -> tuple[dict[str, int], Calls]:
    """What rounds of one journey have in common: the calls by file of those files that are on the
    way in every round, which leaves out a timer that happened to run in one of them; and the round
    with the fewest calls."""
    least = min(rounds, key=len)
    every = set.intersection(*(set(one.by_file) for one in rounds))
    return {name: count for name, count in least.by_file.items() if name in every}, least


Journey = Callable[[], list[Calls]]

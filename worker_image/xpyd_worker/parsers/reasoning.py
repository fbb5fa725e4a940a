"""Divides a text into the model's reasoning, which tags enclose, and its answer. Pure."""

from __future__ import annotations

from typing import Literal

from xpyd_worker.parsers import Part

Start = Literal["open", "closed", "either"]
"""Where a text begins: in the reasoning, behind it, or where the model may open it."""
_LINE_ENDS = "\r\n"


def start_of(prompt_end: str, begin: str, end: str) -> Start:
    """Where the text behind a prompt begins: its end may open the reasoning, or close it."""
    text = prompt_end.rstrip()
    if text.endswith(begin):
        return "open"
    return "closed" if text.endswith(end) else "either"


def beginning_at_end(text: str, *markers: str) -> int:
    """Length of the longest end of `text` that is the beginning of a marker, but not all of it."""
    longest = min(len(text), max(map(len, markers)) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(len(marker) > length and marker.startswith(tail) for marker in markers):
            return length
    return 0


class HeldBlanks:
    """Passes text on without the blanks at its end, until other text comes behind them. In pieces:
    a model may write blanks without an end."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """What is certain with `text`, the next piece."""
        kept = text.rstrip()
        if not kept:
            self._held.append(text)
            return ""
        before, self._held = self._held, [text[len(kept) :]]
        return "".join((*before, kept))

    def take(self) -> str:
        """The blanks that are held, which are held no more."""
        before, self._held = self._held, []
        return "".join(before)


class Thinking:
    """Reasoning between `begin` and `end`, for one choice. Line feeds around it are dropped."""

    def __init__(self, begin: str, end: str, start: Start) -> None:
        self._begin = begin
        self._end = end
        self._rest = ""
        self._blanks = HeldBlanks()
        self._state = {"open": "opened", "closed": "over", "either": "start"}[start]

    @property
    def is_inside(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._state in ("opened", "leading", "inside")

    def push(self, text: str, parts: list[Part]) -> str:
        """The text of the answer in `text`, the next piece; reasoning goes to `parts`."""
        if self._state == "over":
            return text
        self._rest += text
        return self._run(parts, last=False)

    def finish(self, parts: list[Part]) -> str:
        """The text has ended: the answer's in what was held back."""
        return self._run(parts, last=True)

    def _run(self, parts: list[Part], *, last: bool) -> str:
        if self._state in ("start", "opened"):
            self._take_begin(last=last)
        if self._state == "leading":
            self._rest = self._rest.lstrip(_LINE_ENDS)
            if self._rest:
                self._state = "inside"
        if self._state == "inside":
            self._take_inside(parts, last=last)
        if self._state == "behind":
            self._rest = self._rest.lstrip(_LINE_ENDS)
            if self._rest:
                self._state = "over"
        if self._state == "over":
            answer, self._rest = self._rest, ""
            return answer
        return ""

    def _take_begin(self, *, last: bool) -> None:
        text = self._rest.lstrip()
        self._blanks.push(self._rest[: len(self._rest) - len(text)])
        self._rest = text
        if text.startswith(self._begin):
            self._blanks.take()
            self._rest = text[len(self._begin) :]
            self._state = "leading"
        elif last or not self._begin.startswith(text):
            self._rest = self._blanks.take() + text
            self._state = "over" if self._state == "start" else "leading"

    def _take_inside(self, parts: list[Part], *, last: bool) -> None:
        before, found, behind = self._rest.partition(self._end)
        held = 0 if last or found else beginning_at_end(before, self._end)
        text = self._blanks.push(before[: len(before) - held])
        self._rest = before[len(before) - held :]
        if found:
            self._rest, self._state = behind, "behind"
        if found or last:
            self._blanks.take()
        if text:
            parts.append(Part("reasoning", text))

"""Tool calls as model families write them, each a small machine over text. Pure.

A machine's state is a method, which takes from the front of `_rest` what it can decide on, and says
whether it came further; `_rest` is what may still become something else. A further family is one
such class, and a line in `registry`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from xpyd_core.chats import Function
from xpyd_worker.parsers import Part
from xpyd_worker.parsers.json_calls import BLANKS, CallObject, JsonValue
from xpyd_worker.parsers.reasoning import HeldBlanks, beginning_at_end

_NAME = re.compile(r"[^\s{\[]{1,256}")
_LONGEST_HEAD = 1024
"""Of a name, an id and what is between, in characters."""


def first_of(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Where the first marker in the text is, and which; -1 and "" where there is none."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=(-1, ""))


class Machine:
    """What all families share: the rest, the parts, content up to a marker, calls as objects."""

    begins: tuple[str, ...] = ()
    """The markers before a call."""

    def __init__(self, tools: Sequence[Function] = ()) -> None:
        self.malformed = 0
        self._tools = tools
        self._rest = ""
        self._last = False
        self._parts: list[Part] = []
        self._state: Callable[[], bool] = self._content
        self._call = CallObject()
        self._blanks = HeldBlanks()  # behind content, or behind a call
        # Of what may be a call, in front of its object: content if it is none. In pieces.
        self._taken: list[str] = []
        self._is_marked = True
        self._is_behind_call = False  # with nothing but blanks between

    def push(self, text: str) -> list[Part]:
        """See ToolParser."""
        self._rest += text
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """See ToolParser."""
        self._last = True
        return self.push("")

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(Part("content", text))
            self._is_behind_call = False

    # --- states

    def _content(self) -> bool:
        """Content up to a marker; blanks before a call, or behind the last one, are dropped."""
        before = self._rest
        at, found = first_of(before, self.begins)
        if found:
            self._say(self._blanks.push(before[:at]))
            self._taken, self._rest = [self._blanks.take(), found], before[at + len(found) :]
            self._state = self._opened
            return True
        held = 0 if self._last else beginning_at_end(before, *self.begins)
        self._say(self._blanks.push(before[: len(before) - held]))
        if self._last and not self._is_behind_call:
            self._say(self._blanks.take())
        self._rest = before[len(before) - held :]
        return False

    def _opened(self) -> bool:
        """Behind the marker."""
        raise NotImplementedError

    def _closed(self) -> bool:
        """Behind a call."""
        raise NotImplementedError

    def _object(self) -> bool:
        """In a call that is a JSON object."""
        end = self._call.take(self._rest, 0, self._parts)
        self._rest = self._rest[end:]
        if self._call.is_done:
            self._state, self._is_behind_call, self._taken = self._closed, True, []
        elif self._call.is_bad or self._last:
            self._spoilt(self._call)
        else:
            return False
        return True

    # --- steps

    def _begin_object(self, call: CallObject) -> bool:
        self._call, self._state = call, self._object
        return True

    def _skip_blanks(self) -> bool:
        """Take blanks; whether something is behind them."""
        rest = self._rest.lstrip(BLANKS)
        self._taken.append(self._rest[: len(self._rest) - len(rest)])
        self._rest = rest
        return bool(rest)

    def _hold_blanks(self) -> str:
        """Hold blanks behind a call; what is behind them."""
        rest = self._rest.lstrip(BLANKS)
        self._blanks.push(self._rest[: len(self._rest) - len(rest)])
        self._rest = rest
        return rest

    def _spoilt(self, call: CallObject) -> None:
        """The call is none, or not whole: what was not put out as a call is content."""
        self.malformed += call.has_begun or self._is_marked
        if call.has_begun:
            self._is_behind_call = True
        else:
            self._say("".join((*self._taken, call.text)))
        self._taken, self._state = [], self._content

    def _no_call(self) -> bool:
        """What was taken is content."""
        self.malformed += self._is_marked
        self._say("".join(self._taken))
        self._taken, self._state = [], self._content
        return True


class Hermes(Machine):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write it."""

    begins = ("<tool_call>",)
    end = "</tool_call>"

    def _opened(self) -> bool:
        if self._skip_blanks():
            return self._begin_object(CallObject()) if self._rest[0] == "{" else self._no_call()
        return self._no_call() if self._last else False

    def _closed(self) -> bool:
        rest = self._hold_blanks()
        if rest.startswith(self.end):
            self._blanks.take()
            self._rest = rest[len(self.end) :]
        elif self.end.startswith(rest):
            if self._last:
                self._rest = ""
            return False
        self._state = self._content
        return True


class Llama3Json(Machine):
    """`{"name": ..., "parameters": {...}}` as all of an answer, or behind `<|python_tag|>`, as
    Llama 3 writes it; several with semicolons between."""

    begins = ("<|python_tag|>",)
    _KEYS = frozenset({"name", "parameters", "arguments", "type", "id"})

    def __init__(self, tools: Sequence[Function] = ()) -> None:
        super().__init__(tools)
        self._state = self._bare

    def _bare(self) -> bool:
        """Where an object without a marker may begin."""
        if not self._skip_blanks():
            if not self._last or self._is_behind_call:
                return False
        elif self._rest[0] == "{":
            # JSON that the client asked for is no call, and no fault.
            self._is_marked = False
            return self._begin_object(CallObject(self._KEYS))
        self._rest, self._taken = "".join((*self._taken, self._rest)), []
        self._state = self._content
        return True

    def _opened(self) -> bool:
        self._is_marked = True
        if self._skip_blanks():
            return self._begin_object(CallObject()) if self._rest[0] == "{" else self._no_call()
        return self._no_call() if self._last else False

    def _closed(self) -> bool:
        if not self._skip_blanks():
            return False
        if self._rest[0] == ";":
            self._taken.append(";")
            self._rest = self._rest[1:]
        self._state = self._bare
        return True


class Mistral(Machine):
    """`[TOOL_CALLS]` and a list of `{"name": ..., "arguments": {...}}`, or from Mistral's tokenizer
    v11 on `[TOOL_CALLS]name{...}` or `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    begins = ("[TOOL_CALLS]",)
    _CALL_ID, _ARGS = "[CALL_ID]", "[ARGS]"

    def __init__(self, tools: Sequence[Function] = ()) -> None:
        super().__init__(tools)
        self._value = JsonValue()

    def _opened(self) -> bool:
        if not self._skip_blanks():
            return self._no_call() if self._last else False
        if self._rest[0] == "[":
            self._taken.append("[")
            self._rest = self._rest[1:]
            self._state = self._item
        else:
            self._state = self._named
        return True

    def _item(self) -> bool:
        """Where an object of the list may begin."""
        if not self._skip_blanks():
            return self._no_call() if self._last else False
        if self._rest[0] == "{":
            return self._begin_object(CallObject())
        return self._no_call()

    def _closed(self) -> bool:
        """Behind an object of the list."""
        if not self._skip_blanks():
            return False
        if self._rest[0] == ",":
            self._taken.append(",")
            self._rest = self._rest[1:]
            self._state = self._item
            return True
        if self._rest[0] == "]":
            self._taken, self._rest = [], self._rest[1:]
        self._state = self._content
        return True

    def _named(self) -> bool:
        """In a name without quotes, up to its arguments."""
        at = self._rest.find("{", 0, _LONGEST_HEAD)
        if at < 0 and not self._last and len(self._rest) < _LONGEST_HEAD:
            return False
        head = self._rest[: max(at, 0)]
        name, _, _ = head.partition(self._ARGS)
        name, _, _ = name.partition(self._CALL_ID)
        name = name.strip()
        if at < 0 or _NAME.fullmatch(name) is None:
            return self._no_call()
        self._parts.append(Part("call", name))
        self._rest, self._taken = self._rest[at:], []
        self._value, self._state = JsonValue(), self._arguments
        return True

    def _arguments(self) -> bool:
        """In the arguments behind such a name."""
        end = self._value.take(self._rest, 0)
        if end:
            self._parts.append(Part("arguments", self._rest[:end]))
        self._rest = self._rest[end:]
        self._is_behind_call = True
        if self._value.is_bad or (self._last and not self._value.is_done):
            self.malformed += 1
        elif not self._value.is_done:
            return False
        self._state = self._content
        return True

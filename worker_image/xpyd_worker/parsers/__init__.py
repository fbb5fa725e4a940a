"""What a model's text holds besides plain content: reasoning and tool calls. Pure.

    text, in pieces of any cut --> ChatParser.push, finish --> parts

`ChatParser` divides a text into reasoning and the rest (reasoning.py), and the rest into content
and tool calls, by the format of a model family (tools.py, which reads calls by json_calls.py).
`registry` has the families and finds that of a chat template. What is put out depends on the text
alone, not on its cuts, and text is held back only while it may still become something else: so P,
D and a continuation, which replay the same tokens, stand at the same place. What only looks like a
call is content again, all of it: nothing a model writes raises here. See docs/adr/0067.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

Kind = Literal["content", "reasoning", "call", "arguments"]


class Part(NamedTuple):
    """A piece of one kind. `call` begins a call, and `text` is the function's name; `arguments` are
    more of the JSON of the call that was begun last."""

    kind: Kind
    text: str


class ToolParser(Protocol):
    """A parser of one family's tool calls, for one choice."""

    @property
    def malformed(self) -> int:
        """Calls so far that were not whole, or none at all."""
        ...

    def push(self, text: str) -> list[Part]:
        """What is certain with `text`, the next piece."""
        ...

    def finish(self) -> list[Part]:
        """The text has ended: what was held back."""
        ...

"""What reading an answer costs: counted in characters that a parser looks at or copies."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tests.worker.test_parsers import made
from xpyd_worker.parsers import Part
from xpyd_worker.parsers.reasoning import Thinking


class Counted(str):
    """A text that counts the characters that are looked at or copied, its pieces as well."""

    __slots__ = ()
    work: ClassVar[int] = 0

    def _of(self, text: str, *, more: int = 0) -> Counted:
        Counted.work += len(text) + more
        return Counted(text)

    def __getitem__(self, key: Any) -> Counted:
        return self._of(super().__getitem__(key))

    def __add__(self, other: str) -> Counted:
        return self._of(super().__add__(other))

    def __radd__(self, other: str) -> Counted:
        return self._of(str(other) + str(self))

    def lstrip(self, chars: str | None = None, /) -> Counted:
        return self._of(super().lstrip(chars), more=len(self))

    def rstrip(self, chars: str | None = None, /) -> Counted:
        return self._of(super().rstrip(chars), more=len(self))

    def find(self, *args: Any) -> int:
        Counted.work += len(self)
        return super().find(*args)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, behind = super().partition(sep)
        return self._of(before), found, self._of(behind)

    def removeprefix(self, prefix: str, /) -> Counted:
        return self._of(super().removeprefix(prefix))

    def removesuffix(self, suffix: str, /) -> Counted:
        return self._of(super().removesuffix(suffix))


RUNS = (" ", "\n", '"', "\\", "{", "[", "1", "x ")
BEFORE: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", '<tool_call>{"name": "f"', '<tool_call>{"name": "f", "arguments": ',
               '<tool_call>{"name": "f"}'),
    "llama3_json": ("<|python_tag|>", '{"name": "f"', '{"name": "f", "parameters": {"a": ',
                    '{"name": "f"}'),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS]f", "[TOOL_CALLS]f{", '[TOOL_CALLS][{"name": "f"}'),
    "qwen3_coder": ("<tool_call>", "<function=f", "<function=f>", "<function=f><parameter=",
                    "<function=f><parameter=city>", "<function=f><parameter=list>[",
                    "<function=f></function>"),
    "glm45": ("<tool_call>", "<tool_call>f", "<tool_call>f<arg_key>",
              "<tool_call>f<arg_key>n</arg_key>", "<tool_call>f<arg_key>list</arg_key><arg_value>[",
              "<tool_call>f<arg_key>n</arg_key><arg_value>", "<tool_call>f</tool_call>"),
}  # fmt: skip


@pytest.mark.parametrize("family", BEFORE)
def test_no_text_makes_a_parser_look_at_what_it_has_read_again_and_again(family: str) -> None:
    """Work by the text's length, whatever it is made of, and not by its square."""
    length, most = 3000, 40
    for before in ("", *BEFORE[family]):
        for run in RUNS:
            parser = made(family)()
            Counted.work = 0
            parser.push(Counted(before))
            for at in range(length):
                parser.push(Counted(run[at % len(run)]))
            parser.finish()
            # Names and keys have bounds of a thousand characters, within which they are read anew
            # with each piece.
            assert Counted.work < most * length + 1024**2, (before, run)


@pytest.mark.parametrize("start", ["open", "either"])
def test_no_blanks_make_reasoning_be_read_again_and_again(start: Any) -> None:
    for run in (" ", "\n", "x "):
        thinking, parts = Thinking("<think>", "</think>", start), list[Part]()
        Counted.work = 0
        for at in range(3000):
            thinking.push(Counted(run[at % len(run)]), parts)
        assert Counted.work < 40 * 3000

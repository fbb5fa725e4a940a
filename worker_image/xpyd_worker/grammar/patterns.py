"""Regular expressions of schemas: their bounds, and how the compiler is given them. Pure."""

from __future__ import annotations

import re

from xpyd_core.bodies import refuse

MAX_REPEATS = 20_000
"""Of one place in a pattern: each is an expression of the compiler's."""
_PIECES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]|\{([0-9]+(?:,[0-9]*)?)\}|.", re.DOTALL)
"""Of a regular expression: an escape, a class, a count, any other character."""
_CLASS_BEGINS = re.compile(r"\[\^(?!\]-)[-\]]?")
"""Of a class that says what is not in it, with what only there stands for itself."""
_FIRST_CONTROL = re.compile(r"\\(x0|u000)0-")


def check_pattern(regex: object, place: str) -> None:
    """ApiError 400 for a pattern some part of which is to be repeated too often. Counts inside each
    other multiply. What is no pattern the compiler says."""
    if isinstance(regex, str) and _most_repeats(regex) > MAX_REPEATS:
        what = (
            f"a part is repeated at most {MAX_REPEATS} times, counts inside each other multiplied"
        )
        raise refuse(place, what)


def _most_repeats(regex: str) -> int:
    inside = [1]
    """Repetitions within each open group; the first is the pattern's own."""
    last = most = 1
    """Of what a count that comes next repeats."""
    for found in _PIECES.finditer(regex):
        match found[0][0], found[1]:
            case "(", _:
                inside.append(1)
                last = 1
            case ")", _ if len(inside) > 1:
                last = inside.pop()
                inside[-1] = max(inside[-1], last)
            case "{", str(count):
                last *= max(1, *(int(one[:9]) for one in count.split(",") if one))
                inside[-1] = max(inside[-1], last)
                most = max(most, last)
            case _:
                last = 1
    return most


def without_all_controls(regex: str) -> str:
    """The expression, in which no class has all control characters: U+0001 is left out of those
    that say what is not in them, U+0000 of ranges from it. The compiler takes a class that has all
    of them for one that has the quote and the backslash, too, as they are written in JSON: without
    this `[^"]` would let a quote come. Neither character is one that an answer needs."""
    pieces = [found[0] for found in _PIECES.finditer(regex)]
    if any(one[0] == "[" and ("--" in one or "~~" in one) for one in pieces):
        # What a class takes away from another would be less.
        return regex
    made: list[str] = []
    for piece in pieces:
        if piece.startswith("[^"):
            piece = _CLASS_BEGINS.sub(lambda begin: begin[0] + r"\x01", piece)
        elif piece.startswith("["):
            piece = _FIRST_CONTROL.sub(r"\\\g<1>1-", piece)
        made.append(piece)
    return "".join(made)

"""What a Python text may hold and a JSON body may not. Pure."""

from __future__ import annotations

from xpyd_core.errors import UserError


def check_text(text: str, name: str) -> None:
    """UserError where `text` has half a surrogate pair, for which no tokenizer has bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name}: character {error.start} is {text[error.start]!r}, half a surrogate pair; "
            'decode the text anew, e.g. with errors="replace"'
        ) from None

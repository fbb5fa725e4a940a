"""Files that hold a JSON object, and their fields read with checks: every error names the file or
the field, and what is supported.

The families' rules are written with it. Plain JSON; it must not know models or torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from xpyd_core.errors import UserError

Json = Mapping[str, Any]

_SHOWN_CHARACTERS = 80


def read_object(path: Path, name: str) -> Json:
    """The JSON object in the file at `path`. UserError, which begins with `name`: the field or flag
    that named the folder."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{name}: {path} does not exist; name a folder that has it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{name}: cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{name}: {path} must hold a JSON object")
    return cast("Json", value)


class Fields:
    """The fields of one JSON object; `path` names the object inside of `file`. A field that is null
    counts as absent, but for `in`."""

    def __init__(self, values: Json, path: str = "", *, file: str = "config.json") -> None:
        self._values = values
        self._path = path
        self._file = file

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> object:
        """The value as it is; None where it is absent."""
        return self._values.get(name)

    def inner(self, name: str) -> Fields:
        """The fields of an object inside of this one; none where it is absent."""
        value: object = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(name, "an object")
        return Fields(cast("Json", value or {}), self._full(name), file=self._file)

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 to 2**31 - 1; without a `default` it must be there."""
        value = self._present(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise self.refusal(name, "a whole number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; without a `default` it must be there."""
        value = self._present(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
            raise self.refusal(name, "a number above 0")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """true or false."""
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def array(self, name: str) -> list[object]:
        """A list; empty where it is absent."""
        value: object = self._present(name, [])
        if not isinstance(value, list):
            raise self.refusal(name, "a list")
        return cast("list[object]", value)

    def refusal(self, name: str, supported: str) -> UserError:
        """The error that says what value `name` has and what is supported."""
        shown = repr(self._values.get(name))
        if len(shown) > _SHOWN_CHARACTERS:
            shown = shown[: _SHOWN_CHARACTERS - 3] + "..."
        return UserError(f"{self._file}: {self._full(name)} is {shown}; supported: {supported}")

    def _present(self, name: str, default: object) -> Any:  # noqa: ANN401 - checked by the callers
        value: object = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self._file}: {self._full(name)} is missing")
        return value

    def _full(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

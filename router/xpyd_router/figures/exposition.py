"""Prometheus' text format, written line by line. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal

from xpyd_core.distribution import Distribution

Kind = Literal["counter", "gauge"]

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def labels_of(values: Mapping[str, str]) -> str:
    """`values` as they stand between a sample's braces, sorted as the client library does."""
    return ",".join(f'{name}="{values[name].translate(_ESCAPES)}"' for name in sorted(values))


@cache
def _bounds_of(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*(str(float(bound)) for bound in bounds), "+Inf")


class Exposition:
    """Families of metrics, one behind the other; `text` at the end. Labels as of `labels_of`."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def numbers(
        self, name: str, kind: Kind, meaning: str, samples: Iterable[tuple[str, float]]
    ) -> None:
        """A family of counters (their name ends in _total) or gauges: labels and value of each."""
        self._begin(name, kind, meaning)
        for labels, value in samples:
            self._lines.append(f"{name}{{{labels}}} {value}" if labels else f"{name} {value}")

    def histograms(
        self, name: str, meaning: str, samples: Iterable[tuple[str, Distribution]]
    ) -> None:
        """A family of histograms; each has at least one label."""
        self._begin(name, "histogram", meaning)
        lines = self._lines
        for labels, values in samples:
            counts = values.cumulative()
            begin = f'{name}_bucket{{{labels},le="'
            lines += [
                f'{begin}{bound}"}} {count}'
                for bound, count in zip(_bounds_of(values.bounds), counts, strict=True)
            ]
            lines.append(f"{name}_count{{{labels}}} {counts[-1]}")
            lines.append(f"{name}_sum{{{labels}}} {values.sum}")

    def text(self) -> bytes:
        """All of it."""
        return "\n".join([*self._lines, ""]).encode()

    def _begin(self, name: str, kind: str, meaning: str) -> None:
        self._lines.append(f"# HELP {name} {meaning}")
        self._lines.append(f"# TYPE {name} {kind}")

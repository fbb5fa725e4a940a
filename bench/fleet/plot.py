"""The picture of `make bench-fleet` as SVG: a chart for each prompt length and figure. Pure.

Rows of charts share the scale of their figure, which is logarithmic: fleets differ by factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from bench.fleet.report import FIGURES

SHOWN = ("ttftP50Ms", "itlP99Ms")
_WIDTH, _HEIGHT = 190.0, 130.0
_LEFT, _TOP, _GAP_X, _GAP_Y = 58.0, 76.0, 26.0, 58.0
_STYLES = ("one", "two", "three")
_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:g} {h:g}" width="{w:g}" \
height="{h:g}" role="img" aria-labelledby="t d" font-family="system-ui, -apple-system, Segoe UI, \
Helvetica, Arial, sans-serif" font-size="12">
  <title id="t">{title}</title>
  <desc id="d">{desc}</desc>
  <style>
    /* Readable on white and on black; sharper where the viewer says which of the two it is. */
    text {{ fill: #707884 }} .axis {{ fill: none; stroke: #8c959f; stroke-width: 1 }}
    .grid {{ fill: none; stroke: #8c959f; stroke-width: 0.5; stroke-opacity: 0.4 }}
    .line {{ fill: none; stroke-width: 2 }}
    .one {{ stroke: #2f81f7; fill: #2f81f7 }} .two {{ stroke: #d4731c; fill: #d4731c }}
    .three {{ stroke: #8c959f; fill: #8c959f }} .line.three {{ stroke-dasharray: 5 3 }}
    .line {{ fill: none }} .strong {{ font-weight: 600 }}
    @media (prefers-color-scheme: light) {{ text {{ fill: #3d444d }} }}
    @media (prefers-color-scheme: dark) {{ text {{ fill: #d1d7e0 }} }}
  </style>
"""


def plot(made: dict[str, Any]) -> str:
    """The SVG of a report."""
    rows: list[dict[str, Any]] = made["rows"]
    lengths = list(dict.fromkeys(row["promptTokens"] for row in rows))
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    width = _LEFT + len(lengths) * (_WIDTH + _GAP_X)
    height = _TOP + len(SHOWN) * (_HEIGHT + _GAP_Y)
    parts = [
        _HEAD.format(
            w=width,
            h=height,
            title="P and D apart beside the same engines aggregated",
            desc=escape(
                f"{' and '.join(FIGURES[figure] for figure in SHOWN)} over the rate of requests, "
                f"for prompts of {', '.join(map(str, lengths))} tokens. The tables below have "
                "the figures."
            ),
        ),
        *_legend(layouts),
    ]
    for down, figure in enumerate(SHOWN):
        scale = _Scale([row[figure] for row in rows])
        for across, tokens in enumerate(lengths):
            of_chart = [row for row in rows if row["promptTokens"] == tokens]
            x, y = _LEFT + across * (_WIDTH + _GAP_X), _TOP + down * (_HEIGHT + _GAP_Y)
            parts += _chart(of_chart, layouts, figure, scale, x, y)
            if across == 0:
                parts += scale.labels(x, y)
                parts.append(_text(x, y - 10, f"{FIGURES[figure]}, ms", "start", "strong"))
            if down == 0:
                middle = x + _WIDTH / 2
                parts.append(_text(middle, y - 26, f"{tokens} tokens in", "middle", "strong"))
    return "".join(f"  {part}\n" if at else part for at, part in enumerate(parts)) + "</svg>\n"


class _Scale:
    """Milliseconds -> pixels below a chart's top: logarithmic, from 1, 2 or 5 of a decade on."""

    def __init__(self, values: Sequence[float]) -> None:
        steps = [factor * 10.0**power for power in range(-1, 7) for factor in (1, 2, 5)]
        low, high = min(values), max(values)
        self._low = max(step for step in steps if step <= max(low, steps[0]))
        self._high = min(step for step in steps if step >= max(high, 2 * self._low))
        self._marks = [step for step in steps if self._low <= step <= self._high]
        if len(self._marks) > 8:
            self._marks = [step for step in self._marks if math.log10(step).is_integer()]

    def at(self, value: float) -> float:
        inside = min(max(value, self._low), self._high)
        whole = math.log(self._high / self._low)
        return _HEIGHT * (1 - math.log(inside / self._low) / whole)

    def labels(self, x: float, y: float) -> list[str]:
        return [_text(x - 6, y + self.at(mark) + 4, f"{mark:,g}", "end") for mark in self._marks]

    def grid(self, x: float, y: float) -> list[str]:
        return [
            f'<path class="grid" d="M{x:.1f} {y + self.at(mark):.1f}h{_WIDTH:g}"/>'
            for mark in self._marks
        ]


def _chart(
    rows: Sequence[dict[str, Any]],
    layouts: Sequence[str],
    figure: str,
    scale: _Scale,
    x: float,
    y: float,
) -> list[str]:
    rates = sorted({row["requestsPerS"] for row in rows})
    most = max(rates) * 1.05

    def across(rate: float) -> float:
        return x + _WIDTH * rate / most

    parts = [
        *scale.grid(x, y),
        f'<path class="axis" d="M{x:.1f} {y:.1f}v{_HEIGHT:g}h{_WIDTH:g}"/>',
        *(_text(across(rate), y + _HEIGHT + 15, f"{rate:.2g}", "middle") for rate in rates),
        _text(x + _WIDTH / 2, y + _HEIGHT + 30, "requests/s", "middle"),
    ]
    for style, layout in zip(_STYLES, layouts, strict=False):
        points = [
            (across(row["requestsPerS"]), y + scale.at(row[figure]))
            for row in rows
            if row["layout"] == layout
        ]
        way = " ".join(f"{left:.1f},{top:.1f}" for left, top in points)
        parts.append(f'<polyline class="line {style}" points="{way}"/>')
        parts += [f'<circle class="{style}" cx="{a:.1f}" cy="{b:.1f}" r="2.5"/>' for a, b in points]
    return parts


def _legend(layouts: Sequence[str]) -> list[str]:
    parts: list[str] = []
    left = _LEFT
    for style, layout in zip(_STYLES, layouts, strict=False):
        parts.append(f'<path class="line {style}" d="M{left:.1f} 18h24"/>')
        parts.append(_text(left + 30, 22, layout, "start"))
        left += 50 + 7 * len(layout)
    return parts


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(text)}</text>'

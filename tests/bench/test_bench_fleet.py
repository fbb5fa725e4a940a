"""The benchmark of fleets: its figures and its picture are right, and its short form measures."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.engine.models import Model
from bench.fleet.__main__ import main
from bench.fleet.plot import plot
from bench.fleet.report import BEGIN, report, with_measured
from bench.fleet.rounds import AGGREGATED, APART, CHUNKED, Layout, Load, Turn
from bench.report import END
from xpyd_tools.bench.summary import Sample

_SVG = "{http://www.w3.org/2000/svg}"
_LOAD = Load(prompt_tokens=(128, 512), output_tokens=3, shares=(0.2, 0.4))
_MODEL = Model("small", Path("/models/small"), 58_000_000, 1)


def _turn(layout: Layout, tokens: int, share: float, ttft_s: float, gap_s: float) -> Turn:
    sample = Sample(0.0, ttft_s, (gap_s, gap_s), ttft_s + 2 * gap_s, tokens, 3)
    return Turn(layout, tokens, share, rate_per_s=10 * share, samples=[sample, sample])


def _turns() -> list[Turn]:
    return [
        _turn(layout, tokens, share, ttft_s * tokens / 128, gap_s)
        for tokens in _LOAD.prompt_tokens
        for share in _LOAD.shares
        for layout, ttft_s, gap_s in (
            (APART, 0.2, 0.01),
            (AGGREGATED, 0.1, 0.04),
            (CHUNKED, 0.4, 0.02),
        )
    ]


def test_a_ratio_is_of_1p1d_to_each_other_fleet_at_the_same_rung():
    made = report(_MODEL, _turns(), _LOAD, cores=2)
    found = {(one["name"], one["peer"]): one["reached"] for one in made["ratios"]}
    at = "128 tokens in, 2 requests/s"
    assert found[f"TTFT p50, {at}", "aggregated"] == 2.0
    assert found[f"TTFT p50, {at}", "aggregated, chunks of 128"] == 0.5
    assert found[f"ITL p99, {at}", "aggregated"] == 0.25
    assert found[f"TPOT p99, {at}", "aggregated, chunks of 128"] == 0.5
    assert len(found) == 2 * 2 * 2 * 3  # lengths, rungs, other fleets, figures


def test_a_rung_has_the_requests_of_all_rounds():
    again = [*_turns(), *_turns()]
    rows = report(_MODEL, again, _LOAD, cores=2)["rows"]
    assert len(rows) == 12
    assert {row["requests"] for row in rows} == {4}


def test_fleets_are_in_one_order_at_each_rung():
    turns = _turns()
    turned = [*turns[:3], *reversed(turns[3:])]  # fleets take turns in who is first
    rows = report(_MODEL, turned, _LOAD, cores=2)["rows"]
    assert [row["layout"] for row in rows] == [APART.name, AGGREGATED.name, CHUNKED.name] * 4


def test_the_page_has_a_table_for_each_prompt_length():
    page = with_measured(f"a\n{BEGIN}old\n{END}b\n", report(_MODEL, _turns(), _LOAD, cores=2))
    assert "old" not in page
    assert "`small`, 58 M parameters" in page
    assert "| 2 | 1P1D | 2 | 200 | 200 | 10 | 10 |" in page
    assert page.count("tokens in: requests/s") == 2


def test_the_picture_has_a_line_for_each_fleet_in_each_chart_and_slower_is_higher():
    svg = ElementTree.fromstring(plot(report(_MODEL, _turns(), _LOAD, cores=2)))
    lines = svg.findall(f"{_SVG}polyline")
    assert len(lines) == 2 * 2 * 3  # figures, lengths, fleets
    heights = [float(line.attrib["points"].split(",")[1].split()[0]) for line in lines]
    apart, aggregated, chunked = heights[:3]  # TTFT: 200, 100, 400 ms
    assert chunked < apart < aggregated
    # A logarithmic scale: a factor of two is as high everywhere.
    assert aggregated - apart == pytest.approx(apart - chunked, abs=0.2)
    texts = [text.text for text in svg.findall(f"{_SVG}text")]
    assert {"1P1D", "aggregated", "128 tokens in", "TTFT p50, ms", "ITL p99, ms"} <= set(texts)


@pytest.mark.slow
@pytest.mark.long
def test_the_short_form_measures_and_writes_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "fleet.md"
    page.write_text(f"before\n{BEGIN}{END}after\n")
    assert main(["--quick", "--output", str(tmp_path / "fleet.json")]) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made == json.loads((tmp_path / "fleet.json").read_text())
    assert [(row["share"], row["layout"]) for row in made["rows"]] == [
        (0.2, "1P1D"),
        (0.2, "aggregated"),
        (0.4, "1P1D"),
        (0.4, "aggregated"),
    ]
    assert all(row["requests"] >= 2 and row["ttftP50Ms"] > 0 for row in made["rows"])
    assert "| 1P1D |" in page.read_text()
    assert (tmp_path / "fleet.svg").read_text().endswith("</svg>\n")

"""The benchmark of ranks: its short form measures what its page has, and its figures are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.parallel.__main__ import main
from bench.parallel.all_reduce import Rounds
from bench.parallel.experts import LayerRounds
from bench.parallel.gpu_all_reduce import GpuRounds
from bench.parallel.page import BEGIN, with_measured
from bench.parallel.report import Collectives, ideal_bubble, measured_bubble, report
from bench.report import END
from xpyd_worker.parallel import native


def test_a_pipeline_of_equal_stages_has_the_bubble_of_the_formula():
    # Four stages of 10 ms: one batch takes 40, four take 70 (article fact 46).
    assert measured_bubble(4, 1, one_s=0.04, all_s=0.04) == ideal_bubble(4, 1) == 0.75
    assert measured_bubble(4, 4, one_s=0.04, all_s=0.07) == pytest.approx(ideal_bubble(4, 4))
    assert ideal_bubble(4, 4) == pytest.approx(3 / 7)


def test_the_gpus_rows_are_there_where_gpus_were():
    rounds = [GpuRounds(2, 16, [4.0, 5.0, 6.0], [8.0, 10.0, 10.0])]
    rows = report(Collectives(on_gpus=rounds), {}, cores=2, rounds=3)["gpuAllReduce"]
    assert rows == [{"ranks": 2, "kib": 16, "oursUs": 5.0, "ncclUs": 10.0, "ratio": 0.5}]
    pages = [
        with_measured(f"{BEGIN}{END}", report(Collectives(on_gpus=one), {}, cores=2, rounds=3))
        for one in (rounds, [])
    ]
    row = "| 2 ranks, 16 KiB | 5.0 | 10.0 | 0.500 |"
    assert [row in page for page in pages] == [True, False]
    assert ["on GPUs" in page for page in pages] == [True, False]


def test_a_layer_of_whole_experts_is_compared_with_the_same_in_slices():
    layers = [LayerRounds(4, 8, [10.0, 12.0, 8.0], [5.0, 5.0, 6.0], [7.0, 9.0, 8.0])]
    made = report(
        Collectives(exchanges=[Rounds(2, 16, [3.0], [9.0])], layers=layers), {}, cores=2, rounds=3
    )
    assert [(one["name"], one["peer"], one["reached"]) for one in made["ratios"]] == [
        ("all-to-all, 2 ranks, 16 KiB", "Gloo", 0.3333),
        ("layer of whole experts, 4 ranks, 8 rows", "TP", 0.5),
    ]
    page = with_measured(f"{BEGIN}{END}", made)
    assert "| 4 ranks, 8 rows | 10 | 5 | 0.500 | 8 |" in page
    assert "| 2 ranks, 16 KiB | 3 | 9 | 0.333 |" in page


@pytest.mark.slow
@pytest.mark.skipif(native.library() is None, reason="needs the compiled collectives")
@pytest.mark.long
def test_the_short_form_measures_and_writes_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "parallel.md"
    page.write_text(f"before\n{BEGIN}{END}after\n")
    assert main(["--quick", "--output", str(tmp_path / "parallel.json")]) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made == json.loads((tmp_path / "parallel.json").read_text())
    (reduce,) = made["allReduce"]
    ratios = {(one["name"], one["peer"]): one for one in made["ratios"]}
    assert list(ratios) == [
        ("all-reduce, 2 ranks, 16 KiB", "Gloo"),
        ("all-to-all, 2 ranks, 16 KiB", "Gloo"),
        ("layer of whole experts, 2 ranks, 1 rows", "TP"),
        ("tiny, TP 2 x PP 1, tokens/s", "TP 1 x PP 1"),
        ("tiny, TP 1 x PP 2, tokens/s", "TP 1 x PP 1"),
        ("tiny, TP 1 x PP 2, tokens/s", "one step at a time"),
        ("tiny, TP 1 x PP 2, one step at a time, tokens/s", "TP 1 x PP 1"),
        ("tiny, one instance, two replicas, tokens/s", "two instances"),
        ("tiny, one instance, two replicas, TTFT p50", "two instances"),
        ("tiny, one instance, two replicas, TTFT p99", "two instances"),
        ("tiny, one instance, two replicas, ITL p99", "two instances"),
    ]
    assert next(iter(ratios.values()))["measured"] == [reduce["ratio"]]
    rows = made["engines"]["tiny"]
    assert [(row["tensor"], row["pipeline"], row["queued"]) for row in rows] == [
        (1, 1, True),
        (2, 1, True),
        (1, 2, True),
        (1, 2, False),
    ]
    assert (rows[0]["itlToOne"], rows[0]["tokensPerSToOne"]) == (1.0, 1.0)
    assert [row["batches"] for row in made["bubble"]["tiny"]] == [1, 2, 4, 8] * 2
    assert made["bubble"]["tiny"][0]["measured"] == 0.5
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| 2 ranks, 16 KiB |" in text
    alone, inside = made["replicas"]["tiny"]
    assert (alone["contender"], alone["tokensPerSToInstances"]) == ("two instances", 1.0)
    assert f"| one instance, two replicas | {inside['tokensPerS']:,.0f} |" in text

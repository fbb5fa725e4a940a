"""The benchmark of KV transfer in its short form: who is measured, and that wrong bytes show."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.kv.__main__ import main
from bench.kv.memory import Arena, Ring, own_memory
from bench.kv.moves import BESIDE, CONTROL_CASE, MEMCPY, OWN, Moves
from bench.kv.page import BEGIN, with_measured
from bench.kv.pair import Batch, SideFailed, pair
from bench.kv.report import ratio, report
from bench.kv.shape import Case
from bench.report import END

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.long
def test_the_short_form_measures_all_of_ours_beside_the_peers_that_need_no_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "kv.md"
    page.write_text(f"before\n{BEGIN}{END}after\n")
    assert main(["--quick", "--output", str(tmp_path / "kv.json")]) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    kept = json.loads((tmp_path / "kv.json").read_text())
    assert made == {name: value for name, value in kept.items() if name != "measuredMs"}
    assert made["absent"] == {}
    for layout in ("whole", "paged"):
        rows = {row["contender"]: row for row in made["moves"] if row["layout"] == layout}
        assert set(rows) == {MEMCPY, *OWN, *BESIDE}
        assert rows[MEMCPY]["toMemcpy"] == 1.0
        assert all(row["gbPerS"] > 0 and row["cpuSecondsPerGb"] > 0 for row in rows.values())
    assert set(made["control"]) == {"shm", "uds", "tcp"}
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| 128 tokens, paged blocks |" in text


@pytest.mark.slow
def test_bytes_that_did_not_come_are_seen_and_a_side_that_fails_says_why(tmp_path: Path) -> None:
    case = Case(128, "paged")
    with pair(Path(sys.executable), tmp_path, blocks=16, product=True) as two:
        two.open("plain-tcp")
        assert two.is_right("plain-tcp", case)
        source = two._p.ask("send", name="plain-tcp", case=case, count=0)["ids"]
        assert source == []
        two._d.ask("clear")
        blocks = list(range(case.blocks))
        assert not two._d.ask("holds", ids=blocks, far_ids=blocks)
        with pytest.raises(SideFailed, match="KeyError"):
            two.move("shm", case, 1)


def test_memory_is_compared_block_by_block_and_layer_by_layer() -> None:
    one, other = own_memory(4), own_memory(4)
    one.fill(1)
    other.array[:, [2, 0]] = one.array[:, [1, 3]]
    assert other.holds([2, 0], one, [1, 3])
    assert not other.holds([0, 2], one, [1, 3])
    other.array[31, 0, 70] ^= 1
    assert not other.holds([2, 0], one, [1, 3])


def test_views_of_blocks_stand_in_the_order_of_layers_and_blocks() -> None:
    arena: Arena = own_memory(4)
    arena.fill(1)
    for layout, ids in (("whole", [1, 2]), ("paged", [3, 0])):
        expected = b"".join(arena.array[layer, n].tobytes() for layer in range(32) for n in ids)
        assert b"".join(arena.views(ids, layout)) == expected


def test_a_ring_gives_all_blocks_before_one_comes_again_and_whole_ones_side_by_side() -> None:
    ring = Ring(10, seed=1)
    assert [ring.take(4, "whole")[0] for _ in range(3)] == [0, 4, 0]
    first, second = ring.take(5, "paged"), ring.take(5, "paged")
    assert sorted(first + second) == list(range(10))
    assert Ring(10, seed=1).take(5, "paged") == first


def test_a_ratio_is_of_one_round_and_the_median_of_the_rounds_is_taken() -> None:
    case = Case(128, "whole")
    moves = Moves(
        {
            ("shm", case): [Batch([2.0], 1.0), Batch([8.0], 1.0), Batch([1.0, 1.0, 9.0], 1.0)],
            (MEMCPY, case): [Batch([1.0], 1.0), Batch([2.0], 1.0), Batch([0.75], 1.0)],
        }
    )
    assert ratio(moves, "shm", MEMCPY, case) == 0.5
    assert ratio(moves, "shm", "nixl", case) is None


def test_a_transport_of_ours_that_was_left_out_is_a_complaint() -> None:
    from bench.kv.report import broken

    batches = {("control-shm", CONTROL_CASE): [Batch([1.0], 1.0)]}
    made = report(Moves(batches, {"shm": "it stopped", "nixl": "not here"}), {}, {})
    assert broken(made) == ["shm: it stopped"]


def test_the_page_shows_what_the_json_has() -> None:
    page = ROOT / "docs/benchmarks/kv.md"
    kept = page.with_suffix(".json")
    if not kept.exists():
        pytest.skip("nothing was measured yet")
    assert with_measured(page.read_text(), json.loads(kept.read_text())) == page.read_text()

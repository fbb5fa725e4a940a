"""The benchmark of changes: what its rows count, what it complains of, and its table."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from bench.change.changes import CHANGES, SMALL
from bench.change.report import BEGIN, broken, report, with_measured
from bench.change.run import HUNG, WRONG, Found, Look, RouterWatch, Window
from bench.report import END


def _found(*kinds: str, mixed: int = 0, complaint: str = "") -> Found:
    """Two changes of 10 s; each request lasts 2 s, and one begins each second from 101 on."""
    windows = [Window("image", 100, 110), Window("node drain", 112, 122, complaint)]
    looks = [Look(99 + n, 2, 2 if n != 5 else 1, mixed * (n > 15), 10 * n) for n in range(25)]
    requests = [(101.0 + n, 103.0 + n, kind) for n, kind in enumerate(kinds)]
    return Found(windows, looks, requests, [kind for kind in kinds if kind])


def test_a_request_counts_in_each_change_during_which_it_ran_and_once_in_the_sum():
    made = report(_found(*[""] * 15), rate=5.0, kubernetes="v1")
    counts = {row["change"]: row["requests"] for row in made["rows"]}
    assert counts == {"image": 10, "node drain": 6}
    assert made["total"]["requests"] == 15
    assert not broken(made)


def test_a_row_has_the_lowest_capacity_and_the_mixed_pairs_of_its_own_time():
    rows = {
        row["change"]: row for row in report(_found("", mixed=3), rate=5, kubernetes="")["rows"]
    }
    assert rows["image"]["lowest"] == {"prefill": 2, "decode": 1}
    assert rows["image"]["routable"] == [[0, 2, 2], [4, 2, 1], [5, 2, 2]]
    assert rows["node drain"]["lowest"] == {"prefill": 2, "decode": 2}
    assert (rows["image"]["mixedPairs"], rows["node drain"]["mixedPairs"]) == (0, 3)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(HUNG, "hung"), (WRONG, "wrong"), ("refused", "failed"), ("broken", "failed")],
)
def test_each_request_that_was_not_answered_right_breaks_the_run(kind: str, name: str):
    made = report(_found("", kind), rate=5.0, kubernetes="v1")
    assert made["total"][name] == 1
    assert made["ratios"][f"{name} to requests"] == 0.5
    assert f"{name}: 1 of" in broken(made)[0]


def test_mixed_pairs_and_a_change_that_does_not_end_break_the_run():
    assert "mixedPairs: 3 of" in broken(report(_found("", mixed=3), rate=5, kubernetes=""))[0]
    made = report(_found("", complaint="no end"), rate=5, kubernetes="")
    assert broken(made) == ["node drain: no end"]


def test_a_run_in_which_no_router_counted_a_pair_proves_nothing():
    found = _found("")
    found.looks = [Look(100, 2, 2, 0, 0)]
    assert broken(report(found, rate=5, kubernetes="")) == [
        "no router said of what revisions its pairs are"
    ]


def test_the_page_gets_the_table_and_keeps_the_rest():
    made = report(_found("", "refused"), rate=5.0, kubernetes="v1")
    page = with_measured(f"# Before\n{BEGIN}old\n{END}after\n", made)
    assert page.startswith("# Before\n")
    assert page.endswith(f"{END}after\n")
    assert "old" not in page
    assert "| image | 1 | 2 | 1 | 0 | 0 | 0 | 10 (10) | 2, 1 |" in page
    assert "| **all** | **2** | **2** | **1** | **0** | **0** | **0** | | |" in page


def test_the_small_form_has_changes_of_the_whole_one():
    assert set(SMALL) < set(CHANGES)


class Routers:
    """A fleet's routers behind the API server: by name the P and D that each knows and how many
    mixed pairs it had; None: it does not answer."""

    name = "chat"
    namespace = "change"

    def __init__(self, **routers: tuple[int, int, int] | None) -> None:
        self.routers = routers
        self.cluster = SimpleNamespace(read=self.read)

    def find(self, kinds: str, *, labels: str) -> list[dict[str, Any]]:
        assert (kinds, "pool=router" in labels) == ("pods", True)
        status = {"conditions": [{"type": "Ready", "status": "True"}]}
        return [{"metadata": {"name": n, "uid": n}, "status": status} for n in self.routers]

    def read(self, path: str, *, timeout_s: float) -> str:
        found = self.routers[path.split("/pods/")[1].split(":")[0]]
        if found is None:
            raise TimeoutError(timeout_s)
        prefill, decode, mixed = found
        if path.endswith("/instances"):
            kinds = ["P"] * prefill + ["D"] * decode
            rows = [{"type": kind, "state": "Ready"} for kind in kinds]
            rows += [{"type": "D", "state": state} for state in ("Draining", "CircuitOpen")]
            return json.dumps({"instances": rows})
        counts = {"same": 10, "other": mixed, "unknown": 0}
        samples = (f'{{revisions="{word}"}} {n}.0' for word, n in counts.items())
        return "\n".join(f"xpyd_router_pair_revisions_total{one}" for one in samples)


def _watch(routers: Any) -> RouterWatch:
    return RouterWatch(routers)


def test_the_router_that_knows_fewest_instances_counts_and_pairs_of_all_are_added():
    watch = _watch(Routers(one=(2, 3, 1), two=(2, 1, 4)))
    watch.look()
    (look,) = watch.looks
    assert (look.prefill, look.decode, look.mixed_pairs, look.pairs) == (2, 1, 5, 25)


def test_pairs_of_a_router_that_has_ended_stay():
    routers = Routers(one=(2, 2, 1), two=(2, 2, 2))
    watch = _watch(routers)
    watch.look()
    del routers.routers["one"]
    watch.look()
    assert [look.mixed_pairs for look in watch.looks] == [3, 3]


def test_a_router_that_does_not_answer_is_no_capacity_of_0():
    routers = Routers(one=(2, 2, 0), two=None)
    watch = _watch(routers)
    watch.look()
    assert not watch.looks
    routers.routers.clear()  # none at all is
    watch.look()
    assert [(look.prefill, look.decode) for look in watch.looks] == [(0, 0)]

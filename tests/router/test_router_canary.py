"""A canary: the share of new requests that a revision on trial gets, and how they are counted."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.router.beats import beat
from tests.router.fakes import (
    Call,
    Generated,
    HttpEngine,
    answer,
    begin_and_die,
    die,
    fleet,
    sse,
    start_stream,
    text_of,
    until,
)
from xpyd_router.canary import SideFigures
from xpyd_router.fleet.instances import Snapshot
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.registry import Registry
from xpyd_router.policy.base import PAIRINGS, Pairing, Want
from xpyd_router.policy.canary import Canary
from xpyd_router.policy.pairs import Pair, build_policy
from xpyd_router.request_metrics import CallMetrics, InstanceMetrics

TEXT = "t0.0 t0.1 t0.2 t0.3 "
BOTH = {"prefill": ("prefill/b",), "decode": ("decode/b",)}
POOLS = {"P": "prefill", "D": "decode", "A": "all"}


def canary(weight: int = 10, **revisions: Any) -> Canary:
    return Canary("c-0", weight, **(revisions or BOTH))


class Known:
    """Instances `kind/revision`, and a policy with a canary that picks among them."""

    def __init__(
        self, *instances: str, policy: str = "RoundRobin", pairing: Pairing = "SameRevision"
    ) -> None:
        self.registry = Registry(
            period_s=3.0, missed_beats=3, same_revision=pairing == "SameRevision"
        )
        random_ = random.Random(1).random
        self.policy = build_policy(policy, loads=LoadTable(), random=random_)
        self.policy.canary = canary()
        for number, (kind, revision) in enumerate(one.split("/") for one in instances):
            own = {"compatibility": "k", "models": ("m",), "continuation": 1, "incarnation": "i"}
            said = beat(
                kind,
                number + 1,
                **own,
                pool=POOLS[kind],
                revision=revision,
                fleet_revision=revision[0],
            )
            self.registry.apply(said, 0.0)

    @property
    def snapshot(self) -> Snapshot:
        return self.registry.snapshot

    def picks(self, times: int = 1000, **want: Any) -> Counter[str]:
        """The revisions of so many picks."""
        found: Counter[str] = Counter()
        for _ in range(times):
            choice = self.policy.pick(self.snapshot, Want("m", **want))
            found["".join(one.beat.revision for one in choice or ())] += 1
        return found


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("policy", ["RoundRobin", "LeastLoaded", "PowerOfTwo", "PrefixAware"])
@pytest.mark.parametrize("weight", [1, 10, 37, 99])
def test_the_share_holds_and_no_pair_is_of_both(policy: str, weight: int, pairing: Pairing) -> None:
    known = Known("P/a", "P/a", "P/a", "D/a", "D/a", "P/b", "D/b", policy=policy, pairing=pairing)
    known.policy.canary = canary(weight)
    found = known.picks()
    assert set(found) == {"aa", "bb"}
    assert abs(found["bb"] - 10 * weight) <= 20


@pytest.mark.parametrize("rhythm", [2, 3, 5, 10])
def test_each_kind_of_requests_in_turns_has_its_share(rhythm: int) -> None:
    known = Known("P/a", "D/a", "P/b", "D/b")
    for_one: Counter[str] = Counter()
    for _ in range(1000 // rhythm):
        for_one.update(known.picks(1))
        known.picks(rhythm - 1)
    assert abs(for_one["bb"] / for_one.total() - 0.1) <= 0.02


def test_turns_of_one_side_meet_all_its_instances_alike() -> None:
    known = Known("P/a", "D/a", "D/a", "P/b", "D/b")
    known.policy.canary = canary(50)
    found: Counter[str] = Counter()
    for _ in range(400):
        choice = known.policy.pick(known.snapshot, Want("m"))
        assert isinstance(choice, Pair)
        found[choice.decode.name] += 1
    assert sum(found.values()) == 400
    assert max(abs(a - b) for a, b in pairwise(sorted(found.values())[:2])) <= 2


@pytest.mark.parametrize(
    ("instances", "served"),
    [
        (("P/a", "D/a", "P/b"), "aa"),  # the canary has no D yet
        (("P/a", "D/a"), "aa"),
        (("P/b", "D/b"), "bb"),  # nothing of the old one is left
        (("P/b", "D/b", "D/a"), "bb"),
        (("P/b", "D/a"), ""),
    ],
)
def test_no_request_waits_for_a_side_without_a_pair(
    instances: tuple[str, ...], served: str
) -> None:
    assert Known(*instances).picks(100) == {served: 100}


def test_a_pair_of_both_serves_at_last_where_the_pairing_allows_it() -> None:
    assert Known("P/b", "D/a", pairing="Compatible").picks(10) == {"ba": 10}


def test_instances_of_a_role_that_did_not_change_serve_both_sides() -> None:
    known = Known("P/a", "D/a", "D/a2")
    known.policy.canary = canary(20, decode=("decode/a2",))
    assert abs(known.picks(100)["aa2"] - 20) <= 2


def test_aggregated_instances_have_their_share_too() -> None:
    known = Known("A/a", "A/a", "A/b")
    known.policy.canary = canary(10, aggregated=("all/b",))
    assert abs(known.picks(100)["b"] - 10) <= 2


def test_what_a_session_has_stays_on_the_old_revision() -> None:
    instances = ("P/a", "D/a", "P/b", "D/b")
    known = Known(*instances, policy="SessionAffinity")
    assert known.picks(100, session="s") == {"aa": 100}
    assert abs(known.picks(100)["bb"] - 10) <= 2
    assert Known(*instances).picks(100, session="s")["bb"] >= 8, "no policy goes by sessions"


def test_a_request_that_has_a_side_keeps_it_while_that_has_a_pair() -> None:
    known = Known("P/a", "D/a", "P/b", "D/b")
    assert known.picks(50, share="new", continue_at="k") == {"bb": 50}
    assert known.picks(50, share="old", continue_at="k") == {"aa": 50}
    gone = frozenset(one.key for one in known.registry.instances if one.beat.revision == "b")
    assert known.picks(50, share="new", continue_at="k", exclude=gone) == {"aa": 50}


def test_without_a_canary_all_instances_are_alike() -> None:
    known = Known("P/a", "D/a", "P/b", "D/b")
    known.policy.canary = None
    assert known.picks(100) == {"aa": 50, "bb": 50}


def test_the_gaps_of_a_stream_count_for_its_side() -> None:
    now = iter([1.0, 2.0, 2.5, 3.5, 4.0])
    figures = SideFigures()
    metrics = InstanceMetrics("d", "decode", 0.0)
    call = CallMetrics(metrics, lambda: next(now), 0, figures.itl_s)
    for chunks in (1, 1, 2, 1):  # the first one is no gap
        call.streamed(chunks, 10)
    assert figures.itl_s.sum == metrics.itl_s.sum == 0.5 + 1.0 + 0.5
    assert figures.itl_s.count == metrics.itl_s.count == 4


def written(path: Path, weight: int = 10, name: str = "c-0") -> Path:
    said = {"name": name, "weightPercent": weight, **BOTH}
    path.write_text(json.dumps(said))
    return path


async def two_revisions(fleet_: Any, each: int = 1) -> dict[str, HttpEngine]:
    """Engines by kind, revision and number."""
    return {
        f"{kind}{revision}{number}": await fleet_.engine(
            kind, pool=POOLS[kind], revision=revision, fleet_revision=revision
        )
        for revision in "ab"
        for kind in "PD"
        for number in range(each)
    }


def counted(fleet_: Any, what: str, side: str, name: str = "c-0") -> float:
    return fleet_.metric(f"xpyd_router_canary_{what}", canary=name, revision=side)


@pytest.mark.parametrize("pairing", PAIRINGS)
async def test_a_router_gives_the_canary_its_share_and_counts_both_sides(
    tmp_path: Path, pairing: Pairing
) -> None:
    path = written(tmp_path / "canary.json")
    async with fleet(canary_file=path, pairing=pairing) as fleet_:
        engines = await two_revisions(fleet_)
        streams = [fleet_.events() for _ in range(50)]
        for events in await asyncio.gather(*streams):
            assert text_of(events) == TEXT
        await asyncio.gather(*(fleet_.json() for _ in range(50)))
        old, also, new, both = (engines[name].served for name in ("Pa0", "Da0", "Pb0", "Db0"))
        assert (old, new) == (also, both) == (100 - new, new)
        assert abs(new - 10) <= 2
        assert fleet_.metric("xpyd_router_canary", canary="c-0") == 1
        assert counted(fleet_, "served_total", "old") == old
        assert counted(fleet_, "served_total", "new") == new
        assert counted(fleet_, "failed_total", "new") == counted(fleet_, "failed_total", "old") == 0
        ttfts = [counted(fleet_, "ttft_seconds_count", side) for side in ("old", "new")]
        assert sum(ttfts) == 50


@pytest.mark.parametrize("script", [die, answer(500, {"error": "x"}), begin_and_die])
async def test_no_request_fails_because_the_canary_does(tmp_path: Path, script: Any) -> None:
    path = written(tmp_path / "canary.json", 30)
    async with fleet(canary_file=path) as fleet_:
        engines = await two_revisions(fleet_)
        engines["Db0"].script = script
        for events in await asyncio.gather(*(fleet_.events() for _ in range(60))):
            assert text_of(events) == TEXT
        assert counted(fleet_, "failed_total", "new") > 0
        assert counted(fleet_, "failed_total", "old") == 0
        assert counted(fleet_, "served_total", "old") > 35


@pytest.mark.parametrize(("refuses", "status"), [("Pb0", 400), ("Db0", 404)])
async def test_what_a_side_refuses_counts_apart_and_is_no_failure(
    tmp_path: Path, refuses: str, status: int
) -> None:
    path = written(tmp_path / "canary.json", 50)
    async with fleet(canary_file=path) as fleet_:
        engines = await two_revisions(fleet_)
        engines[refuses].script = answer(status, {"error": {"message": "no"}})
        statuses: Counter[int] = Counter()
        for is_stream in (False, True) * 5:
            async with await fleet_.post(stream=is_stream) as response:
                await response.read()
                statuses[response.status] += 1
        assert statuses.total() == 10
        assert counted(fleet_, "failed_total", "new") == 0
        refused = counted(fleet_, "refused_total", "new")
        assert abs(refused - 5) <= 1
        assert counted(fleet_, "served_total", "new") + refused == engines["Pb0"].served
        assert counted(fleet_, "refused_total", "old") == 0


@pytest.mark.parametrize(
    ("said", "not_sent", "is_counted"),
    [
        ("recomputed; reason=timeout", "", True),
        ("recomputed; reason=not_sent", "unreachable", True),
        ("", "unreachable", True),  # a D of an older version says nothing
        ("recomputed; reason=prompt_logprobs", "", False),
        ("moved", "", False),
    ],
)
async def test_prompts_that_d_computes_again_count_for_their_side(
    tmp_path: Path, said: str, not_sent: str, is_counted: bool
) -> None:
    path = written(tmp_path / "canary.json", 50)
    async with fleet(canary_file=path) as fleet_:
        engines = await two_revisions(fleet_)
        engines["Da0"].said_of_kv = "moved"
        engines["Db0"].said_of_kv, engines["Pb0"].not_sent = said, not_sent
        for _ in range(5):
            await fleet_.json()
            assert text_of(await fleet_.events()) == TEXT
        new = counted(fleet_, "served_total", "new")
        assert abs(new - 5) <= 1
        assert counted(fleet_, "recomputed_total", "new") == (new if is_counted else 0)
        assert counted(fleet_, "recomputed_total", "old") == 0
        assert counted(fleet_, "failed_total", "new") == 0


async def compute_again_and_die(engine: HttpEngine, call: Call, request: Any) -> Any:
    """A D without the KV, whose process dies in its stream."""
    response = await start_stream(request, **{"X-Xpyd-Kv": "recomputed; reason=timeout"})
    await response.write(sse(next(Generated(engine, call).chunks())))
    return await die(engine, call, request)


async def test_a_stream_that_breaks_after_d_computed_its_prompt_again_is_a_failure_alone(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "canary.json", 50)
    async with fleet(canary_file=path) as fleet_:
        engines = await two_revisions(fleet_)
        engines["Db0"].script = compute_again_and_die
        for _ in range(4):
            assert text_of(await fleet_.events()) == TEXT
        assert counted(fleet_, "failed_total", "new") > 0
        assert counted(fleet_, "recomputed_total", "new") == 0


async def test_a_stream_goes_on_with_the_revision_that_it_began_with(tmp_path: Path) -> None:
    path = written(tmp_path / "canary.json", 50)
    async with fleet(canary_file=path) as fleet_:
        engines = await two_revisions(fleet_, each=2)
        engines["Db0"].script = begin_and_die
        for _ in range(8):
            assert text_of(await fleet_.events()) == TEXT
        assert fleet_.metric("xpyd_router_retries_total") > 0
        assert fleet_.metric("xpyd_router_pair_revisions_total", revisions="other") == 0
        assert abs(engines["Da0"].served + engines["Da1"].served - 4) <= 1, "none moved"


async def test_the_file_is_followed_and_what_is_none_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "canary.json"
    async with fleet(canary_file=path) as fleet_:
        policy = fleet_.router.state.policy
        await two_revisions(fleet_)
        assert policy.canary is None
        written(path)
        await until(lambda: policy.canary is not None)
        await fleet_.json()
        assert counted(fleet_, "served_total", "old") == 1
        written(path, 50, "c-1")
        await until(lambda: policy.canary is not None and policy.canary.name == "c-1")
        assert counted(fleet_, "served_total", "old", "c-1") == 0
        path.write_text('{"name": "c-2", "weightPercent": 500}')
        await asyncio.sleep(1.5)
        assert policy.canary is not None
        path.unlink()
        await until(lambda: policy.canary is None)
        assert b"xpyd_router_canary" not in fleet_.router.state.metrics.render(())

"""Every mode over every transport in fleets of both shapes, and then faults at random moments.

The reference is one process: transformers' greedy tokens (`cases`). Each P has a mode and a
transport of its own, so a fleet of three shows three of the nine; D takes what comes. `make soak`
runs the whole product, each with its own fleet and with 200 requests among faults.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.faults import KINDS, Faults, draw
from tests.e2e.oracle import Case, load
from tests.e2e.wired import MODES, TRANSPORTS, Way, Wired, wired

pytestmark = [pytest.mark.slow, pytest.mark.long]

SEED = 20_261_121
REQUESTS = 200
CLIENTS = 8
# P's frames are small, so that a stall finds one; what waits for a silent peer ends soon.
FLAGS = ("--kv-group-bytes", "1", "--kv-wait-seconds", "2", "--kv-lease-seconds", "3")
ALL_WAYS = [Way(mode, transport) for transport in TRANSPORTS for mode in MODES]
# Three at a time, of unlike transports.
TRIOS = [
    [Way(MODES[(i + turn) % len(MODES)], transport) for i, transport in enumerate(TRANSPORTS)]
    for turn in range(len(MODES))
]
SHAPES = {"2p2d": (2, 2), "3p1d": (3, 1)}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wired]:
    with wired(tmp_path_factory.mktemp("matrix"), *FLAGS) as scene:
        yield scene


def _agree(scene: Wired, cases: list[Case], *, each: int) -> None:
    """So many requests for each P one after another, whose KV all comes from P."""
    sent = [p.metric("xpyd_kv_sent_bytes_total") for p in scene.ps]
    recomputed = [d.metric("xpyd_kv_recomputed_requests_total") for d in scene.ds]
    for case in itertools.islice(itertools.cycle(cases), each * len(scene.ps)):
        assert scene.fleet.answer(case) == case.ids
    assert all(
        p.metric("xpyd_kv_sent_bytes_total") > n for p, n in zip(scene.ps, sent, strict=True)
    )
    assert [d.metric("xpyd_kv_recomputed_requests_total") for d in scene.ds] == recomputed
    scene.wait_at_rest()


def _takes(scene: Wired) -> None:
    for p in scene.ps:
        taken = p.metrics()[f"xpyd_kv_peers_total{{transport={scene.ways[p.name].transport}}}"]
        assert taken == p.metric("xpyd_kv_peers_total") == len(scene.ds)


@pytest.mark.parametrize("ways", TRIOS, ids=["+".join("-".join(w) for w in t) for t in TRIOS])
def test_3p1d_gives_the_tokens_of_one_process(
    scene: Wired, cases: list[Case], ways: list[Way]
) -> None:
    scene.become(ways, ds=1)
    _agree(scene, cases, each=5)
    _takes(scene)


def test_2p2d_gives_the_tokens_of_one_process(scene: Wired, cases: list[Case]) -> None:
    """In the fleet of before one P leaves, and a D joins."""
    scene.become(TRIOS[-1][1:], ds=2)
    _agree(scene, cases, each=8)
    _takes(scene)


def test_faults_at_random_moments_under_load_hang_nobody_and_change_no_token(
    scene: Wired, cases: list[Case]
) -> None:
    """With a third P, so that every mode and every transport has its part."""
    scene.become(TRIOS[-1], ds=2)
    _with_faults(scene, cases, seed=SEED, kinds=KINDS, seconds=4.0)


@pytest.mark.soak
@pytest.mark.parametrize("way", ALL_WAYS, ids=lambda way: "-".join(way))
@pytest.mark.parametrize("shape", SHAPES)
def test_each_way_in_each_shape_with_faults(
    tmp_path: Path, cases: list[Case], shape: str, way: Way
) -> None:
    num_p, num_d = SHAPES[shape]
    seed = random.SystemRandom().randrange(2**32)
    with wired(tmp_path, *FLAGS) as scene:
        scene.become([way] * num_p, ds=num_d)
        _agree(scene, cases, each=8)
        _takes(scene)
        for turn in range(2):
            _with_faults(scene, cases, seed=seed + turn, kinds=KINDS * 2, seconds=15.0)


def _with_faults(
    scene: Wired, cases: list[Case], *, seed: int, kinds: tuple[str, ...], seconds: float
) -> None:
    drawn = draw(
        seed,
        kinds=kinds,
        engines=len(scene.engines),
        relays=len(scene.relays),
        seconds=seconds,
    )
    print(f"seed {seed}:", *drawn, sep="\n  ")  # noqa: T201
    url = scene.fleet.router.url

    def calm() -> None:
        # As many clients as among the faults: what a process keeps for its busiest moment.
        result = asyncio.run(load(url, cases, seconds=1, clients=CLIENTS, at_least=3 * CLIENTS))
        assert (result.wrong, result.errors, result.broken_streams) == ([], [], [])

    calm()
    scene.wait_at_rest()
    before = scene.sizes()
    faults = Faults(drawn, scene.engines, scene.relays)
    faults.start()
    lasts = max(fault.at_s + fault.lasts_s for fault in drawn)
    try:
        result = asyncio.run(
            load(
                url,
                cases,
                seconds=lasts + 1,
                clients=CLIENTS,
                at_least=REQUESTS,
                tries=20,
                timeout_s=90,
            )
        )
    finally:
        faults.join()
    print(f"{result.agreed} agreed, {len(result.retried)} told of a fault: {result.retried[:3]}")  # noqa: T201
    assert (result.wrong, result.errors, result.broken_streams) == ([], [], [])
    assert result.agreed >= REQUESTS
    scene.fleet.wait_ready(*scene.engines)
    calm()
    scene.wait_at_rest()
    scene.wait_no_larger(before)

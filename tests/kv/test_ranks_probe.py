"""A P's self-test where DATA goes between ranks: each pair is probed; one that fails is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kv.pods import until
from tests.kv.rank_pods import Side, address_of, engine_of, sides
from tests.kv.test_ranks_pairs import ONE, engines
from xpyd_kv.session.probing import PairProbe, ProbeResult

# P's ranks, and those of D that each sends to.
PAIRS = {
    "tp2-pp2": [(0, 0), (0, 1), (1, 0), (1, 1)],
    "tp2xpp2-tp1": [(0, 0), (1, 0), (2, 0), (3, 0)],
    "tp1-pp3": [(0, 0), (0, 1), (0, 2)],
    # Two ranks have each head, and take turns.
    "tp4 of 2 heads-tp1": [(0, 0), (1, 0), (2, 0), (3, 0)],
    "tp4-tp2": [(0, 0), (1, 0), (2, 1), (3, 1)],
}


def probe(p: Side, d: Side) -> ProbeResult:
    found: list[ProbeResult] = []
    p.kv.probe(address_of(d.kv.endpoint), found.append)
    until(lambda: found, "the probe's end")
    return found[0]


def ranks_of(pairs: tuple[PairProbe, ...]) -> list[tuple[int, int]]:
    return [(pair.source, pair.destination) for pair in pairs]


@pytest.mark.parametrize("name", PAIRS)
def test_every_pair_of_ranks_that_may_send_is_probed(name: str) -> None:
    with sides(*engines(name)) as (p, d):
        result = probe(p, d)
        assert (result.ok, result.reason) == (True, "")
        assert ranks_of(result.pairs) == PAIRS[name]
        places = d.addresses if d.is_ranked else (address_of(d.kv.endpoint),)
        for pair in result.pairs:
            assert pair.address == places[pair.destination]
            assert pair.result.ok
            assert (pair.result.transport, pair.result.num_bytes) == ("tcp", 65536)
        assert p.kv.metrics.probes == {"ok": 1}
        # Again, over the connections that stand now.
        assert probe(p, d).ok


def test_pairs_say_what_moves_their_bytes(tmp_path: Path) -> None:
    options = {"transports": ("uds", "tcp"), "folder": tmp_path}
    with sides(*engines("tp2-pp2"), **options) as (p, d):
        assert {pair.result.transport for pair in probe(p, d).pairs} == {"uds"}


def test_a_rank_that_is_not_reached_is_named_with_who_tried() -> None:
    with sides(*engines("tp2-pp2")) as (p, d):
        d.parts[1].endpoint.close(2.0)
        result = probe(p, d)
        assert (result.ok, result.reason) == (False, "unreachable")
        found = {(pair.source, pair.destination): pair.result.reason for pair in result.pairs}
        assert found == {(0, 0): "", (0, 1): "unreachable", (1, 0): "", (1, 1): "unreachable"}
        assert {pair.address for pair in result.pairs if not pair.result.ok} == {d.addresses[1]}
        assert p.kv.metrics.probes == {"unreachable": 1}


def test_engines_of_one_rank_have_no_pairs() -> None:
    alone = engine_of(1, ONE)
    with sides(alone, alone) as (p, d):
        result = probe(p, d)
        assert (result.ok, result.pairs) == (True, ())

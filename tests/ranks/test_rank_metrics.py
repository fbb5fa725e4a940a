"""The ranks and the experts of an engine on /metrics."""

from __future__ import annotations

from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.engine.executor import LayerExperts, LayerMoves, sum_by_layer
from xpyd_worker.ranks.start.messages import RankReady
from xpyd_worker.ranks.watch.beats import Beat
from xpyd_worker.ranks.watch.judge import Shown
from xpyd_worker.replicas.coordinator import Counts
from xpyd_worker.server.telemetry.expert_metrics import expert_samples
from xpyd_worker.server.telemetry.metrics import rank_samples, replica_samples


def test_each_rank_has_its_own_metrics_under_its_place() -> None:
    sizes = Sizes(pipeline=2, tensor=2)
    samples = rank_samples(
        sizes,
        shown=[Shown(rank != 2, Beat(9, 5, 4, 1_500_000_000 * rank, rank)) for rank in range(4)],
        ready=[
            RankReady(7, 100 + rank, 200 + rank, None, "float32", 1, False) for rank in range(4)
        ],
        fits=(9, 7, 8, 10),
    )
    found = {(s.name.removeprefix("xpyd_engine_rank_"), s.labels): s for s in samples}
    assert len(found) == 6 * 4
    labels = (("rank", "2"), ("stage", "1"), ("tensor", "0"))
    of_two = {name: sample.value for (name, where), sample in found.items() if where == labels}
    assert of_two == {
        "up": 0,
        "steps": 2,
        "processor_seconds": 3.0,
        "weight_bytes": 102,
        "kv_cache_bytes": 202,
        "kv_blocks_fit": 8,
    }
    assert found["up", (("rank", "1"), ("stage", "0"), ("tensor", "1"))].value == 1


def test_ranks_of_a_replica_count_behind_those_of_the_ones_before() -> None:
    ready = [RankReady(7, 100, 200, None, "float32", 1, False)] * 2
    shown = [Shown(True, Beat())] * 2
    samples = rank_samples(Sizes(tensor=2), shown=shown, ready=ready, fits=(9, 9), first=4)
    assert {sample.labels[0] for sample in samples} == {("rank", "4"), ("rank", "5")}


def test_each_replica_has_its_own_metrics_also_while_it_is_gone() -> None:
    rows = [(Counts(waiting=2, running=3), 0), (None, 4)]
    scalings, *samples = replica_samples(rows, 3)
    assert (scalings.name, scalings.labels, scalings.value) == ("xpyd_engine_scalings", (), 3)
    found = {
        (s.name.removeprefix("xpyd_engine_replica_"), s.labels[0][1]): s.value for s in samples
    }
    assert found == {
        ("up", "0"): 1,
        ("requests_waiting", "0"): 2,
        ("requests_running", "0"): 3,
        ("restarts", "0"): 0,
        ("up", "1"): 0,
        ("requests_waiting", "1"): 0,
        ("requests_running", "1"): 0,
        ("restarts", "1"): 4,
    }


def test_an_engine_that_is_one_process_shows_no_ranks() -> None:
    assert not list(rank_samples(Sizes(), shown=(), ready=(), fits=()))


def test_experts_are_summed_over_layers_and_each_layer_shows_how_uneven_it_is() -> None:
    samples = list(expert_samples([LayerExperts(0, (5, 1, 2)), LayerExperts(2, (0, 7, 1))]))
    found = {(s.name.removeprefix("xpyd_engine_expert_"), s.labels): s.value for s in samples}
    assert found == {
        ("tokens", (("expert", "0"),)): 5,
        ("tokens", (("expert", "1"),)): 8,
        ("tokens", (("expert", "2"),)): 3,
        ("layer_tokens", (("layer", "0"),)): 8,
        ("layer_tokens", (("layer", "2"),)): 8,
        ("layer_busiest_tokens", (("layer", "0"),)): 5,
        ("layer_busiest_tokens", (("layer", "2"),)): 7,
    }
    assert {s.kind for s in samples} == {"counter"}
    assert not list(expert_samples(())), "a model without experts has no such series"


def test_a_layer_whose_experts_move_shows_how_often_and_how_even_it_is() -> None:
    moves = LayerMoves(placements=2, moved=5, before=1.6, after=1.05)
    samples = expert_samples([LayerExperts(0, (5, 1)), LayerExperts(3, (2, 2), moves)])
    found = {
        (s.name.removeprefix("xpyd_engine_expert_layer_"), s.labels): (s.value, s.kind)
        for s in samples
        if not s.name.endswith("tokens")
    }
    layer = ("layer", "3")
    assert found == {
        ("rebalancings", (layer,)): (2, "counter"),
        ("moves", (layer,)): (5, "counter"),
        ("imbalance", (layer, ("placement", "before"))): (1.6, "gauge"),
        ("imbalance", (layer, ("placement", "after"))): (1.05, "gauge"),
    }


def test_moves_of_replicas_add_up_and_the_worse_balance_is_shown() -> None:
    one, other = LayerMoves(1, 4, 1.5, 1.0), LayerMoves(2, 3, 1.2, 1.1)
    assert sum_by_layer(
        [LayerExperts(0, (1, 2), one), LayerExperts(0, (3, 4), other), LayerExperts(0, (5, 6))]
    ) == [LayerExperts(0, (9, 12), LayerMoves(3, 7, 1.5, 1.1))]


def test_experts_of_many_layers_are_not_as_many_series_as_layers_times_experts() -> None:
    samples = list(expert_samples([LayerExperts(n, (1,) * 256) for n in range(58)]))
    assert len(samples) == 256 + 2 * 58

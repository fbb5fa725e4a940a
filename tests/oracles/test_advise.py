"""Article facts 61 to 66: what layouts cost, both decision trees, the articles' four templates."""

from __future__ import annotations

import itertools

import pytest

from tests.tools.advice import GB, advice, devices, facts
from xpyd_core.errors import UserError
from xpyd_core.parallel.ranks import Sizes
from xpyd_tools.advise.arithmetic import HBM_BYTES_PER_S, LINKS, device_bytes
from xpyd_tools.advise.fit import Division, Sizing, memory_of
from xpyd_tools.advise.layout import step_of
from xpyd_tools.advise.trees import Layout, decide, first_tree, second_tree

DENSE, MIXED = "llama-70b", "deepseek-v3"


def test_memory_of_a_device_by_each_way_to_divide() -> None:
    """Article fact 61."""
    shared, experts = 20 * GB, 640 * GB
    assert device_bytes(shared, experts, tensor=8) == 660 * GB // 8
    assert device_bytes(shared, experts, pipeline=4) == 660 * GB // 4
    assert device_bytes(shared, experts, expert=8) == 20 * GB + 80 * GB
    assert device_bytes(shared, experts, tensor=8, expert=8) == 660 * GB // 8
    # Copies have all of it each.
    assert device_bytes(shared, experts) * Sizes(data=3).world == 3 * 660 * GB


def test_memory_of_a_rank_of_the_models_with_experts() -> None:
    """Article fact 61, by the sizes in config.json."""
    v3, mixtral = facts(MIXED), facts("mixtral-8x7b")
    # Three projections of each expert, in the layers that have some.
    of_v3, of_mixtral = 58 * 256 * 3 * 7168 * 2048, 32 * 8 * 3 * 4096 * 14336
    found = [sum(layer.experts for layer in model.layers) for model in (v3, mixtral)]
    assert found == [of_v3, of_mixtral] == [653_908_770_816, 45_097_156_608]
    shared = [sum(layer.shared for layer in model.layers) for model in (v3, mixtral)]
    outer = 2 * 129280 * 7168, 2 * 32000 * 4096
    totals = [model.parameters for model in (v3, mixtral)]
    assert totals == [sum(parts) for parts in zip(found, shared, outer, strict=True)]
    # One byte for each of V3's numbers in layers, two for all else.
    assert (v3.weights.bits, mixtral.weights.bits) == (8, 16)
    for model, experts, rest, ends, size in (
        (v3, of_v3, shared[0], outer[0], 1),
        (mixtral, of_mixtral, shared[1], outer[1], 2),
    ):
        for tensor, copies in ((8, 1), (4, 2), (2, 4), (1, 8)):
            # The shared part is TP's share in each copy; of experts there is one of all copies.
            division = Division(tensor, 1, tensor * copies)
            held = memory_of(model, division, 0).weights_bytes
            parts = size * (rest // tensor + experts // 8) + 2 * (ends // tensor)
            assert held == pytest.approx(parts, abs=2)
            assert device_bytes(rest, experts, tensor=tensor, expert=tensor * copies) == (
                -(-rest // tensor) + experts // 8
            )
        # Copies apart have the experts in each; stages halve what a rank has, but for the ends.
        apart = memory_of(model, Division(4, 1, 4), 0).weights_bytes
        together = memory_of(model, Division(4, 1, 8), 0).weights_bytes
        assert apart - together == size * experts // 8


def test_mixtrals_all_to_alls_of_32_tokens() -> None:
    """Article fact 55, of two experts of each token in 16 bits; V3's are in test_arithmetic."""
    model, node = facts("mixtral-8x7b"), devices(1, 8)
    step = step_of(model, Layout(tensor=8, expert=8), node, 32)
    assert step.all_to_alls is not None
    assert (step.all_to_alls.each_bytes, step.all_to_alls.count) == (524_288, 2 * 32)
    assert step.all_to_alls.sent_bytes == 64 * 524_288 == 33_554_432
    # Between copies each rank has an eighth of the rows; nothing is summed where TP is 1.
    copies = step_of(model, Layout(tensor=1, expert=8, data=8, inside=8), node, 32)
    assert copies.all_to_alls is not None
    assert (copies.all_to_alls.each_bytes, copies.all_to_alls.sent_bytes) == (524_288, 4_194_304)
    assert copies.all_reduces is None
    halves = step_of(model, Layout(tensor=4, expert=8, data=2, inside=2), node, 32)
    assert halves.all_reduces is not None
    assert halves.all_reduces.each_bytes == 16 * 4096 * 2, "a copy adds up its own tokens alone"


def test_bandwidths_beside_a_devices_own_memory() -> None:
    """Article fact 62."""
    assert HBM_BYTES_PER_S == 3350 * GB
    gigabytes = {name: link.bytes_per_s / GB for name, link in LINKS.items()}
    assert gigabytes == {"nvlink": 900, "pcie": 128, "ib": 50, "eth": 12.5}
    ratios = [round(link.bytes_per_s / HBM_BYTES_PER_S, 3) for link in LINKS.values()]
    assert ratios == [0.269, 0.038, 0.015, 0.004]


def sizing(
    *,
    nodes: int = 1,
    least: int | None = None,
    stages: int | None = None,
    experts: int = 0,
    within: str = "nvlink",
) -> Sizing:
    """Of nodes of 8."""
    return Sizing(
        hardware=devices(nodes, 8, within=within),
        experts=experts,
        tensor_most=8,
        tensor_least=least,
        staged=None if stages is None else Division(8, stages, 8 if experts else 1),
    )


@pytest.mark.parametrize(
    ("case", "high_availability", "expected"),
    [
        (sizing(least=1), False, Layout(data=8)),
        (sizing(least=1, nodes=2, experts=8), False, Layout(data=16)),
        (sizing(least=4), False, Layout(tensor=8)),
        (sizing(least=4, experts=64), False, Layout(tensor=8, expert=8)),
        (sizing(nodes=4, stages=2), False, Layout(tensor=8, pipeline=2)),
        (sizing(nodes=4, stages=2), True, Layout(tensor=8, pipeline=2, data=2)),
        (sizing(nodes=2, stages=2, experts=256), False, Layout(tensor=8, pipeline=2)),
    ],
)
def test_the_first_tree_of_questions_gives_the_layout(
    case: Sizing, high_availability: bool, expected: Layout
) -> None:
    """Article fact 63."""
    assert first_tree(case, high_availability=high_availability).layout == expected


@pytest.mark.parametrize(
    ("case", "throughput", "expected"),
    [
        (sizing(least=1), False, Layout()),
        (sizing(least=1), True, Layout(data=8)),
        (sizing(least=4), False, Layout(tensor=8)),
        (sizing(least=4), True, Layout(tensor=4, data=2)),
        (sizing(nodes=4, stages=2), False, Layout(tensor=8, pipeline=2)),
        (sizing(nodes=4, stages=2), True, Layout(tensor=8, pipeline=2, data=2)),
        (sizing(nodes=4, stages=3), False, Layout(tensor=8, pipeline=3)),
        (sizing(nodes=4, stages=2, within="pcie"), False, Layout(tensor=8, pipeline=2)),
        (sizing(least=2, experts=64), False, Layout(tensor=8, expert=8)),
        (sizing(nodes=2, stages=2, experts=256), False, Layout(8, 2, 8)),
    ],
)
def test_the_second_tree_of_questions_gives_the_layout(
    case: Sizing, throughput: bool, expected: Layout
) -> None:
    """Article fact 64."""
    answer = second_tree(case, throughput=throughput)
    assert answer.layout == expected
    assert answer.steps[-1] == ("more throughput", throughput)


@pytest.mark.parametrize(
    ("model", "memory_gb", "expected"),
    [
        ("mixtral-8x7b", 80, Layout(tensor=1, expert=8, data=16, inside=8)),
        (MIXED, 141, Layout(tensor=1, expert=8, data=16, inside=8)),
        # Without experts, or where a device holds all of it, copies share nothing.
        (DENSE, 80, Layout(tensor=4, data=4)),
        ("mixtral-8x7b", 192, Layout(data=16)),
    ],
)
def test_copies_share_their_experts_where_smaller_tensor_groups_are_enough_then(
    model: str, memory_gb: int, expected: Layout
) -> None:
    nodes = devices(2, 8, memory_bytes=memory_gb * GB)
    found = advice(facts(model), nodes, throughput=True)
    assert found.layout == expected
    if expected.inside == 1:
        return
    assert found.layout.instances == 2
    assert (found.pods, found.pod_gpus, found.idle_gpus) == (1, 8, 0)
    assert any("neither tree lets copies share" in note for note in found.decision.notes)
    assert found.requests >= 16
    # Latency, and roles that move KV, are as the trees say.
    for fields in ({"throughput": False}, {"role": "Decode"}):
        assert advice(facts(model), nodes, **({"throughput": True} | fields)).layout.inside == 1


def test_too_few_experts_for_a_node_are_not_shared() -> None:
    found = advice(facts("mixtral-8x7b"), devices(1, 16), throughput=True)
    assert (found.layout.inside, found.layout.expert) == (1, found.layout.tensor)


def test_the_questions_come_in_the_trees_order() -> None:
    """Article facts 63 and 64."""
    case = sizing(nodes=2, stages=2, experts=256)
    first, second = first_tree(case, high_availability=True), second_tree(case, throughput=False)
    assert [question for question, _ in first.steps] == [
        "one device holds it",
        "one node holds it",
        "high availability",
    ]
    assert [question for question, _ in second.steps] == [
        "one device holds it",
        "NVLink",
        "TP is enough",
        "experts",
        "more throughput",
    ]


def axes(case: Sizing, **wanted: bool) -> dict[str, tuple[int, int, int]]:
    asked = {"high_availability": False, "throughput": False} | wanted
    found = decide(case, **asked).differences
    assert all(each.reason for each in found)
    return {each.axis: (each.first, each.second, each.taken) for each in found}


def test_the_trees_differ_where_one_does_not_ask_what_the_other_asks() -> None:
    assert axes(sizing(least=1)) == {"DP": (8, 1, 8)}
    assert axes(sizing(least=1), throughput=True) == {}
    assert axes(sizing(least=4)) == {}
    assert axes(sizing(least=4), throughput=True) == {"TP": (8, 4, 4), "DP": (1, 2, 2)}
    assert axes(sizing(nodes=2, stages=2, experts=256)) == {"EP": (1, 8, 8)}
    assert axes(sizing(nodes=4, stages=2), high_availability=True) == {"DP": (2, 1, 2)}
    assert axes(sizing(nodes=4, stages=2), throughput=True) == {"DP": (1, 2, 2)}


def test_llama_70b_on_one_node_is_divided_by_tensor_over_its_gpus() -> None:
    """Article fact 65."""
    found = advice(facts(DENSE), devices(1, 8), context=8192, concurrency=128)
    assert found.layout == Layout(tensor=8)
    assert found.decision.differences == ()
    assert found.requests >= 128


def test_deepseek_v3_on_two_nodes_gets_expert_parallelism_from_the_second_tree() -> None:
    """Article fact 65."""
    found = advice(facts(MIXED), devices(2, 8), context=8192)
    assert found.layout == Layout(tensor=8, pipeline=2, expert=8)
    assert found.decision.first.layout == Layout(tensor=8, pipeline=2)
    assert found.decision.second.layout == found.layout
    assert [each.axis for each in found.decision.differences] == ["EP"]


def test_llama_8b_in_fp8_gets_a_copy_on_each_of_four_gpus() -> None:
    """Article fact 65."""
    found = advice(facts("llama-8b", quantization="fp8"), devices(1, 4))
    assert found.layout == Layout(data=4)
    assert (found.pods, found.pod_gpus) == (1, 1)


def test_405_gb_of_weights_fit_into_640_gb() -> None:
    """Article fact 65."""
    model, hardware = facts("llama-405b-fp8", params=405e9), devices(1, 8)
    assert model.weights_bytes == 405 * GB
    assert hardware.memory_bytes * hardware.gpus == 640 * GB
    found = advice(model, hardware, utilization=0.95)
    assert found.layout == Layout(tensor=8)
    # What config.json gives counts embedding and head in 16 bits.
    assert facts("llama-405b-fp8").weights_bytes == pytest.approx(405 * GB, rel=0.02)


@pytest.mark.parametrize("memory", [80 * GB, 80 << 30])
def test_671b_needs_two_nodes_of_eight(memory: int) -> None:
    """Article fact 65."""
    with pytest.raises(UserError, match="it takes 2 nodes of 8"):
        advice(facts(MIXED), devices(1, 8, memory_bytes=memory))
    assert advice(facts(MIXED), devices(2, 8, memory_bytes=memory)).layout.pipeline == 2
    assert facts(MIXED).parameters == pytest.approx(671e9, rel=1e-3)


@pytest.mark.parametrize("model", [DENSE, "llama-8b", "llama-405b-fp8", MIXED, "mixtral-8x7b"])
@pytest.mark.parametrize("nodes", [1, 5])
def test_a_tensor_group_stays_in_its_node_and_stages_come_only_where_a_node_is_too_small(
    model: str, nodes: int
) -> None:
    """Article fact 66."""
    wanted = ({}, {"throughput": True}, {"high_availability": True})
    for gpus, fields in itertools.product((1, 2, 6, 8), wanted):
        hardware = devices(nodes, gpus)
        try:
            found = advice(facts(model), hardware, **fields)
        except UserError:
            continue
        layout = found.layout
        assert layout.tensor <= gpus
        assert found.pod_gpus <= gpus
        assert found.pod_gpus % layout.tensor == 0
        assert found.pods * found.pod_gpus == layout.tensor * layout.pipeline * layout.inside
        assert layout.data * layout.tensor * layout.pipeline <= hardware.gpus
        if layout.pipeline > 1:
            alone = devices(1, layout.tensor)
            with pytest.raises(UserError, match="do not fit"):
                advice(facts(model), alone)


def test_more_devices_than_heads_allow_are_used_by_stages_within_the_node() -> None:
    """Article fact 66."""
    # 64 heads, 8 KV heads and 28,672 go into 8 and 4, not into 12 or 6.
    model = facts(DENSE)
    found = advice(model, devices(1, 12, memory_bytes=24 * GB))
    assert found.layout == Layout(tensor=4, pipeline=3)
    assert (found.pods, found.pod_gpus) == (1, 12)
    small = advice(model, devices(1, 6, memory_bytes=48 * GB))
    assert small.decision.first.layout == Layout(tensor=6)
    assert small.layout == Layout(tensor=4)
    assert small.idle_gpus == 2

"""Article facts 35 to 38, 45, 49, 50, 52 and 54: layers of stages, experts of ranks, ranks on their
axes, groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from xpyd_core.errors import UserError
from xpyd_core.parallel.checks import Shape, check_parallel
from xpyd_core.parallel.partition import expert_shares, parse_override, partition, stage_sizes
from xpyd_core.parallel.ranks import RankCoordinates, Sizes, group_of

PARTITIONS = {
    (32, 4): [8, 8, 8, 8],
    (22, 4): [5, 6, 6, 5],
    (5, 3): [2, 2, 1],
    (4, 3): [1, 2, 1],
    (3, 2): [2, 1],
    (21, 4): [5, 5, 6, 5],
    (23, 4): [6, 6, 6, 5],
    (7, 4): [2, 2, 2, 1],
    (10, 3): [3, 4, 3],
    (11, 3): [4, 4, 3],
    (61, 2): [31, 30],
    (61, 4): [15, 15, 16, 15],
    (30, 8): [3, 4, 4, 4, 4, 4, 4, 3],
    (80, 4): [20, 20, 20, 20],
}


@pytest.mark.parametrize(("case", "sizes"), PARTITIONS.items(), ids=str)
def test_layers_that_remain_go_before_the_last_stage(
    case: tuple[int, int], sizes: list[int]
) -> None:
    """Article fact 36."""
    assert stage_sizes(*case) == sizes
    ranges = partition(*case)
    assert [len(each) for each in ranges] == sizes
    assert [layer for each in ranges for layer in each] == list(range(case[0]))


@pytest.mark.parametrize("stages", range(1, 12))
def test_the_last_stage_never_gets_one_more_and_the_first_only_when_all_others_do(
    stages: int,
) -> None:
    """Article fact 36."""
    for layers in range(stages, 80):
        each, rest = divmod(layers, stages)
        sizes = stage_sizes(layers, stages)
        assert sum(sizes) == layers
        assert sizes[-1] == each
        if stages > 1:
            assert (sizes[0] == each + 1) == (rest == stages - 1)


def test_a_stage_without_a_layer_is_refused() -> None:
    """Article fact 36."""
    with pytest.raises(UserError, match="4 stages for 3 layers"):
        stage_sizes(3, 4)


@pytest.mark.parametrize(("text", "layers"), [("5,6,5,6", 22), ("4,6,6,4", 20)], ids=["22", "20"])
def test_the_variable_overrides_the_rule(text: str, layers: int) -> None:
    """Article fact 37."""
    ranges = partition(layers, 4, parse_override(text))
    assert [len(each) for each in ranges] == [int(part) for part in text.split(",")]
    assert ranges[1] == range(ranges[0].stop, ranges[0].stop + 6)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("5,6,5", "3 stages; --pipeline-parallel-size is 4"),
        ("5,6,5,5", "21 layers; the model has 22"),
        ("11,11,0,0", "one layer at least"),
        ("5,six,5,6", "expected numbers with commas"),
        ("5,-6,5,6", "expected numbers with commas"),
        (",", "expected numbers with commas"),
        ("5,6,6,\u00b2", "expected numbers with commas"),
        ("5,6,6," + "5" * 10, "expected numbers with commas"),
        ("5,6,6," + "5" * 5000, "expected numbers with commas"),
        ("1," * 5000 + "1", "5001 stages; --pipeline-parallel-size is 4"),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, complaint: str) -> None:
    """Article fact 37."""
    with pytest.raises(UserError, match=complaint) as raised:
        partition(22, 4, parse_override(text))
    assert len(str(raised.value)) < 200


def test_results_come_from_the_first_rank_of_the_last_stage() -> None:
    """Article fact 45."""
    assert Sizes(pipeline=4, tensor=2).output_rank == 6
    assert Sizes(pipeline=2, tensor=4).output_rank == 4
    assert Sizes(pipeline=1, tensor=8).output_rank == 0
    assert Sizes(pipeline=2, context=2, tensor=2).output_rank == 4


def test_groups_of_two_replicas_of_two_stages_of_four() -> None:
    """Article fact 49."""
    sizes = Sizes(data=2, pipeline=2, tensor=4)
    assert sizes.tensor_groups == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    pairs = ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15))
    assert sizes.pipeline_groups == pairs
    pairs = ((0, 8), (4, 12), (1, 9), (5, 13), (2, 10), (6, 14), (3, 11), (7, 15))
    assert sizes.data_groups == pairs


def test_groups_of_other_sizes() -> None:
    """Article fact 49."""
    assert Sizes(pipeline=2, tensor=4).pipeline_groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    sizes = Sizes(pipeline=4, tensor=2)
    assert sizes.tensor_groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert sizes.pipeline_groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    sizes = Sizes(pipeline=2, context=2, tensor=2)
    assert sizes.pipeline_groups == ((0, 4), (2, 6), (1, 5), (3, 7))


def test_experts_are_shared_by_a_stages_ranks_of_all_replicas() -> None:
    """Article facts 49 and 51."""
    sizes = Sizes(data=2, pipeline=2, tensor=4)
    assert sizes.expert_groups == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    outer = Sizes(external=2, data=2, tensor=2)
    assert outer.expert_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    # Without replicas they are a tensor group.
    assert Sizes(pipeline=2, tensor=2).expert_groups == ((0, 1), (2, 3))


def test_the_switch_makes_as_many_expert_ranks_as_tensor_ranks() -> None:
    """Article fact 54."""
    sizes = Sizes(tensor=8, has_whole_experts=True)
    assert sizes.expert == 8
    assert [len(share) for share in expert_shares(256, sizes.expert)] == [32] * 8
    assert expert_shares(256, 8)[3] == range(96, 128)
    assert Sizes(tensor=8).expert == 1
    # Attention is divided as without; replicas have their ranks' experts, too.
    assert sizes.tensor_groups == (tuple(range(8)),)
    assert Sizes(data=2, tensor=4, pipeline=3, has_whole_experts=True).expert == 8


@pytest.mark.parametrize(
    ("case", "counts"),
    [((5, 2), [3, 2]), ((8, 3), [3, 3, 2]), ((7, 7), [1] * 7), ((60, 8), [8] * 4 + [7] * 4)],
    ids=str,
)
def test_experts_that_remain_go_to_the_first_ranks(
    case: tuple[int, int], counts: list[int]
) -> None:
    """Article fact 54."""
    shares = expert_shares(*case)
    assert [len(share) for share in shares] == counts
    assert [expert for share in shares for expert in share] == list(range(case[0]))


def test_every_rank_is_in_one_group_of_each_kind() -> None:
    """Article facts 49 and 52."""
    sizes = Sizes(external=2, data=3, pipeline=2, context=2, tensor=3)
    assert sizes.world == 72
    assert sizes.replica == 12
    kinds = (sizes.tensor_groups, sizes.pipeline_groups, sizes.data_groups, sizes.expert_groups)
    for groups in kinds:
        assert sorted(rank for group in groups for rank in group) == list(range(72))
    for rank in range(72):
        place = sizes.coordinates(rank)
        assert sizes.rank(place) == rank
        assert group_of(sizes.tensor_groups, rank).index(rank) == place.tensor
        assert group_of(sizes.pipeline_groups, rank).index(rank) == place.stage
        assert group_of(sizes.data_groups, rank).index(rank) == place.data
        in_group = (place.data * sizes.context + place.context) * sizes.tensor + place.tensor
        assert group_of(sizes.expert_groups, rank).index(rank) == in_group


def test_the_number_in_a_group_is_not_the_rank() -> None:
    """Article fact 50."""
    sizes = Sizes(data=2, pipeline=2, tensor=4)
    assert group_of(sizes.tensor_groups, 14).index(14) == 2
    assert sizes.coordinates(14) == RankCoordinates(
        external=0, data=1, stage=1, context=0, tensor=2
    )


SHAPE = Shape(layers=22, heads=32, kv_heads=8, intermediate_sizes=frozenset({5632}))


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        (Sizes(tensor=5), "5 does not divide the model's 32 attention heads"),
        (Sizes(tensor=64), "64 does not divide the model's 32 attention heads"),
        (Sizes(pipeline=23), "23 stages for 22 layers"),
    ],
)
def test_a_bad_combination_is_refused_with_its_numbers(sizes: Sizes, complaint: str) -> None:
    """Article fact 35."""
    with pytest.raises(UserError, match=complaint):
        check_parallel(SHAPE, sizes)


def test_ranks_and_kv_heads_divide_one_another() -> None:
    """Article fact 35."""
    check_parallel(SHAPE, Sizes(tensor=16, pipeline=22))
    few = Shape(layers=2, heads=12, kv_heads=4, intermediate_sizes=frozenset({96}))
    with pytest.raises(UserError, match="6 ranks for 4 KV heads"):
        check_parallel(few, Sizes(tensor=6))
    odd = Shape(layers=2, heads=8, kv_heads=8, intermediate_sizes=frozenset({100}))
    with pytest.raises(UserError, match="8 does not divide the MLP's intermediate size of 100"):
        check_parallel(odd, Sizes(tensor=8))
    check_parallel(odd, Sizes(tensor=4))


def test_all_complaints_are_said_at_once() -> None:
    """Article fact 35."""
    with pytest.raises(UserError) as failure:
        check_parallel(SHAPE, Sizes(tensor=5, pipeline=30))
    assert len(str(failure.value).splitlines()) == 3 + 1


MIXTRAL = Shape(layers=32, heads=32, kv_heads=8, experts=8, expert_sizes=frozenset({14336}))


@pytest.mark.parametrize(
    ("shape", "sizes", "complaint"),
    [
        (SHAPE, Sizes(tensor=2), "--enable-expert-parallel: the model has no experts"),
        (MIXTRAL, Sizes(tensor=16), "16 ranks for 8 experts of a layer; each rank needs one"),
        (MIXTRAL, Sizes(tensor=4, data=4), r"16 ranks \(4 x 4\) for 8 experts of a layer"),
    ],
)
def test_experts_that_cannot_be_divided_so_are_refused_with_the_numbers(
    shape: Shape, sizes: Sizes, complaint: str
) -> None:
    """Article fact 54."""
    with pytest.raises(UserError, match=complaint):
        check_parallel(shape, replace(sizes, has_whole_experts=True))
    check_parallel(MIXTRAL, Sizes(tensor=4, data=2, has_whole_experts=True))


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        (Sizes(redundant_experts=0), "--enable-eplb: no other rank has whole experts; give --enab"),
        (
            Sizes(tensor=4, redundant_experts=2, has_whole_experts=True),
            "--eplb-config: num_redundant_experts: 2 and 8 experts do not divide over 4 ranks; "
            "give 4",
        ),
        (
            Sizes(tensor=2, redundant_experts=10, has_whole_experts=True),
            "--eplb-config: num_redundant_experts: 10; at most 8, 8 experts on each of 2 ranks",
        ),
    ],
)
def test_slots_for_copies_that_cannot_be_are_refused_with_the_numbers(
    sizes: Sizes, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        check_parallel(MIXTRAL, sizes)
    check_parallel(MIXTRAL, Sizes(tensor=4, redundant_experts=4, has_whole_experts=True))
    check_parallel(MIXTRAL, Sizes(tensor=2, redundant_experts=8, has_whole_experts=True))


def test_whole_experts_are_of_any_size_and_slices_are_not() -> None:
    """Article fact 54."""
    odd = replace(MIXTRAL, expert_sizes=frozenset({100}))
    with pytest.raises(UserError, match="8 does not divide the experts' intermediate size of 100"):
        check_parallel(odd, Sizes(tensor=8))
    check_parallel(odd, Sizes(tensor=8, has_whole_experts=True))
    # Layers without experts are divided as ever.
    mixed = replace(odd, intermediate_sizes=frozenset({36}))
    with pytest.raises(UserError, match="8 does not divide the MLP's intermediate size of 36"):
        check_parallel(mixed, Sizes(tensor=8, has_whole_experts=True))

"""The shape that decides how a model can be divided, read from a config.json."""

from __future__ import annotations

from typing import Any

import pytest

from xpyd_core.parallel.checks import Shape, shape_of
from xpyd_core.parallel.ranks import kv_ports, replica_kv_port

PLAIN: dict[str, Any] = {
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 96,
}


def sizes(**fields: Any) -> set[int]:
    shape = shape_of({**PLAIN, **fields})
    assert shape is not None
    return set(shape.intermediate_sizes | shape.expert_sizes)


def test_a_shape_is_layers_heads_and_the_sizes_of_mlps() -> None:
    assert shape_of(PLAIN) == Shape(
        layers=22, heads=32, kv_heads=8, intermediate_sizes=frozenset({96})
    )


def test_experts_are_counted_by_the_names_that_families_give_them() -> None:
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        shape = shape_of({**PLAIN, name: 8, "moe_intermediate_size": 48})
        assert shape is not None
        assert (shape.experts, shape.expert_sizes, shape.intermediate_sizes) == (8, {48}, set())
    assert shape_of(PLAIN) == shape_of({**PLAIN, "num_experts": 0})


def test_without_a_number_of_kv_heads_each_head_has_its_own() -> None:
    shape = shape_of({**PLAIN, "num_key_value_heads": None})
    assert shape is not None
    assert shape.kv_heads == 32


def test_experts_sizes_count_and_that_of_plain_layers_only_where_there_are_some() -> None:
    assert sizes(num_local_experts=8) == {96}
    experts = {"num_experts": 128, "moe_intermediate_size": 48}
    assert sizes(**experts) == {48}
    assert sizes(**experts, mlp_only_layers=[], decoder_sparse_step=1) == {48}
    assert sizes(**experts, mlp_only_layers=[3]) == {48, 96}
    assert sizes(**experts, decoder_sparse_step=2) == {48, 96}
    assert sizes(n_routed_experts=4, moe_intermediate_size=48, first_k_dense_replace=1) == {48, 96}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", None),
        ("num_attention_heads", "32"),
        ("num_attention_heads", True),
        ("num_hidden_layers", -1),
        ("intermediate_size", 0),
    ],
)
def test_what_does_not_say_its_shape_has_none(field: str, value: Any) -> None:
    assert shape_of({**PLAIN, field: value}) is None


def test_each_replica_has_a_kv_port_with_those_of_its_ranks_behind_it() -> None:
    assert [replica_kv_port(21001, replica, ranks=1) for replica in range(3)] == [
        21001,
        21003,
        21005,
    ]
    assert replica_kv_port(21001, 1, ranks=4) == 21006
    assert replica_kv_port(0, 1, ranks=4) == 0
    assert kv_ports(21001, 1, 1) == range(21001, 21002)
    assert kv_ports(21001, 1, 1, is_elastic=True) == range(21001, 21003)
    assert kv_ports(21001, 1, 4) == range(21001, 21006)
    assert kv_ports(21001, 2, 1) == range(21001, 21005)
    assert kv_ports(21001, 2, 2) == range(21001, 21007)

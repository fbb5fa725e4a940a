"""`xpyd up` checks that the model can be divided as the pools say, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.crds.fleets import FLEET, changed
from xpyd_core.errors import UserError
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.load import parse_fleet
from xpyd_operator.up.checks import check_layouts
from xpyd_operator.up.run import plan_fleet_memory

CPU = changed(FLEET, {f"spec.pools.{i}.resources": {"gpus": 0} for i in (0, 1)})
CONFIG = {
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def fleet(
    prefill: dict[str, int], decode: dict[str, int] | None = None, **spec: Any
) -> InferenceFleet:
    layouts = {"spec.pools.0.parallelism": prefill, "spec.pools.1.parallelism": decode or {}}
    others = {f"spec.{name}": value for name, value in spec.items()}
    document = changed(CPU, {**layouts, **others})
    return parse_fleet(yaml.safe_dump(document).encode(), source="f")


def partition(text: str) -> dict[str, Any]:
    return {"env": [{"name": "VLLM_PP_LAYER_PARTITION", "value": text}]}


def refusals(wanted: InferenceFleet, model: str, environ: dict[str, str] | None = None) -> Any:
    with pytest.raises(UserError) as caught:
        check_layouts(wanted, model, environ or {})
    head, *lines = str(caught.value).split("\n  ")
    assert head == f"{model}/config.json: {len(lines)} mistake{'s' if len(lines) > 1 else ''}"
    return lines


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({}, {}),
        ({"tensor": 2}, {"pipeline": 6}),
        ({"tensor": 4, "pipeline": 3}, {"tensor": 1}),
    ],
)
def test_layouts_that_fit_the_model_are_taken(
    model: str, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    check_layouts(fleet(prefill, decode), model, {})


def test_all_that_does_not_fit_is_told_by_the_documents_fields(model: str) -> None:
    assert refusals(fleet({"tensor": 8}, {"tensor": 3, "pipeline": 7}), model) == [
        "spec.pools[0].parallelism.tensor: 8 does not divide the model's 12 attention heads",
        "spec.pools[1].parallelism.tensor: 3 ranks for 4 KV heads; one must divide the other",
        "spec.pools[1].parallelism.tensor: 3 does not divide the MLP's intermediate size of 64",
        "spec.pools[1].parallelism.pipeline: 7 stages for 6 layers; a stage needs one at least",
    ]


def test_whole_experts_are_checked_against_the_experts_of_the_model(tmp_path: Path) -> None:
    """The flag is of all pools, and is told as engine.args' with the pool's sizes."""
    whole = {"args": ["--enable-expert-parallel"]}
    wide = fleet({"tensor": 4}, {"tensor": 2}, engine=whole)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_local_experts": 3}))
    assert refusals(wide, str(tmp_path)) == [
        "spec.engine.args: --enable-expert-parallel: 4 ranks for 3 experts of a layer; each rank "
        "needs one at least (spec.pools[0].parallelism.tensor: 4)"
    ]
    odd = CONFIG | {"num_local_experts": 8, "intermediate_size": 30}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    check_layouts(wide, str(tmp_path), {})
    assert refusals(fleet({"tensor": 4}), str(tmp_path)) == [
        "spec.pools[0].parallelism.tensor: 4 does not divide the experts' intermediate size of 30; "
        "expert: 4 leaves experts whole"
    ]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (line, _) = refusals(wide, str(tmp_path))
    assert line.startswith("spec.engine.args: --enable-expert-parallel: the model has no experts")


def test_whole_experts_of_a_pool_are_told_by_its_own_field(tmp_path: Path) -> None:
    whole = fleet({"tensor": 4, "expert": 4}, {"tensor": 2})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    line = "spec.pools[0].parallelism.expert: the model has no experts"
    assert refusals(whole, str(tmp_path)) == [line]
    both = {"args": ["--enable-expert-parallel"]}
    of_all = refusals(fleet({"tensor": 4, "expert": 4}, engine=both), str(tmp_path))
    assert of_all == [
        line,
        "spec.engine.args: --enable-expert-parallel: the model has no experts "
        "(spec.pools[1].parallelism.tensor: 1)",
    ]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_local_experts": 3}))
    assert refusals(whole, str(tmp_path)) == [
        "spec.pools[0].parallelism.expert: 4 ranks for 3 experts of a layer; each rank needs one "
        "at least"
    ]
    odd = CONFIG | {"num_local_experts": 4, "intermediate_size": 30}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    check_layouts(whole, str(tmp_path), {})


def test_experts_of_all_replicas_are_checked_against_the_experts_of_the_model(
    tmp_path: Path,
) -> None:
    """Without whole experts replicas change nothing that a model must allow."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_local_experts": 6}))
    check_layouts(fleet({"tensor": 2, "data": 3, "expert": 6}, {"data": 9}), str(tmp_path), {})
    wide = fleet({"tensor": 2, "data": 4, "expert": 8})
    assert refusals(wide, str(tmp_path)) == [
        "spec.pools[0].parallelism.expert: 8 ranks (4 x 2) for 6 experts of a layer; each rank "
        "needs one at least"
    ]
    by_args = fleet({"data": 7}, engine={"args": ["--enable-expert-parallel"]})
    assert refusals(by_args, str(tmp_path)) == [
        "spec.engine.args: --enable-expert-parallel: 7 ranks for 6 experts of a layer; each rank "
        "needs one at least (spec.pools[0].parallelism.tensor: 1, data: 7)"
    ]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    check_layouts(fleet({"tensor": 4, "data": 9}), str(tmp_path), {})


def test_the_variable_for_stages_is_checked_where_there_are_several(model: str) -> None:
    check_layouts(fleet({}, {"pipeline": 3}, engine=partition("1,2,3")), model, {})
    assert refusals(fleet({}, {"pipeline": 3}, engine=partition("1,2,4")), model) == [
        "spec.engine.env: VLLM_PP_LAYER_PARTITION=1,2,4: 7 layers; the model has 6"
    ]
    assert refusals(fleet({"pipeline": 2}, engine=partition("a,b")), model) == [
        "spec.engine.env: VLLM_PP_LAYER_PARTITION='a,b': expected numbers with commas, e.g. 5,6,6,5"
    ]


def test_the_variable_of_whoever_starts_the_fleet_counts_unless_the_document_has_it(
    model: str,
) -> None:
    inherited = {"VLLM_PP_LAYER_PARTITION": "5,2"}
    (line,) = refusals(fleet({"pipeline": 2}), model, inherited)
    assert line.startswith("spec.engine.env: VLLM_PP_LAYER_PARTITION=5,2: 7 layers")
    check_layouts(fleet({"pipeline": 2}, engine=partition("5,1")), model, inherited)


@pytest.mark.parametrize("config", [None, "", "[]", "{}", '{"num_hidden_layers": 2}'])
def test_what_says_nothing_of_its_shape_is_left_to_the_engines(
    tmp_path: Path, config: str | None
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    check_layouts(fleet({"tensor": 64}), str(tmp_path), {})
    check_layouts(fleet({"tensor": 64}), "hf://org/name", {})


def test_a_fleet_is_refused_before_its_memory_is_planned(model: str) -> None:
    wanted = fleet({"tensor": 5}, model={"uri": f"file://{model}"})
    with pytest.raises(UserError, match=r"spec\.pools\[0\]\.parallelism\.tensor: 5 does not"):
        plan_fleet_memory(wanted, Path("/"))

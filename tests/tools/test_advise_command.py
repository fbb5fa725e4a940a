"""`xpyd advise`: its flags, its two outputs, and the fleet document that it prints."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import yaml

from tests.operator.object_samples import pod_templates
from tests.tools.advice import MODELS, advice, devices, facts
from xpyd_core.cli import build_parser, main
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.load import parse_fleet
from xpyd_operator.manifests.refusals import template_problems
from xpyd_tools.advise.engines import Engine, unmoved
from xpyd_tools.advise.fit import Division, memory_of
from xpyd_tools.advise.report import notes_of, snippet


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["advise", *words]) == 0
    return capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], model: str, *words: str) -> dict[str, Any]:
    return json.loads(run(capsys, str(MODELS / model), "--output", "json", *words))


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["advise", str(MODELS / "llama-70b"), *words]) == 2
    return capsys.readouterr().err


def test_the_table_has_both_trees_the_layout_and_its_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = run(capsys, str(MODELS / "deepseek-v3"), "--gpus", "16x80G", "--utilization", "0.92")
    lines = text.splitlines()
    assert lines[0] == (
        "deepseek-v3: DeepseekV3ForCausalLM, 61 layers, 256 experts in 58 layers, "
        "671.0 B parameters in fp8"
    )
    assert any(line.startswith("tree 1: ") and line.endswith("TP 8 x PP 2") for line in lines)
    assert any(line.startswith("tree 2: ") and "TP 8 x PP 2 x EP 8" in line for line in lines)
    assert any(line.startswith("they differ in EP (1 and 8, taken 8): ") for line in lines)
    assert "layout: TP 8 x PP 2 x EP 8" in lines
    assert "does not serve the model: config.json: architectures" in text
    assert "sends no rows to experts (EP) within one copy" in text
    assert "parallelism: {tensor: 8, pipeline: 2, expert: 8}" in text


def test_a_group_that_does_not_divide_the_heads_is_why_the_trees_differ(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = run(capsys, str(MODELS / "llama-70b"), "--gpus", "3x80G")
    why = "tree 1 does not ask what divides the model's heads"
    assert f"they differ in TP (3 and 1, taken 1): {why}" in text.splitlines()
    assert "layout: PP 3" in text.splitlines()


def test_json_has_bytes_and_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "llama-70b", "--gpus", "8", "--concurrency", "1")
    assert found["model"]["served"] is True
    assert found["layout"] == {"tensor": 8, "pipeline": 1, "expert": 1, "data": 1, "inside": 1}
    assert found["memory"]["kv_token_bytes"] == 327_680
    assert found["memory"]["device_kv_token_bytes"] == 40_960
    assert found["steps"][0]["all_reduces"]["count"] == 160
    assert found["steps"][0]["all_reduces"]["each_bytes"] == 16_384
    assert found["steps"][0]["boundaries"] is None
    assert [tree["questions"]["one device holds it"] for tree in found["trees"]] == [False, False]
    assert found["moves"] is None


def test_kv_blocks_are_what_the_share_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpus", "8", "--gpu-memory", "80G", "--utilization", "0.5", "--reserve", "1G")
    found = run_json(capsys, "llama-70b", *words)["memory"]
    room = 40 * 10**9 - 10**9 - found["device_weights_bytes"]
    assert found["kv_blocks"] == room // (16 * found["device_kv_token_bytes"])


def test_stages_that_are_not_alike_have_room_for_the_smallest() -> None:
    model = facts("llama-70b")
    found = advice(model, devices(3, 1, memory_bytes=60 * 10**9), concurrency=1)
    assert (found.layout.tensor, found.layout.pipeline) == (1, 3)
    layer = sum(vars(model.layers[0]).values())
    assert found.memory.weights_bytes == 2 * (27 * layer + model.embedding)  # of 27, 27, 26


def test_a_tied_head_on_a_stage_of_its_own_is_a_copy_of_the_embedding() -> None:
    # The last stage is the fullest here: the first three layers have no experts.
    model = facts("deepseek-v3")
    tied = replace(model, head=0)
    two, budget = Division(1, 2), 400 * 10**9
    assert memory_of(tied, two, budget) == memory_of(model, two, budget)
    alone = [memory_of(each, Division(1), 2 * budget).weights_bytes for each in (model, tied)]
    assert alone[0] - alone[1] == 2 * model.head


def test_more_ranks_than_kv_heads_keep_each_head_more_than_once() -> None:
    tokens = [
        memory_of(facts("llama-70b"), Division(tensor), 100 * 10**9).kv_token_bytes
        for tensor in (1, 4, 8, 16)
    ]
    assert tokens == [327_680, 81_920, 40_960, 40_960]


def test_roles_say_what_their_steps_send_and_what_moving_kv_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prefill = run_json(capsys, "llama-70b", "--gpus", "8", "--role", "Prefill")
    decode = run_json(capsys, "llama-70b", "--gpus", "8", "--role", "Decode", "--peers", "3")
    assert [step["tokens"] for step in prefill["steps"]] == [2048]
    assert [step["tokens"] for step in decode["steps"]] == [16]
    assert decode["moves"]["nccl_bytes"] == {"16": 300_000_000, "8": 156_000_000}
    assert decode["moves"]["prompt_bytes"] == 8192 * 327_680


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--gpus", "0"), "--gpus: '0'"),
        (("--gpus", "5000"), "expected 1 to 1024"),
        (("--gpus", "8x80GB"), "--gpus: '80GB' is not a size"),
        (("--gpus", "8x-5G"), "--gpus: '-5G' is not a size"),
        (("--gpus", "8x0"), "--gpus: '0'; expected a memory above 0 bytes"),
        (("--gpus", "8", "--gpu-memory", "0.4"), "--gpu-memory: '0.4'; expected a memory above"),
        (("--gpus", "8x80G", "--gpu-memory", "40G"), "--gpus says 80G of each already"),
        (("--gpus", "8", "--gpu-memory", "much"), "--gpu-memory: 'much' is not a size"),
        (("--gpus", "8", "--reserve", "-1"), "--reserve: '-1' is not a size"),
        (("--gpus", "12"), "12 are not whole nodes of 8"),
        (("--gpus", "12", "--nodes", "5"), "do not fill 5 nodes alike"),
        (("--gpus", "16", "--nodes", "2", "--gpus-per-node", "4"), "do not fill 2 nodes alike"),
        (("--gpus", "32", "--nodes", "1"), "has at most 16"),
        (("--gpus", "8", "--context", "9000"), "the model takes at most 8192"),
        (("--gpus", "8", "--context", "0"), "--context: 0; expected a number above 0"),
        (("--gpus", "8", "--utilization", "1.5"), "expected a share of 1"),
        (("--gpus", "8", "--params", "nan"), "--params: nan"),
        (("--gpus", "8", "--reserve", "79G"), "--reserve: 79000000000 bytes leave nothing"),
        (("--gpus", "1"), "141.1 GB of weights and 42.9 GB of KV .* it takes 3 nodes of 1"),
        (
            ("--gpus", "1x3G"),
            "nor into any number of them; try a smaller --concurrency, a shorter --context or",
        ),
        (("--gpus", "8", "--revision", "main"), "only hf:// models have revisions"),
        (("--gpus", "8", "--engine", "VLLM"), "--engine VLLM: say which --image has vLLM"),
        (("--gpus", "8", "--connector", "Nixl"), "--connector: xpyd's own engine has none"),
        (("--gpus", "8", "--image", "a b"), "--image: 'a b'; expected one such as"),
        (("--cpu-pods", "2x8G"), "--cpu-pods: for --engine VLLM"),
        (
            ("--cpu-pods", "8G", "--engine", "VLLM", "--image", "v"),
            "--cpu-pods: '8G'; expected 1 to 1024, e.g. 4x32G",
        ),
        (
            ("--cpu-pods", "2x8G", "--nodes", "2", "--engine", "VLLM", "--image", "v"),
            "--cpu-pods: leave --gpu-memory, --gpus-per-node and --nodes out",
        ),
        (
            ("--gpus", "4", "--gpus-per-node", "1", "--engine", "VLLM", "--image", "v"),
            "an instance of vLLM is one pod, and PP 3 takes 3 nodes of 1; try",
        ),
    ],
)
def test_wrong_input_is_refused_with_its_flag(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], complaint: str
) -> None:
    error = refusal(capsys, *words)
    assert re.search(complaint, error), error


def test_nodes_are_another_way_to_say_devices_of_a_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (("--nodes", "4"), ("--gpus-per-node", "4")):
        found = run_json(capsys, "llama-70b", "--gpus", "16", *words)
        assert found["layout"]["tensor"] == 4
        assert found["idle_gpus"] == 12


NAMES = ("llama-70b", "llama-8b", "mixtral-8x7b", "deepseek-v3", "llama-405b-fp8")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("role", ["Aggregated", "Prefill", "Decode"])
def test_the_fleet_document_is_accepted(name: str, role: str) -> None:
    found = advice(facts(name), devices(4, 8), role=role, throughput=True)
    spec = yaml.safe_load(snippet(found))["spec"]
    pool = spec["pools"][0]
    other = {"Aggregated": None, "Prefill": "Decode", "Decode": "Prefill"}[role]
    if other is not None:
        spec["pools"].append({"name": other.lower(), "role": other})
    document = {
        "apiVersion": "xpyd.dev/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": "advised"},
        "spec": {**spec, "model": {"uri": "hf://org/name"}},
    }
    fleet = parse_fleet(yaml.safe_dump(document).encode(), source="advice")
    accepted = fleet.spec.pools[0]
    assert accepted.parallelism.tensor == found.layout.tensor == pool["parallelism"]["tensor"]
    assert accepted.parallelism.pipeline == found.layout.pipeline
    assert accepted.parallelism.expert == found.layout.expert
    assert accepted.parallelism.data == found.layout.inside
    assert (accepted.resources.gpus, accepted.replicas) == (found.pod_gpus, found.layout.instances)


def advised(role: str, *words: str) -> dict[str, Any]:
    """`spec` of a fleet of both roles, each as it is advised on its own."""
    specs: list[dict[str, Any]] = []
    for each in ("Prefill", "Decode") if role != "Aggregated" else (role,):
        buffer = io.StringIO()
        with contextlib.redirect_stdout(buffer):
            assert main(["advise", str(MODELS / "llama-70b"), "--role", each, *words]) == 0
        text = buffer.getvalue().partition("for the fleet document:\n")[2]
        specs.append(yaml.safe_load(text)["spec"])
    first = specs[0]
    assert all(one["engine"] == first["engine"] for one in specs), "a fleet has one engine"
    return first | {"pools": [pool for one in specs for pool in one["pools"]]}


@pytest.mark.parametrize("connector", ["Xpyd", "Nixl"])
@pytest.mark.parametrize("role", ["Aggregated", "Decode"])
@pytest.mark.parametrize("gpus", [("--gpus", "3x80G"), ("--gpus", "16x40G", "--throughput")])
def test_the_document_of_a_vllm_is_what_the_operator_takes(
    connector: str, role: str, gpus: tuple[str, ...]
) -> None:
    more = () if role == "Aggregated" else ("--connector", connector)
    spec = advised(role, *gpus, "--engine", "VLLM", "--image", "registry.example/v:1", *more)
    uri = "file:///models/m" if connector == "Xpyd" else "hf://org/name"
    spec["model"] = {"uri": uri}
    document = {
        "apiVersion": "xpyd.dev/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": "advised"},
        "spec": spec,
    }
    fleet = parse_fleet(yaml.safe_dump(document).encode(), source="advice")
    assert (fleet.spec.engine.type, fleet.spec.engine.image) == ("VLLM", "registry.example/v:1")
    assert fleet.spec.engine.connector == (None if role == "Aggregated" else connector)
    assert "--gpu-memory-utilization=0.9" in fleet.spec.engine.args
    for pool in fleet.spec.pools:
        assert pool.resources.gpus == pool.parallelism.ranks, "one pod"


def test_a_vllm_on_cpus_gets_its_memory_by_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--engine", "VLLM", "--image", "v", "--cpu-pods", "2x300G", "--concurrency", "4"]
    spec = advised("Decode", *words)
    # 4 requests of 8192 tokens, 327,680 bytes each.
    env = [{"name": "VLLM_CPU_KVCACHE_SPACE", "value": "10"}]
    assert spec["engine"]["env"] == env
    assert not any("gpu" in arg for arg in spec["engine"]["args"])
    spec["model"] = {"uri": "file:///models/m"}
    document = {
        "apiVersion": "xpyd.dev/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": "advised"},
        "spec": spec,
    }
    fleet = parse_fleet(yaml.safe_dump(document).encode(), source="advice")
    assert template_problems(fleet) == ()
    for pool in fleet.spec.pools:
        assert (pool.resources.gpus, pool.replicas) == (0, 2)
        sizes = engine_pod_memory(fleet, pool.name)
        assert sizes["requests"]["memory"] == "286103Mi"
    small = ["--cpu-pods", "2x154G", *words[:4], "--concurrency", "1", "--reserve", "0"]
    model = str(MODELS / "llama-70b")
    more = ["--utilization", "0.95"]
    assert main(["advise", model, *small, *more, "--role", "Prefill"]) == 0
    assert main(["advise", model, *small, *more, "--role", "Decode"]) == 2, "its pool has no room"
    assert "an instance of vLLM is one pod" in capsys.readouterr().err


def engine_pod_memory(fleet: InferenceFleet, pool: str) -> dict[str, Any]:
    (template,) = pod_templates(fleet)[pool]
    (engine,) = (
        one for one in template["template"]["spec"]["containers"] if one["name"] == "engine"
    )
    return engine["resources"]


def test_pools_of_vllm_that_move_kv_get_our_connector_where_none_is_named() -> None:
    spec = advised("Decode", "--gpus", "8", "--engine", "VLLM", "--image", "v")
    assert spec["engine"]["connector"] == "Xpyd"


def test_experts_are_dealt_out_by_a_field_that_both_engines_have() -> None:
    for engine in (Engine("VLLM", None, "v"), None):
        more = {} if engine is None else {"engine": engine}
        found = advice(facts("mixtral-8x7b"), devices(1, 8), **more)
        assert "{tensor: 8, pipeline: 1, expert: 8}" in snippet(found)
        said = "this engine sends no rows to experts" in "\n".join(notes_of(found))
        assert said == (engine is None)
    dense = advice(facts("llama-70b"), devices(1, 8))
    assert "expert" not in snippet(dense)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 2, "sliding_window": 9}, "layer_types"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"text_config": {"sliding_window": 1024}}, "sliding_window"),
        ({"sliding_window": None}, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_models_whose_kv_our_connector_does_not_move_are_known_by_their_field(
    change: dict[str, Any], field: str | None
) -> None:
    config = json.loads((MODELS / "llama-8b/config.json").read_text())
    reason = unmoved(config | change)
    assert (reason or "").partition(":")[0] == (field or "")


def test_a_model_that_our_connector_refuses_is_not_advised_for_it_and_is_for_nixl(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [str(MODELS / "deepseek-v3"), "--gpus", "8x141G", "--role", "Prefill"]
    words += ["--engine", "VLLM", "--image", "v"]
    assert main(["advise", *words]) == 2
    assert "--connector Xpyd: config.json: kv_lora_rank" in capsys.readouterr().err
    text = run(capsys, *words, "--connector", "Nixl")
    assert "connector: Nixl" in text
    assert "note: this engine does not serve" not in text, "which models vLLM serves it knows"
    assert "NCCL" not in text, "a fleet of vLLM moves no KV over it"


def test_its_engine_flags_are_the_workers() -> None:
    args = yaml.safe_load(snippet(advice(facts("llama-8b"), devices(1, 1))))["spec"]["engine"][
        "args"
    ]
    found = build_parser().parse_args(["worker", "--model", "m", *args])
    assert (found.max_model_len, found.max_num_seqs) == (4096, 16)
    assert found.gpu_memory_utilization == 0.92


def test_what_the_engine_cannot_do_and_what_is_left_is_said() -> None:
    def notes(name: str, nodes: int, **fields: object) -> str:
        return "\n".join(notes_of(advice(facts(name), devices(nodes, 8), **fields)))

    assert "DP 8 is 8 replicas of the pool" in notes("llama-8b", 1)
    assert "EP" in notes("mixtral-8x7b", 1)
    assert "elastic EP (ranks that come and go) excludes PP" in notes("deepseek-v3", 2)
    assert "one latent (MLA), whole on each rank" in notes("deepseek-v3", 2)
    assert "16 of 24 devices are left: --throughput or" in notes("llama-70b", 3)
    assert "8 of 24 devices are left: they do not hold" in notes("deepseek-v3", 3, throughput=True)
    assert "there are no devices for one" in notes("llama-70b", 1, high_availability=True)
    assert "neither tree asks for availability" in notes("llama-70b", 2, high_availability=True)
    wide = notes_of(advice(facts("llama-70b"), devices(1, 16)))
    assert "16 ranks share 8 KV heads: each head is kept 2 times" in wide
    without = notes_of(advice(facts("llama-70b"), devices(1, 8, within="pcie")))
    assert any("without NVLink the bytes of all-reduces take 7 times as long" in n for n in without)
    assert notes("llama-70b", 1) == ""


def test_it_runs_without_torch() -> None:
    code = (
        "import sys; from xpyd_core.cli import main;"
        f"main(['advise', {str(MODELS / 'llama-70b')!r}, '--gpus', '8']);"
        "assert not {'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)

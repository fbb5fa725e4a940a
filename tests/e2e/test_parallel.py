"""Engines of several ranks: their greedy tokens are those of transformers, alone in each layout and
as P and D in each mode. tests/e2e/test_layouts.py has pairs of layouts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.train_demo_model.random_checkpoint import make_checkpoint
from scripts.train_demo_model.random_weights import Family
from tests.e2e.harness import (
    Fleet,
    Process,
    empty_fleet,
    free_port,
    http,
    rank_steps,
    wait_for,
)
from tests.e2e.test_families import ask_at, best_tokens, make_requests
from tests.e2e.test_local_fleet import Local

CONTEXT_TOKENS = 256
FAMILIES: tuple[Family, ...] = ("llama", "qwen3", "mixtral")
# (tensor, pipeline). Two KV heads over four ranks; five layers over three stages are 2, 2, 1.
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2)]
Layout = tuple[int, int]
Replicas = tuple[int, int, int]
"""(replicas, tensor, pipeline)."""
DUMMIES = "xpyd_engine_replica_dummy_forwards_total"


def named(layout: Layout) -> str:
    return "tp{}pp{}".format(*layout)


def flags(layout: Sequence[int]) -> tuple[str, ...]:
    """The engine's, with chunks that are shorter than the prompts. `layout`: (tensor, pipeline),
    or (replicas, tensor, pipeline)."""
    *replicas, tensor, pipeline = layout
    return (
        *(word for count in replicas for word in ("-dp", str(count))),
        *("--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(pipeline)),
        *("--max-num-batched-tokens", "64", "--max-num-seqs", "8"),
        *("--max-model-len", str(CONTEXT_TOKENS)),
    )


def make_model(
    folder: Path, family: Family, *, tie: bool = False, experts: int | None = None
) -> Path:
    return make_checkpoint(
        folder,
        family=family,
        layers=5,
        hidden=64,
        intermediate=128,
        heads=4,
        kv_heads=2,
        max_len=CONTEXT_TOKENS,
        tie=tie,
        experts=experts,
    )


def written_by(server: Process) -> list[tuple[list[int], list[int]]]:
    """Prompts and what the server writes behind them: one by one, then four at once."""
    return written_at(server.url)


def written_at(url: str) -> list[tuple[list[int], list[int]]]:
    """As `written_by`, by address."""
    written: list[tuple[list[int], list[int]]] = []
    for prompt, new in make_requests():
        written += [(prompt, ids) for ids in ask_at(url, [prompt], new)]
    together = [prompt for prompt, _ in make_requests()][3:7]
    written += zip(together, ask_at(url, together, 24), strict=True)
    return written


def check(model: Path, written: list[tuple[list[int], list[int]]]) -> None:
    wanted = [new for _, new in make_requests()] + [24] * 4
    assert [len(ids) for _, ids in written] == wanted
    assert [ids for _, ids in written] == best_tokens(model, written)


# Every family in every layout; in each run each family, and each number of ranks and of stages.
USUAL_ENGINES = [("llama", (4, 1)), ("llama", (1, 3)), ("qwen3", (2, 2)), ("mixtral", (2, 2))]
ENGINES = [
    pytest.param(
        *(family, layout),
        marks=pytest.mark.slow if (family, layout) in USUAL_ENGINES else pytest.mark.soak,
        id=f"{family}-{named(layout)}",
    )
    for family, layout in itertools.product(FAMILIES, LAYOUTS)
]


@pytest.mark.parametrize(("family", "layout"), ENGINES)
def test_greedy_tokens_are_those_of_transformers(
    tmp_path: Path, family: Family, layout: Layout
) -> None:
    model = make_model(tmp_path / "model", family, tie=family == "qwen3")
    with empty_fleet(tmp_path) as running:
        engine = running.start_engine(
            "Aggregated", *flags(layout), model=model, env={"XPYD_DISCOVERY": ""}
        )
        running.wait_healthy(engine)
        written = written_by(engine)
        assert engine.stop() == 0, engine.log[-3000:]
    check(model, written)


USUAL_REPLICAS = [("llama", (2, 2, 1)), ("qwen3-moe", (2, 1, 1))]
REPLICAS = [
    pytest.param(
        *(family, layout),
        marks=pytest.mark.slow if (family, layout) in USUAL_REPLICAS else pytest.mark.soak,
        id="{}-dp{}tp{}".format(family, *layout),
    )
    for family, layout in itertools.product(
        ("llama", "mixtral", "qwen3-moe"), [(2, 1, 1), (2, 2, 1)]
    )
]


@pytest.mark.parametrize(("family", "layout"), REPLICAS)
@pytest.mark.long
def test_greedy_tokens_of_independent_replicas_are_those_of_transformers(
    tmp_path: Path, family: Family, layout: Replicas
) -> None:
    """Each has all experts. tests/e2e/test_lock_step.py has those that share them."""
    model = make_model(tmp_path / "model", family)
    with empty_fleet(tmp_path) as running:
        engine = running.start_engine(
            "Aggregated", *flags(layout), model=model, env={"XPYD_DISCOVERY": ""}
        )
        running.wait_healthy(engine)
        written = written_by(engine)
        assert len(rank_steps(engine)) == layout[0] * layout[1]
        wait_for("all ranks to tell of their steps", lambda: all(rank_steps(engine)))
        assert engine.metric(DUMMIES) == 0
        assert engine.stop() == 0, engine.log[-3000:]
    check(model, written)


WHOLE: tuple[Family, ...] = ("mixtral", "qwen3-moe")
EXPERT = "--enable-expert-parallel"
USUAL_EXPERTS = [("mixtral", (2, 1)), ("qwen3-moe", (4, 1))]
# (tensor, pipeline): so many ranks share the experts of a stage.
EXPERT_ENGINES = [
    pytest.param(
        *(family, layout),
        marks=pytest.mark.slow if (family, layout) in USUAL_EXPERTS else pytest.mark.soak,
        id=f"{family}-{named(layout)}",
    )
    for family, layout in itertools.product(WHOLE, [(2, 1), (4, 1), (2, 2)])
]


@pytest.mark.parametrize(("family", "layout"), EXPERT_ENGINES)
def test_greedy_tokens_of_whole_experts_are_those_of_transformers(
    tmp_path: Path, family: Family, layout: Layout
) -> None:
    model = make_model(tmp_path / "model", family, experts=7)
    with empty_fleet(tmp_path) as running:
        engine = running.start_engine(
            "Aggregated", *flags(layout), EXPERT, model=model, env={"XPYD_DISCOVERY": ""}
        )
        running.wait_healthy(engine)
        written = written_by(engine)
        wait_for("ranks to tell of their experts", lambda: tokens_of_experts(engine))
        assert engine.stop() == 0, engine.log[-3000:]
    check(model, written)


BALANCE = '--eplb-config={"num_redundant_experts": 1, "window_size": 8, "step_interval": 8}'


@pytest.mark.parametrize(
    ("layout", "replicas"),
    [
        pytest.param((2, 1), 1, marks=pytest.mark.slow, id="tp2pp1"),
        pytest.param((1, 1), 2, marks=pytest.mark.slow, id="dp2"),
        pytest.param((2, 2), 1, marks=pytest.mark.soak, id="tp2pp2"),
    ],
)
@pytest.mark.long
def test_greedy_tokens_are_those_of_transformers_while_experts_move(
    tmp_path: Path, layout: Layout, replicas: int
) -> None:
    """Experts of a small model with random weights are chosen unevenly. Replicas in lock step move
    them together."""
    model = make_model(tmp_path / "model", "mixtral", experts=7)
    with empty_fleet(tmp_path) as running:
        more = (EXPERT, "--enable-eplb", BALANCE, "-dp", str(replicas))
        engine = running.start_engine(
            "Aggregated", *flags(layout), *more, model=model, env={"XPYD_DISCOVERY": ""}
        )
        running.wait_healthy(engine)
        written = written_by(engine)
        moves = "xpyd_engine_expert_layer_moves_total"
        wait_for("experts to have moved", lambda: engine.metric(moves) > 0)
        for layer in range(5):
            name = f"xpyd_engine_expert_layer_imbalance{{layer={layer},placement="
            assert 1 <= engine.metric(f"{name}after}}") <= engine.metric(f"{name}before}}")
        assert engine.stop() == 0, engine.log[-3000:]
    check(model, written)


def tokens_of_experts(engine: Process) -> bool:
    """Whether each of five layers shows two experts for each token that was computed."""
    computed = engine.metric("xpyd_engine_prompt_tokens_computed_total")
    computed += engine.metric("xpyd_engine_output_tokens_computed_total")
    name = "xpyd_engine_expert_layer_tokens_total"
    layers = [engine.metric(f"{name}{{layer={layer}}}") for layer in range(5)]
    total = engine.metric("xpyd_engine_expert_tokens_total")
    return layers == [2 * computed] * 5 and total == sum(layers)


class Side(NamedTuple):
    """The layout of P or of D, and whether its ranks have whole experts: then replicas share these,
    in lock step."""

    layout: Replicas
    whole: bool = True

    def __str__(self) -> str:
        return "dp{}tp{}pp{}".format(*self.layout) + ("ep" if self.whole else "")

    @property
    def flags(self) -> tuple[str, ...]:
        return (*flags(self.layout), *((EXPERT,) if self.whole else ()))


# The first ones are in each run. Those at the end have six ranks and more.
EXPERT_PAIRS: list[tuple[Family, Side, Side]] = [
    ("mixtral", Side((1, 2, 1)), Side((1, 1, 1), whole=False)),
    ("mixtral", Side((1, 2, 1), whole=False), Side((2, 1, 1))),
    ("mixtral", Side((1, 2, 1)), Side((2, 1, 1))),
    ("mixtral", Side((1, 1, 1)), Side((1, 4, 1))),
    ("mixtral", Side((1, 2, 2)), Side((1, 2, 1))),
    ("qwen3-moe", Side((2, 1, 1)), Side((1, 1, 1), whole=False)),
    ("mixtral", Side((2, 1, 1)), Side((2, 1, 1))),
    ("mixtral", Side((1, 1, 2)), Side((2, 1, 2))),
    ("mixtral", Side((2, 2, 1)), Side((2, 1, 1))),
    ("mixtral", Side((2, 2, 1)), Side((1, 2, 1))),
    ("qwen3-moe", Side((1, 2, 1), whole=False), Side((2, 2, 1))),
    ("qwen3-moe", Side((1, 4, 1)), Side((2, 1, 1))),
    ("mixtral", Side((3, 1, 1)), Side((3, 1, 1))),
    ("mixtral", Side((2, 2, 1), whole=False), Side((1, 4, 1))),
    ("qwen3-moe", Side((2, 2, 1)), Side((2, 2, 1))),
]


@pytest.mark.parametrize(
    ("family", "p", "d"),
    [
        pytest.param(
            *(family, p, d),
            marks=pytest.mark.slow if number < 2 else pytest.mark.soak,
            id=f"{family}-{p}-{d}",
        )
        for number, (family, p, d) in enumerate(EXPERT_PAIRS)
    ],
)
@pytest.mark.long
def test_kv_goes_between_engines_with_experts(
    tmp_path: Path, family: Family, p: Side, d: Side
) -> None:
    """KV is attention's: where experts are changes nothing of it. A replica whose requests wait for
    their KV makes dummies for the others."""
    model = make_model(tmp_path / "model", family)
    with empty_fleet(tmp_path) as running:
        pair = start_pair(running, model, p.flags, d.flags)
        written = written_by(running.router)
        assert pair[1].metric("xpyd_kv_received_bytes_total") > 0
        assert pair[1].metric("xpyd_kv_recomputed_requests_total") == 0
        for engine, side in zip(pair, (p, d), strict=True):
            assert (engine.metric(DUMMIES) > 0) == (side.whole and side.layout[0] > 1)
    check(model, written)


DOCUMENT = """
apiVersion: xpyd.dev/v1alpha1
kind: InferenceFleet
metadata: {name: whole}
spec:
  model: {uri: "file://model", servedNames: [demo]}
  engine: {args: [--dtype=float32, --max-model-len=256, --kv-cache-memory=16Mi, --threads=1]}
  pools:
  - {name: prefill, role: Prefill, replicas: 1, resources: {gpus: 0},
     parallelism: {tensor: 2, expert: 2}}
  - {name: decode, role: Decode, replicas: 1, resources: {gpus: 0}, parallelism: {tensor: 2}}
  kvTransfer: {bufferSize: 16Mi, hostPoolSize: 32Mi, onFailure: Fail}
"""


@pytest.mark.slow
@pytest.mark.long
def test_a_pool_of_a_local_fleet_has_whole_experts_where_its_document_says_so(
    tmp_path: Path,
) -> None:
    """Of seven experts one rank has four, the other three, so that their weights differ; those of
    the pool that does not ask for it are divided."""
    model = make_model(tmp_path / "model", "mixtral", experts=7)
    file, local = tmp_path / "fleet.yaml", Local("whole", tmp_path / "state")
    file.write_text(DOCUMENT)
    try:
        local.xpyd("up", "-f", str(file), "--detach", "--port", str(free_port()))
        local.wait_ready()
        status = local.status()
        layouts = {pod["role"]: pod["layout"] for pod in status["pods"]}
        assert layouts == {"Router": "", "Prefill": "TP2xPP1xEP2", "Decode": "TP2xPP1"}
        engines = [pod for pod in status["pods"] if pod["role"] != "Router"]
        weights = {pod["role"]: rank_weights(pod["http"]) for pod in engines}
        assert len(weights["Prefill"]) == 2, "ranks do not share experts evenly"
        assert len(weights["Decode"]) == 1, "ranks share each expert"
        written = written_at(status["endpoint"])
    finally:
        local.xpyd("down", "whole")
    check(model, written)


def rank_weights(address: str) -> set[str]:
    """Sizes of an engine's ranks."""
    lines = http(f"http://{address}/metrics")[1].decode().splitlines()
    name = "xpyd_engine_rank_weight_bytes{"
    return {line.rpartition(" ")[2] for line in lines if line.startswith(name)}


def start_pair(
    running: Fleet, model: Path, p: Sequence[str], d: Sequence[str], *more: str
) -> list[Process]:
    """`p`, `d`: the flags of each; `more`: those of both."""
    running.start_router()
    common = ("--kv-on-failure", "fail", *more)
    pair = [
        running.start_engine("Prefill", *p, *common, model=model),
        running.start_engine("Decode", *d, *common, model=model),
    ]
    running.wait_ready(*pair)
    return pair


# Each mode and each transport is in each run.
USUAL = [("put", "tcp"), ("get", "shm"), ("put_async", "uds")]
WAYS = [
    pytest.param(
        *way, marks=pytest.mark.slow if way in USUAL else pytest.mark.soak, id="-".join(way)
    )
    for way in itertools.product(("put_async", "put", "get"), ("tcp", "uds", "shm"))
]


@pytest.mark.parametrize(("mode", "transport"), WAYS)
@pytest.mark.long
def test_ranks_send_in_every_mode_by_every_transport(
    tmp_path: Path, mode: str, transport: str
) -> None:
    model = make_model(tmp_path / "model", "llama")
    by = ("--kv-mode", mode.replace("_", "-"), "--kv-transport", transport)
    by += ("--kv-socket-dir", str(tmp_path / "s"))
    with empty_fleet(tmp_path) as running:
        _, decode = start_pair(running, model, flags((2, 2)), flags((1, 3)), *by)
        written = written_by(running.router)
        assert decode.metric("xpyd_kv_received_bytes_total") > 0
        assert decode.metric("xpyd_kv_recomputed_requests_total") == 0
    check(model, written)

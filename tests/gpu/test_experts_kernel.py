"""A layer's experts in tiles of the rows that chose them, beside the twin, whatever was chosen."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.gpu import twins
from tests.gpu.conftest import Kit, modules
from tests.gpu.waits import waits_are_errors
from xpyd_worker.kernels.api import KvShape, Span
from xpyd_worker.model.config import ExpertsConfig
from xpyd_worker.model.experts import ExpertMlps
from xpyd_worker.model.layers import StepContext

META = torch.device("meta")


@dataclass(frozen=True)
class Layer:
    """Weights of all experts, of a size that keeps results near 1."""

    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, kit: Kit, experts: int, hidden: int, size: int) -> Layer:
        return cls(
            kit.noise(experts, 2 * size, hidden, seed=1) * hidden**-0.5,
            kit.noise(experts, hidden, size, seed=2) * size**-0.5,
        )

    def ours(self, kit: Kit, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return kit.gpu.experts.GroupedExperts(self.gate_up, self.down)(x, weights, chosen)

    def check(self, kit: Kit, choice: list[list[int]]) -> None:
        """The operator beside the twin."""
        chosen = torch.tensor(choice).to(kit.device)
        x = kit.noise(len(choice), self.gate_up.shape[2])
        weights = shares(kit, *chosen.shape)
        wanted = twins.experts(x, weights, chosen, self.gate_up, self.down)
        kit.close(self.ours(kit, x, weights, chosen), wanted)


def shares(kit: Kit, rows: int, per_token: int) -> Tensor:
    """Weights that sum to 1 in each row, float32."""
    made = torch.rand(rows, per_token, generator=torch.Generator().manual_seed(3)) + 0.1
    return (made / made.sum(-1, keepdim=True)).to(kit.device)


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Memory that torch gives out is full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def uneven(rows: int) -> list[list[int]]:
    """Two of five: one expert has half of all pairs, another a few."""
    rng = random.Random(rows)
    return [rng.sample([0, rng.choices((1, 2, 3, 4), (12, 6, 3, 1))[0]], 2) for _ in range(rows)]


CHOICES = {
    "one row": [[3, 1]],
    "uneven loads": uneven(37),
    "experts without rows": [[4, 0], [0, 4]] * 5,
    "all rows to one expert": [[2]] * 20,
    "every row to every expert": [random.Random(i).sample(range(5), 5) for i in range(7)],
    "tiles that are full": [[0]] * 16 + [[3]] * 32 + [[4]] * 17,
    "an expert twice in a row": [[1, 1], [0, 1], [3, 3], [1, 1]],
    "larger tiles": uneven(60),
    "the largest tiles": uneven(200),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_row_is_the_weighted_sum_of_what_its_experts_make(kit: Kit, name: str) -> None:
    Layer.of(kit, 5, 96, 80).check(kit, CHOICES[name])


@pytest.mark.parametrize(
    ("experts", "hidden", "size"), [(1, 16, 16), (3, 33, 17), (6, 64, 130), (9, 200, 48)]
)
def test_any_sizes_are_multiplied_whole(kit: Kit, experts: int, hidden: int, size: int) -> None:
    per_token = min(experts, 4)
    choice = [random.Random(i).sample(range(experts), per_token) for i in range(11)]
    Layer.of(kit, experts, hidden, size).check(kit, choice)


def test_rows_that_lie_apart_are_taken_as_they_are(kit: Kit) -> None:
    layer, chosen = Layer.of(kit, 5, 96, 80), torch.tensor(uneven(6)).to(kit.device)
    x, weights = kit.noise(6, 2, 96)[:, 1], shares(kit, 6, 4)[:, ::2]
    wanted = twins.experts(x, weights, chosen, layer.gate_up, layer.down)
    kit.close(layer.ours(kit, x, weights, chosen), wanted)


def test_a_row_gets_the_same_bits_in_any_batch_of_such_tiles(kit: Kit) -> None:
    """One product in each sum of a matrix: the interpreter's are numpy's, whose last bits depend on
    where in its tile a row is."""
    layer, x, weights = Layer.of(kit, 5, 96, 80), kit.noise(20, 96), shares(kit, 20, 4)
    if kit.device.type == "cpu":
        for part in (layer.gate_up, layer.down):
            outputs = torch.arange(part.shape[1])
            only = (outputs[:, None] * 7 + 3) % part.shape[2] == torch.arange(part.shape[2])
            part *= only * 10
    choice = [random.Random(i).sample(range(5), 4) for i in range(20)]
    chosen = torch.tensor(choice).to(kit.device)
    together = layer.ours(kit, x, weights, chosen)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1)).to(kit.device)
    assert torch.equal(layer.ours(kit, x[order], weights[order], chosen[order]), together[order])
    for row in (0, 8, 19):
        one = slice(row, row + 1)
        assert torch.equal(layer.ours(kit, x[one], weights[one], chosen[one])[0], together[row])


def test_what_experts_made_is_added_up_in_their_order(kit: Kit) -> None:
    layer, x, weights = Layer.of(kit, 5, 96, 80), kit.noise(3, 96), shares(kit, 3, 5)
    chosen = torch.tensor([[0, 1, 2, 3, 4]] * 3).to(kit.device)
    wanted = layer.ours(kit, x, weights, chosen)
    for order in ([4, 2, 0, 1, 3], [1, 0, 4, 3, 2]):
        assert torch.equal(layer.ours(kit, x, weights[:, order], chosen[:, order]), wanted)


def test_sixteen_bits_come_out_of_a_sum_in_thirty_two(kit: Kit) -> None:
    """One large part and many that are too small to change it one by one."""
    one = Layer.of(kit, 1, 32, 32)
    factors = torch.ones(64, 1, 1, dtype=kit.dtype, device=kit.device)
    factors[0] = 2048
    layer = Layer(one.gate_up.expand(64, -1, -1).contiguous(), one.down * factors)
    x, weights = kit.noise(1, 32), torch.ones(1, 64, device=kit.device)
    chosen = torch.arange(64, device=kit.device)[None]
    wanted = twins.experts(x, weights, chosen, layer.gate_up, layer.down)
    kit.close(layer.ours(kit, x, weights, chosen), wanted)


def test_weights_of_experts_that_nobody_chose_are_not_read(kit: Kit) -> None:
    layer = Layer.of(kit, 5, 96, 80)
    for part in (layer.gate_up, layer.down):
        part[[0, 2, 4]] = float("nan")
    layer.check(kit, [[1, 3], [3, 1], [1, 1]])


def test_rows_that_pad_a_batch_have_no_experts_computed(kit: Kit) -> None:
    layer, x, weights = Layer.of(kit, 5, 96, 80), kit.noise(4, 96), shares(kit, 4, 2)
    for part in (layer.gate_up, layer.down):
        part[[0, 4]] = float("nan")
    chosen = torch.tensor([[3, 1], [1, 2], [4, 0], [0, 1]]).to(kit.device)
    kernels = kit.gpu.kernels.TritonKernels(kit.device)
    static = kernels.static_plan(KvShape(1, 16, 16, kit.dtype), max_sequences=4, max_context=16)
    static.copy_([Span(5, 1, (0,)), Span(0, 1, (1,))])
    run = kernels.experts(layer.gate_up, layer.down)
    with unwritten_is_nan():
        found = run(x, weights, chosen, static.plan)
    wanted = twins.experts(x[:2], weights[:2], chosen[:2], layer.gate_up, layer.down)
    kit.close(found[:2], wanted)
    assert not found[2:].any()
    static.copy_([Span(5, 1, (0,)), Span(0, 1, (1,)), Span(2, 1, (2,))])
    assert run(x, weights, chosen, static.plan)[2].isnan().all()


def test_an_expert_that_takes_anothers_place_computes_its_rows(kit: Kit) -> None:
    """In the same memory: a graph holds its address."""
    layer, x, weights = Layer.of(kit, 5, 96, 80), kit.noise(4, 96), shares(kit, 4, 2)
    chosen = torch.tensor(uneven(4)).to(kit.device)
    run = kit.gpu.kernels.TritonKernels(kit.device).experts(layer.gate_up, layer.down)
    places = [one.data_ptr() for one in run.weights(1)]
    gate_up, down = layer.gate_up.clone(), layer.down.clone()
    gate_up[1], down[1] = gate_up[3], down[3]
    run.replace(1, *(one.clone() for one in run.weights(3)))
    assert [one.data_ptr() for one in run.weights(1)] == places
    found = run(x, weights, chosen, None)
    kit.close(found, twins.experts(x, weights, chosen, gate_up, down))


def test_a_step_with_prompts_leaves_no_row_out(kit: Kit) -> None:
    layer, x, weights = Layer.of(kit, 5, 96, 80), kit.noise(4, 96), shares(kit, 4, 2)
    chosen = torch.tensor(uneven(4)).to(kit.device)
    kernels = kit.gpu.kernels.TritonKernels(kit.device)
    plan = kernels.plan([Span(5, 1, (0,)), Span(0, 3, (1,))], KvShape(1, 16, 16, kit.dtype))
    found = kernels.experts(layer.gate_up, layer.down)(x, weights, chosen, plan)
    kit.close(found, twins.experts(x, weights, chosen, layer.gate_up, layer.down))


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("name", [*CHOICES, "no tile is full"])
def test_each_pair_is_in_one_tile_of_its_expert(kit: Kit, name: str, rows: int) -> None:
    # As many tiles as there can be: two pairs in the second tile of one expert, one in the others'.
    worst = [[0]] * (rows + 2) + [[1], [2], [3], [4]]
    chosen = torch.tensor(CHOICES.get(name, worst)).to(kit.device)
    table, order = kit.gpu.experts.tile_table(chosen, experts=5, rows=rows)
    flat, placed = chosen.view(-1).tolist(), order.tolist()
    found: list[int] = []
    for expert, begin, end in table.tolist():
        assert end - begin <= rows
        tile = placed[begin:end]
        assert all(flat[pair] == expert for pair in tile)
        assert tile == sorted(tile)
        found += tile
    assert sorted(found) == list(range(len(flat)))
    used = sum(-(-flat.count(expert) // rows) for expert in range(5))
    assert used <= len(table) <= len(flat)
    if name == "no tile is full":
        assert used == len(table)


def test_many_tiles_take_several_programs_to_list(kit: Kit) -> None:
    chosen = torch.arange(2000, device=kit.device)[:, None] % 7
    table, _ = kit.gpu.experts.tile_table(chosen, experts=7, rows=16)
    lines = table[table[:, 2] > table[:, 1]].tolist()
    assert [line[0] for line in lines] == [e for e in range(7) for _ in range(18)]
    assert [line[1] for line in lines[1:]] == [line[2] for line in lines[:-1]]


def test_weights_of_other_shapes_are_refused(kit: Kit) -> None:
    layer = Layer.of(kit, 2, 32, 16)
    grouped = kit.gpu.experts.GroupedExperts
    with pytest.raises(ValueError, match=r"gate_up is \[2, 16, 32\].*must be \[2, 32, 32\]"):
        grouped(layer.gate_up[:, :16], layer.down)
    with pytest.raises(ValueError, match="contiguous"):
        grouped(layer.gate_up.mT, layer.down)


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The grids of kernels that are launched, and do not run."""
    grids: list[tuple[int, ...]] = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *args, **given: None

    for name in ("_fill_table", "_gate_up", "_down", "_add_up"):
        monkeypatch.setattr(modules().experts, name, Launch())
    return grids


@pytest.mark.parametrize("is_whole", [False, True], ids=["alone", "one rank of four"])
@pytest.mark.parametrize("is_normalized", [False, True])
def test_a_layer_asks_the_device_for_nothing(
    unstarted: list[tuple[int, ...]], *, is_normalized: bool, is_whole: bool
) -> None:
    """On a device without memory nobody can wait for a value; and grids are those of the shapes."""
    config = ExpertsConfig(128, 8, 768, is_normalized)
    # Of one replica: nothing is exchanged.
    group: Any = SimpleNamespace(size=4, rank=1, replicas=1)
    others = group if is_whole else None
    block = ExpertMlps(2048, config, torch.bfloat16, whole_experts=others)
    block.allocate(META)
    kernels = modules().kernels.TritonKernels(META)
    block.pack(kernels)
    shape = KvShape(1, 16, 16, torch.bfloat16)
    plan = kernels.static_plan(shape, max_sequences=3, max_context=16).plan
    step = StepContext(kernels, cast("Any", None), (), plan, lambda layer: None)
    x = torch.empty(3, 2048, dtype=torch.bfloat16, device=META)
    with torch.inference_mode():
        out = block(x, step)
        counts = torch.zeros(1, 128, dtype=torch.int64, device=META)
        kernels.count_chosen(counts, torch.stack(step.chosen), plan)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    # 24 pairs are in at most 24 tiles; 768 columns are 12 blocks, 2,048 are 32.
    assert unstarted == [(1,), (24 * 12,), (24 * 32,), (3, 2)]


def test_rows_that_pad_a_batch_chose_nothing() -> None:
    kernels = modules().kernels.TritonKernels(torch.device("cpu"))
    buffer = kernels.static_plan(
        KvShape(1, 16, 16, torch.bfloat16), max_sequences=3, max_context=64
    )
    buffer.copy_([Span(3, 1, [0]), Span(20, 1, [1, 2])])
    counts, chosen = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([[0, 1], [1, 2], [3, 3]])
    kernels.count_chosen(counts, torch.stack([chosen, chosen.flip(0)]), buffer.plan)
    # The third row has no sequence.
    assert counts.tolist() == [[1, 2, 1, 0], [0, 1, 1, 2]]
    kernels.count_chosen(counts, torch.stack([chosen, chosen]), None)
    assert counts.tolist() == [[2, 4, 2, 2], [1, 3, 2, 4]]


@pytest.mark.gpu
def test_a_captured_layer_follows_what_is_chosen_later() -> None:
    device = torch.device("cuda")
    kit = Kit(device, torch.bfloat16, modules())
    layer, chosen = Layer.of(kit, 5, 96, 80), torch.tensor(uneven(8)).to(device)
    x, weights = kit.noise(8, 96), shares(kit, 8, 2)
    run = kit.gpu.experts.GroupedExperts(layer.gate_up, layer.down)
    run(x, weights, chosen)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with waits_are_errors(), torch.cuda.graph(graph):
        out = run(x, weights, chosen)
    for choice in (uneven(8), [[4, 2]] * 8, [[0, 1], [2, 3]] * 4):
        chosen.copy_(torch.tensor(choice))
        graph.replay()
        kit.close(out, twins.experts(x, weights, chosen, layer.gate_up, layer.down))

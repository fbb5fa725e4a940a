"""The mixture-of-experts block: the router's choice, and which experts compute which rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.ranks.kit.threads import Meeting, MemoryExperts, MemoryGroup, expert_groups, together
from xpyd_core.parallel.partition import expert_shares
from xpyd_worker.kernels.api import NO_EXPERT
from xpyd_worker.kernels.plain import PlainKernels, PlainLinear, rows_by_expert
from xpyd_worker.model.config import ExpertsConfig, MlpNames
from xpyd_worker.model.experts import ExpertMlps, exchange, route
from xpyd_worker.model.layers import StepContext
from xpyd_worker.model.shards import Stored
from xpyd_worker.parallel.api import NO_GROUP

HIDDEN, SIZE, COUNT, PER_TOKEN = 12, 20, 6, 2


class CountingKernels(PlainKernels):
    """Plain operators that note how many rows went through each linear."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self._made = 0

    def linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        number, packed = self._made, super().linear(weight, bias)
        self._made += 1

        def run(x: Tensor) -> Tensor:
            self.calls.append((number, x.shape[0]))
            return packed(x)

        return run


class RowKernels(PlainKernels):
    """Plain operators whose linears sum each row by itself, as it would alone."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        return RowLinear(weight, bias)


class RowLinear(PlainLinear):
    """See RowKernels."""

    def __call__(self, x: Tensor) -> Tensor:
        run = super().__call__
        rows = [run(row.unsqueeze(0)) for row in x]
        return torch.cat(rows) if rows else run(x)


def make_block(
    *,
    is_normalized: bool = True,
    dtype: torch.dtype = torch.float32,
    kernels: Any = None,
) -> tuple[ExpertMlps, dict[str, Tensor], StepContext, CountingKernels]:
    """A block of random weights, those weights by name, and what it is called with. Linear 0 is the
    router, 2 e + 1 and 2 e + 2 are expert e's."""
    experts = ExpertsConfig(
        COUNT, PER_TOKEN, SIZE, is_normalized, names=MlpNames(("gate", "up"), "down")
    )
    block, kernels = ExpertMlps(HIDDEN, experts, dtype), kernels or CountingKernels()
    block.allocate(torch.device("cpu"))
    tensors = {
        name: stored.pieces[0].destination for name, stored in block.checkpoint_tensors("").items()
    }
    generator = torch.Generator().manual_seed(3)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    block.pack(kernels)
    step = StepContext(kernels, cast("Any", None), (), cast("Any", None), lambda layer: None)
    return block, kept, step, kernels


def by_hand(x: Tensor, weights: dict[str, Tensor], *, is_normalized: bool) -> Tensor:
    """Row by row, expert by expert, as the definition has it."""
    rows: list[Tensor] = []
    for row in x:
        shares = (weights["gate.weight"] @ row).softmax(-1)
        best = sorted(range(COUNT), key=lambda e: -float(shares[e]))[:PER_TOKEN]
        total = sum(shares[e] for e in best) if is_normalized else 1.0
        out = torch.zeros(HIDDEN)
        for expert in best:
            gate, up, down = (
                weights[f"experts.{expert}.{name}.weight"] for name in ("gate", "up", "down")
            )
            inner = torch.nn.functional.silu(gate @ row) * (up @ row)
            out += shares[expert] / total * (down @ inner)
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_a_row_is_the_weighted_sum_of_its_experts(rows: int, is_normalized: bool) -> None:
    block, weights, step, _ = make_block(is_normalized=is_normalized)
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))
    expected = by_hand(x, weights, is_normalized=is_normalized)
    torch.testing.assert_close(block(x, step), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_an_expert_runs_once_over_all_its_rows_or_not_at_all(rows: int) -> None:
    block, weights, step, kernels = make_block()
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))
    block(x, step)
    chosen = (x @ weights["gate.weight"].T).topk(PER_TOKEN).indices
    wanted = [(0, rows)]
    for expert in range(COUNT):
        of_expert = int((chosen == expert).sum())
        if of_expert:
            wanted += [(2 * expert + 1, of_expert), (2 * expert + 2, of_expert)]
    assert kernels.calls == wanted


def test_a_rows_result_does_not_depend_on_the_batch() -> None:
    block, _, step, _ = make_block()
    x = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(1))
    together = block(x, step)
    for index in range(30):
        # A processor's library sums one row and thirty in orders of its own.
        torch.testing.assert_close(
            block(x[index : index + 1], step)[0], together[index], rtol=1e-4, atol=5e-5
        )


def test_sixteen_bits_come_out_of_a_sum_in_thirty_two() -> None:
    block, weights, step, _ = make_block(dtype=torch.bfloat16)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = block(x, step)
    assert out.dtype == torch.bfloat16
    wide = {name: tensor.float() for name, tensor in weights.items()}
    expected = by_hand(x.float(), wide, is_normalized=True)
    assert float((out - expected).abs().max() / expected.std()) < 0.03


@pytest.mark.parametrize(
    ("is_normalized", "weights"), [(False, [0.6, 0.3]), (True, [2 / 3, 1 / 3])]
)
def test_the_best_experts_share_by_the_softmax_over_all(
    is_normalized: bool, weights: Sequence[float]
) -> None:
    logits = torch.tensor([[0.1, 0.6, 0.3]]).log()
    found, chosen = route(logits, per_token=2, is_normalized=is_normalized)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(found, torch.tensor([weights]))


def test_a_routers_weights_are_float32_whatever_it_computes_in() -> None:
    weights, _ = route(torch.randn(4, 8).to(torch.float16), per_token=3, is_normalized=True)
    assert weights.dtype == torch.float32


def test_rows_are_grouped_by_expert_in_order() -> None:
    chosen = torch.tensor([[4, 1], [1, 0], [4, 5]])
    groups = [(expert, pairs.tolist()) for expert, pairs in rows_by_expert(chosen, 6)]
    assert groups == [(0, [3]), (1, [1, 2]), (4, [0, 4]), (5, [5])]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_each_replica_come_back_with_the_bits_of_one_rank(
    ranks: int, dtype: torch.dtype
) -> None:
    """Experts uneven over ranks; replicas with many rows, one and none."""
    alone, weights, step, _ = make_block(dtype=dtype, kernels=RowKernels())
    made = torch.Generator().manual_seed(ranks)
    batches = [torch.randn(n, HIDDEN, generator=made).to(dtype) for n in (17, 0, 1, 5)[:ranks]]
    groups = expert_groups(ranks, ranks)
    blocks = [shared_block(weights, dtype, whole_experts=group) for group in groups]
    found = together([lambda b=b, x=x: b(x, step) for b, x in zip(blocks, batches, strict=True)])
    for x, out in zip(batches, found, strict=True):
        assert torch.equal(out, alone(x, step) if len(x) else x)


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_the_same_rows_add_up_what_their_experts_make_of_them(
    ranks: int, rows: int
) -> None:
    alone, weights, step, _ = make_block()
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))
    meeting, experts = Meeting(ranks), expert_groups(ranks, 1)
    blocks = [
        shared_block(weights, x.dtype, MemoryGroup(meeting, rank), experts[rank])
        for rank in range(ranks)
    ]
    for out in together([lambda block=block: block(x, step) for block in blocks]):
        torch.testing.assert_close(out, alone(x, step), rtol=1e-5, atol=1e-5)
    assert not any(group.calls for group in experts), "they have all rows already"


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
def test_rows_that_a_replicas_ranks_share_go_to_experts_once(rows: int) -> None:
    """Two replicas of two ranks."""
    alone, weights, step, _ = make_block(kernels=RowKernels())
    made = torch.Generator().manual_seed(rows)
    batches = [torch.randn(n, HIDDEN, generator=made) for n in (rows, 3)]
    groups, meetings = expert_groups(4, 2), [Meeting(2), Meeting(2)]
    blocks = [
        shared_block(weights, torch.float32, MemoryGroup(meetings[r // 2], r % 2), groups[r])
        for r in range(4)
    ]
    works = [lambda r=r: blocks[r](batches[r // 2], step) for r in range(4)]
    for rank, out in enumerate(together(works)):
        x = batches[rank // 2]
        assert torch.equal(out, alone(x, step) if len(x) else x)
    # Behind the sizes: rows there and back, each row once for each expert on another rank.
    pairs = sum(group.calls[1] for group in groups) // (HIDDEN * 4)
    assert pairs == sum(group.calls[2] for group in groups) // (HIDDEN * 4)
    assert pairs <= (rows + 3) * PER_TOKEN


def test_experts_that_are_dealt_anew_give_the_bits_of_one_rank_whoever_has_them() -> None:
    """Over 2 replicas, 4, 1 and 2. Who keeps an expert does not read it again."""
    alone, weights, step, _ = make_block(kernels=RowKernels())
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    groups: list[MemoryExperts] = []
    blocks: list[ExpertMlps] = []
    for ranks in (2, 4, 1, 2):
        new, had = expert_groups(ranks, ranks), [set(block._own) for block in blocks]
        del blocks[ranks:]
        for block, group, now in zip(blocks, groups, new, strict=False):
            group.__dict__.update(now.__dict__)
            dealt = block.deal("")
            dealt.allocate(torch.device("cpu"))
            read = dealt.checkpoint_tensors()
            fill(read, weights)
            dealt.pack(RowKernels())
            kept = had[group.rank] & set(block._own)
            assert {int(name.split(".")[1]) for name in read} == set(block._own) - kept
        blocks += [
            shared_block(weights, x.dtype, whole_experts=group, is_elastic=True)
            for group in new[len(blocks) :]
        ]
        groups = [*groups[: len(blocks)], *new[len(groups) :]]
        assert sorted(one for block in blocks for one in block._own) == list(range(COUNT))
        for out in together([lambda block=block: block(x, step) for block in blocks]):
            assert torch.equal(out, alone(x, step))
        # One replica, too: rows go the same way whatever their number.
        assert all(group.calls for group in groups)


def shared_block(
    weights: dict[str, Tensor],
    dtype: torch.dtype,
    group: Any = NO_GROUP,
    whole_experts: Any = None,
    redundant: int | None = None,
    is_elastic: bool = False,
) -> ExpertMlps:
    """A rank's part of the block whose weights these are."""
    experts = ExpertsConfig(COUNT, PER_TOKEN, SIZE, True, names=MlpNames(("gate", "up"), "down"))
    block = ExpertMlps(
        *(HIDDEN, experts, dtype),
        group=group,
        whole_experts=whole_experts,
        redundant=redundant,
        is_elastic=is_elastic,
    )
    block.allocate(torch.device("cpu"))
    fill(block.checkpoint_tensors(""), weights)
    block.pack(RowKernels())
    return block


def fill(tensors: dict[str, Stored], weights: dict[str, Tensor]) -> None:
    """As the loader does."""
    for name, stored in tensors.items():
        for piece in stored.pieces:
            piece.destination.copy_(weights[name][piece.slices])


def test_chosen_experts_are_counted_by_layer() -> None:
    counts = torch.tensor([[1, 0, 0], [0, 0, 2]])
    chosen = torch.tensor([[[0, 1], [1, 2]], [[0, 2], [0, 1]]])
    PlainKernels().count_chosen(counts, chosen, None)
    assert counts.tolist() == [[2, 2, 1], [2, 1, 3]]
    PlainKernels().count_chosen(counts, chosen[:, :0], None)
    assert counts.tolist() == [[2, 2, 1], [2, 1, 3]]


def test_no_expert_computes_no_row() -> None:
    chosen = torch.tensor([[NO_EXPERT, 2], [0, NO_EXPERT], [NO_EXPERT, NO_EXPERT]])
    found = {expert: pairs.tolist() for expert, pairs in rows_by_expert(chosen, 3)}
    assert found == {0: [2], 2: [1]}


def test_bytes_of_an_exchange_are_those_of_rows_times_experts_of_a_token() -> None:
    """Article fact 55. Scaled down by 32: 32 tokens, 8 experts of each, hidden 224 of one byte; all
    but what stays on its rank."""
    tokens, per_token, hidden, count = 32, 8, 224, 16
    shares, groups = expert_shares(count, 2), expert_groups(2, 2)
    # Rank 0 has all rows; all of their experts are on rank 1.
    chosen = torch.arange(8, 16).repeat(tokens, 1)
    ones = torch.ones(tokens, per_token)
    x = torch.ones(tokens, hidden, dtype=torch.uint8)

    def work(rank: int) -> Tensor:
        own = slice(None) if rank == 0 else slice(0)
        return exchange(
            x[own],
            ones[own],
            chosen[own],
            places=chosen[own],
            shares=shares,
            group=groups[rank],
            compute=lambda rows, experts: rows,
        )

    together([lambda: work(0), lambda: work(1)])
    assert groups[0].calls[1] == groups[1].calls[2] == 1_835_008 // 32
    # The two of a layer together.
    assert groups[0].calls[1] + groups[1].calls[2] == 3_670_016 // 32

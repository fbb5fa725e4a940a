"""Article facts 31 and 48: what a rank computes of a linear; how many blocks ranks make that have
room for unlike numbers of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ranks.kit.threads import Meeting, MemoryGroup, connect
from tests.worker.runner_driver import tiny_checkpoint
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.kernels.plain import PlainKernels
from xpyd_worker.model.layers import Linear
from xpyd_worker.model.registry import load_config
from xpyd_worker.model.shards import is_first, share, whole
from xpyd_worker.parallel.api import TensorGroup
from xpyd_worker.runner.load import fit_on_cpu

INPUTS, OUTPUTS, TOKENS = 24, 48, 5


def group(rank: int, size: int) -> TensorGroup:
    """Nobody is asked for anything."""
    return MemoryGroup(Meeting(size), rank)


def loaded(linear: Linear, stored: dict[str, Tensor]) -> Linear:
    """With its share of what is stored."""
    linear.allocate(torch.device("cpu"))
    for name, wanted in linear.checkpoint_tensors("", ("it",)).items():
        assert wanted.shape == tuple(stored[name].shape)
        for piece in wanted.pieces:
            piece.destination.copy_(stored[name][piece.slices])
    return linear


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_columns_need_no_other_rank_and_rows_are_added_up(ranks: int) -> None:
    """Article fact 31."""
    made = torch.Generator().manual_seed(3)
    weight, bias = (torch.randn(*size, generator=made) for size in ((OUTPUTS, INPUTS), (OUTPUTS,)))
    x = torch.randn(TOKENS, INPUTS, generator=made)
    stored = {"it.weight": weight, "it.bias": bias}
    dtype, kernels = torch.float32, PlainKernels()
    columns: list[Tensor] = []
    rows: list[Tensor] = []
    for rank in range(ranks):
        one = group(rank, ranks)
        cut = share(OUTPUTS, one)
        by_column = loaded(Linear(whole(INPUTS), (cut,), bias=True, dtype=dtype), stored)
        assert tuple(by_column.weight.shape) == (OUTPUTS // ranks, INPUTS)
        by_column.pack(kernels)
        columns.append(by_column(x))
        cut = share(INPUTS, one)
        by_row = Linear(cut, (whole(OUTPUTS),), bias=is_first(one), dtype=dtype)
        by_row = loaded(by_row, stored)
        assert tuple(by_row.weight.shape) == (OUTPUTS, INPUTS // ranks)
        by_row.pack(kernels)
        rows.append(by_row(x[:, cut.held.start : cut.held.stop]))
    wanted = F.linear(x, weight, bias)
    torch.testing.assert_close(torch.cat(columns, dim=1), wanted)
    torch.testing.assert_close(torch.stack(rows).sum(0), wanted)


def test_a_stage_of_more_layers_has_room_for_fewer_blocks(tmp_path: Path) -> None:
    """Five layers are three and two; of one budget each. (Article fact 48.)"""
    tiny_checkpoint(tmp_path, "llama", num_hidden_layers=5)
    config = load_config(tmp_path)
    fits = [
        fit_on_cpu(tmp_path, config, dtype=torch.float32, kv_cache_bytes=1 << 20, parallel=parallel)
        for parallel in connect(config, Sizes(pipeline=2))
    ]
    of_three, of_two = (one.num_blocks for one in fits)
    block_bytes = fits[0].shape.block_bytes
    assert (of_three, of_two) == ((1 << 20) // (3 * block_bytes), (1 << 20) // (2 * block_bytes))
    least = min(of_three, of_two)
    assert least == of_three
    for one in fits:
        cache = one.make_runner(least).kv_cache
        assert cache.num_blocks == least
        assert all(len(layer) == len(cache.layers[0]) for layer in cache.layers)

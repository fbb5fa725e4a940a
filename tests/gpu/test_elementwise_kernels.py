"""Norm, activation, rotation and the store into the paged cache, beside their twins."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import twins
from tests.gpu.conftest import Kit

EPS = 1e-5


@pytest.mark.parametrize("size", [64, 96, 1000, 4096])
def test_a_norm_is_the_row_by_its_root_mean_square(kit: Kit, size: int) -> None:
    x, weight = kit.noise(5, size), kit.noise(size, seed=1)
    x[2] *= 100
    x[3] = 0
    kit.close(kit.gpu.elementwise.rms_norm(x, weight, EPS), twins.rms_norm(x, weight, EPS))


def test_a_norm_takes_any_leading_shape_and_rows_that_lie_apart(kit: Kit) -> None:
    x, weight = kit.noise(3, 6, 96)[:, 1:4], kit.noise(96, seed=1)
    kit.close(kit.gpu.elementwise.rms_norm(x, weight, EPS), twins.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("size", [96, 1000])
def test_a_residual_takes_the_sum_and_the_norm_is_of_what_it_then_holds(
    kit: Kit, size: int
) -> None:
    x, residual, weight = kit.noise(4, size), kit.noise(4, size, seed=1), kit.noise(size, seed=2)
    before, wanted = x.clone(), x + residual
    found = kit.gpu.elementwise.rms_norm(x, weight, EPS, residual)
    assert torch.equal(residual, wanted)
    assert torch.equal(x, before)
    kit.close(found, twins.rms_norm(wanted, weight, EPS))


def test_a_residual_that_would_be_copied_is_refused(kit: Kit) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        kit.gpu.elementwise.rms_norm(kit.noise(4, 8), kit.noise(8), EPS, kit.noise(8, 4).T)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 96), (2, 1500)])
def test_the_activation_is_gate_by_its_sigmoid_by_up(kit: Kit, rows: int, size: int) -> None:
    gate_up = kit.noise(rows, 2 * size) * 4
    gate_up[0, 0] = -60
    kit.close(kit.gpu.elementwise.silu_mul(gate_up), twins.silu_mul(gate_up))


def _angles(kit: Kit, positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10_000.0 ** -(torch.arange(0, dim, 2) / dim)
    angles = positions[:, None].float() * frequencies
    return angles.cos().to(kit.device), angles.sin().to(kit.device)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(4, 2, 64, 16), (9, 3, 96, 8), (1, 1, 32, 64), (16, 2, 128, 32)],
)
def test_queries_come_back_turned_and_keys_and_values_stand_in_their_slots(
    kit: Kit, *, heads: int, kv_heads: int, dim: int, block_size: int, has_norms: bool
) -> None:
    slots = torch.tensor([block_size * 3 - 1, -1, 0, block_size * 3, 5])
    positions = torch.tensor([0, 3, 77, 1500, 12])
    qkv = kit.noise(5, heads + 2 * kv_heads, dim)
    cache = torch.full((4, kv_heads, block_size, 2 * dim), float("nan"), dtype=kit.dtype)
    cache = cache.to(kit.device)
    cos, sin = _angles(kit, positions, dim)
    norms = (kit.noise(dim, seed=1), kit.noise(dim, seed=2), EPS) if has_norms else None
    found = kit.gpu.elementwise.rotate_and_store(
        qkv, (cos, sin), norms, cache, slots.to(kit.device)
    )
    query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        query = twins.rms_norm(query, norms[0], EPS)
        key = twins.rms_norm(key, norms[1], EPS)
    kit.close(found, twins.rotate(query, cos, sin))
    key = twins.rotate(key, cos, sin)
    written = torch.zeros(4, block_size, dtype=torch.bool)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        at = divmod(slot, block_size)
        written[at] = True
        stored = cache[at[0], :, at[1]]
        kit.close(stored[:, :dim], key[row])
        assert torch.equal(stored[:, dim:], value[row])
    assert cache.cpu().transpose(1, 2)[~written].isnan().all()

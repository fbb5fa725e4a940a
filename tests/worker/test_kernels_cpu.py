"""The compiled operators against plain torch's, in all dtypes and odd shapes."""

from __future__ import annotations

import itertools
import platform
import random
from copy import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from xpyd_worker.kernels.api import Kernels, KvShape, Span
from xpyd_worker.kernels.cpu.kernels import CpuKernels, choose_kernels
from xpyd_worker.kernels.cpu.library import HEAD_DIMS, levels, library, load
from xpyd_worker.kernels.cpu.packed import FewRowsLinear, OneDnnLinear, can_pack, is_equal
from xpyd_worker.kernels.plain import PlainKernels, PlainLinear
from xpyd_worker.system import cpu_flags

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The twin computes in the dtype itself in places, so it is as far off as that rounds.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
PLAIN = PlainKernels()

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module", params=levels())
def compiled(request: pytest.FixtureRequest) -> Kernels:
    found = load(request.param)
    assert found is not None
    return CpuKernels(found)


def close(found: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@dataclass
class Step:
    """A step's tensors over a cache whose unused slots hold NaN."""

    shape: KvShape
    spans: list[Span]
    cache: Tensor
    qkv: Tensor
    angles: tuple[Tensor, Tensor]

    @property
    def rows(self) -> int:
        return self.qkv.shape[0]


def make_step(
    lengths: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """`lengths`: (tokens before, new tokens) of each sequence."""
    torch.manual_seed(1)
    shape = KvShape(kv_heads, head_dim, block_size, dtype)
    blocks = [-(-(before + new) // block_size) for before, new in lengths]
    ids = random.Random(2).sample(range(sum(blocks) + 3), sum(blocks))
    cache = torch.full((sum(blocks) + 3, kv_heads, block_size, 2 * head_dim), float("nan"))
    spans: list[Span] = []
    for (before, new), count in zip(lengths, blocks, strict=True):
        table = [ids.pop() for _ in range(count)]
        spans.append(Span(before, new, table))
        at = torch.arange(before)
        held = torch.tensor(table)[at // block_size]
        cache[held, :, at % block_size] = torch.randn(before, kv_heads, 2 * head_dim)
    rows = sum(new for _before, new in lengths)
    qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim).to(dtype)
    turns = torch.rand(rows, head_dim // 2) * 6
    return Step(shape, spans, cache.to(dtype), qkv, (turns.cos(), turns.sin()))


def both(step: Step, compiled: Kernels, window: int | None = None) -> tuple[Tensor, Tensor]:
    """The attention's output by the compiled operators and by the twin."""
    found: list[Tensor] = []
    for kernels in (compiled, PLAIN):
        cache = step.cache.clone()
        plan = kernels.plan(step.spans, step.shape)
        query = kernels.rotate_and_store(step.qkv, step.angles, None, cache, plan)
        found.append(kernels.attention(query, cache, plan, window))
    return found[0], found[1]


MIXED = [(0, 1), (15, 1), (16, 1), (700, 1), (0, 5), (3, 40), (0, 130), (530, 100)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 20, 600])
def test_a_mixed_batch_is_attended_as_the_twin_does(
    compiled: Kernels, dtype: torch.dtype, window: int | None
) -> None:
    close(*both(make_step(MIXED, dtype=dtype), compiled, window))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (5, 1), (16, 2)])
def test_any_heads_are_attended_as_the_twin_does(
    compiled: Kernels, head_dim: int, heads: int, kv_heads: int
) -> None:
    lengths = [(40, 1), (0, 25), (9, 7)]
    close(*both(make_step(lengths, heads=heads, kv_heads=kv_heads, head_dim=head_dim), compiled))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_any_block_size_is_attended_as_the_twin_does(compiled: Kernels, block_size: int) -> None:
    close(*both(make_step(MIXED, block_size=block_size), compiled))


def test_a_long_context_that_threads_share_is_attended_as_the_twin_does(
    compiled: Kernels,
) -> None:
    close(*both(make_step([(5000, 1)], kv_heads=1), compiled))


def test_any_length_of_prompt_is_attended_as_the_twin_does(compiled: Kernels) -> None:
    for before, new in itertools.product((0, 1, 511), (2, 6, 7, 97)):
        close(*both(make_step([(before, new)]), compiled))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_queries_are_turned_and_keys_and_values_stand_in_their_slots(
    compiled: Kernels, dtype: torch.dtype, with_norms: bool, head_dim: int
) -> None:
    step = make_step([(17, 1), (3, 20)], dtype=dtype, head_dim=head_dim)
    norms = None
    if with_norms:
        norms = (torch.rand(head_dim).to(dtype), torch.rand(head_dim).to(dtype), 1e-5)
    caches = [torch.zeros_like(step.cache), torch.zeros_like(step.cache)]
    queries = [
        kernels.rotate_and_store(
            step.qkv, step.angles, norms, cache, kernels.plan(step.spans, step.shape)
        )
        for kernels, cache in zip((compiled, PLAIN), caches, strict=True)
    ]
    close(queries[0], queries[1])
    close(caches[0], caches[1])
    written = (caches[0] != 0).any(dim=-1).sum()
    assert int(written) == step.rows * step.shape.kv_heads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_norms_and_the_activation_are_the_twins(
    compiled: Kernels, dtype: torch.dtype, rows: int
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 192).to(dtype), torch.rand(192).to(dtype)
    close(compiled.rms_norm(x, weight, 1e-6), PLAIN.rms_norm(x, weight, 1e-6))
    residuals = [torch.randn(rows, 192, generator=torch.Generator().manual_seed(3)).to(dtype)] * 2
    residuals = [residual.clone() for residual in residuals]
    norms = [
        kernels.add_rms_norm(x, residual, weight, 1e-6)
        for kernels, residual in zip((compiled, PLAIN), residuals, strict=True)
    ]
    close(norms[0], norms[1])
    assert torch.equal(residuals[0], residuals[1])
    gate_up = 30 * torch.randn(rows, 384).to(dtype)
    gate_up[0, :4] = torch.tensor([0.0, -0.0, 1e4, -1e4], dtype=dtype)
    close(compiled.silu_mul(gate_up), PLAIN.silu_mul(gate_up))


def test_nan_and_infinity_stay_what_they_are(compiled: Kernels) -> None:
    gate_up = torch.ones(1, 64, dtype=torch.bfloat16)
    gate_up[0, 0], gate_up[0, 33] = float("nan"), float("inf")
    out = compiled.silu_mul(gate_up)
    assert bool(out[0, 0].isnan())
    assert bool(out[0, 1].isinf())
    assert bool(out[0, 2:].isfinite().all())


PACKED = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", PACKED)
def test_packed_matrices_multiply_as_torchs_own(compiled: Kernels, dtype: torch.dtype) -> None:
    if not can_pack(dtype):
        pytest.skip("this torch has no packed matrices")
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype)
    for rows in (1, 7, 300):
        x = torch.randn(rows, 64).to(dtype)
        linear = compiled.linear(weight, bias)
        assert isinstance(linear, OneDnnLinear)
        close(linear(x), F.linear(x, weight, bias))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN was seen on x86-64 alone")
def test_float32_is_packed() -> None:
    assert can_pack(torch.float32)


def test_float16_stays_torchs_own(compiled: Kernels) -> None:
    weight = torch.randn(64, 64).to(torch.float16)
    assert isinstance(compiled.linear(weight, None), PlainLinear)


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, 32), (320, 96), (192, 1056), (1024, 1024), (512, 4096), (9024, 64)]
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_row_gives_the_same_bits_alone_among_a_few_and_among_many(
    outputs: int, inputs: int, with_bias: bool, dtype: torch.dtype, compiled: Kernels
) -> None:
    linear, weight, bias = few_rows(compiled, outputs, inputs, with_bias=with_bias, dtype=dtype)
    # Every other column of a wider matrix: not contiguous.
    x = torch.randn(240, 2 * inputs).to(dtype)[:, ::2]
    together = linear(x)
    # As far off as so many roundings: of a sum that cancels itself out nothing is left.
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        together, F.linear(x, weight, bias), rtol=tolerance, atol=tolerance * inputs**0.5
    )
    for rows in (*range(1, 34), 40):
        assert torch.equal(torch.cat([linear(part) for part in x.split(rows)]), together), rows
    assert linear(x[:0]).shape == (0, outputs)


@pytest.mark.parametrize("dtype", PACKED)
def test_sums_in_another_order_are_found_out(compiled: Kernels, dtype: torch.dtype) -> None:
    """oneDNN's own order is not promised either: where it is none of those known, it does all."""
    linear, *_ = few_rows(compiled, 1024, 1024, with_bias=False, dtype=dtype)
    other = copy(linear)
    other.chunk = 2 * linear.chunk if linear.chunk < 1024 else 512
    assert is_equal(linear, linear.packed, 256)
    assert not is_equal(other, linear.packed, 256)


@pytest.mark.parametrize("dtype", PACKED)
def test_a_few_rows_give_nan_and_infinity_where_torchs_own_does(
    compiled: Kernels, dtype: torch.dtype
) -> None:
    linear, weight, _ = few_rows(compiled, 128, 64, with_bias=False, dtype=dtype)
    x = torch.zeros(3, 64, dtype=dtype)
    x[0, 5], x[2, 7] = float("nan"), float("inf")
    expected = F.linear(x, weight)
    assert torch.equal(linear(x).isnan(), expected.isnan())
    assert torch.equal(linear(x).isinf(), expected.isinf())


@pytest.mark.parametrize("dtype", PACKED)
def test_matrices_that_are_packed_otherwise_stay_onednns(
    compiled: Kernels, dtype: torch.dtype
) -> None:
    """Nobody promises the layout: what a row gives tells, also with tiny weights."""
    if not can_pack(dtype):
        pytest.skip("this torch has no packed matrices")
    assert isinstance(compiled, CpuKernels)
    library = compiled.operators
    for scale in (1.0, 1e-6):
        weight = (torch.randn(64, 64) * scale).to(dtype)
        other = _Elsewhere(weight, None)
        assert FewRowsLinear.of(other, library, 1) is other


class _Elsewhere(OneDnnLinear):
    """Its memory is not laid out as it is expected: the rows of the matrix one behind the other."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._rows = weight

    def packed_bytes(self) -> tuple[int, int]:
        return self._rows.data_ptr(), self._rows.numel() * self._rows.itemsize


def few_rows(
    compiled: Kernels, outputs: int, inputs: int, *, with_bias: bool, dtype: torch.dtype
) -> tuple[FewRowsLinear, Tensor, Tensor | None]:
    if not can_pack(dtype):
        pytest.skip("this torch has no packed matrices")
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    linear = compiled.linear(weight, bias)
    if not isinstance(linear, FewRowsLinear):
        # With AVX2 alone oneDNN is known, but for its blocks of 192 outputs. 64 are for one thread.
        assert "avx512f" in cpu_flags() or dtype != torch.float32 or outputs in (64, 192)
        pytest.skip("this processor has no avx512_bf16, or oneDNN sums otherwise on it")
    return linear, weight, bias


def test_sizes_that_do_not_fit_are_done_by_plain_torch_which_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def chosen(*vector_sizes: int, head_dim: int = 64) -> Kernels:
        return choose_kernels(vector_sizes=vector_sizes, head_dim=head_dim)

    assert isinstance(chosen(64, 128), CpuKernels)
    assert not caplog.records
    assert isinstance(chosen(72, 128), PlainKernels)
    assert isinstance(chosen(64, 100), PlainKernels)
    assert isinstance(chosen(64, 128, head_dim=24), PlainKernels)
    assert "slow operators: none are compiled for heads of 24" in caplog.records[-1].getMessage()
    assert len(caplog.records) == 3

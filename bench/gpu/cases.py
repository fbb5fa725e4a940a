"""What is measured: each kernel with the call of torch's that does the same, and the bytes that
have to be moved at least."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xpyd_worker.kernels.api import KvShape, Span
from xpyd_worker.kernels.plain import PlainKernels


@dataclass(frozen=True)
class Mixture:
    """Sizes of a layer's experts."""

    experts: int
    per_token: int
    hidden: int
    intermediate: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of a 8B model's layer, and of what is asked of it."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    intermediate: int = 14336
    vocab: int = 128_256
    block_size: int = 16
    decodes: tuple[tuple[int, int], ...] = (
        (1, 1024),
        (1, 32768),
        (8, 1024),
        (64, 1024),
        (64, 8192),
    )
    """(sequences, context) of decoding steps."""
    prefills: tuple[int, ...] = (512, 2048, 8192)
    rows: tuple[int, ...] = (1, 64, 4096)
    """Of a step, for what goes row by row."""
    draws: tuple[int, ...] = (1, 64)
    mixtures: tuple[Mixture, ...] = (Mixture(8, 2, 4096, 14336), Mixture(128, 8, 2048, 768))
    """Of Mixtral 8x7B and Qwen3-30B-A3B."""
    copy_bytes: int = 1 << 30


SMOKE = Sizes(
    heads=4, kv_heads=2, head_dim=32, hidden=64, intermediate=96, vocab=300,
    decodes=((2, 40),), prefills=(40,), rows=(2,), draws=(2,),
    mixtures=(Mixture(5, 2, 64, 48),), copy_bytes=1 << 12,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One measurement. `torchs` is None where torch has nothing of the kind."""

    kernel: str
    size: str
    moved_bytes: int
    ours: Callable[[], Tensor]
    torchs: Callable[[], Tensor] | None


def cases(gpu: Any, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """One after the other, so that only one's tensors are alive. `gpu`: the package's modules."""
    for sequences, context in sizes.decodes:
        yield _attention(gpu, sizes, device, dtype, [Span(context - 1, 1, ())] * sequences)
    for tokens in sizes.prefills:
        yield _attention(gpu, sizes, device, dtype, [Span(0, tokens, ())])
    for rows in sizes.rows:
        yield from _row_by_row(gpu, sizes, device, dtype, rows)
    for rows in sizes.draws:
        yield from _draws(gpu, sizes, device, rows)
    for mixture in sizes.mixtures:
        for rows in sizes.rows:
            yield _experts(gpu, mixture, device, dtype, rows)


def _attention(
    gpu: Any, sizes: Sizes, device: torch.device, dtype: torch.dtype, spans: list[Span]
) -> Case:
    shape = KvShape(sizes.kv_heads, sizes.head_dim, sizes.block_size, dtype)
    count, context = spans[0].count, spans[0].start + spans[0].count
    each = -(-context // sizes.block_size)
    # Neighbouring blocks of a sequence lie far apart.
    order = torch.randperm(each * len(spans)).view(len(spans), each)
    placed = [Span(span.start, count, ids) for span, ids in zip(spans, order.tolist(), strict=True)]
    size = (order.numel(), sizes.kv_heads, sizes.block_size, 2 * sizes.head_dim)
    cache = torch.randn(size, device=device, dtype=dtype)
    query = torch.randn(len(spans) * count, sizes.heads, sizes.head_dim, device=device, dtype=dtype)
    kernels = gpu.kernels.TritonKernels(device)
    plan = kernels.plan(placed, shape)
    # What torch is given is gathered beforehand, for nothing: [seqs, heads, tokens, head_dim].
    whole = cache[order.to(device)].transpose(1, 2).reshape(len(spans), sizes.kv_heads, -1, size[3])
    keys, values = (part.contiguous() for part in whole[:, :, :context].chunk(2, dim=-1))
    asked = query.view(len(spans), count, sizes.heads, -1).transpose(1, 2).contiguous()
    is_prefill = count > 1

    def torchs() -> Tensor:
        out = F.scaled_dot_product_attention(
            asked, keys, values, is_causal=is_prefill, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(query.shape[0], -1)

    kv_bytes = len(spans) * context * shape.block_bytes // sizes.block_size
    return Case(
        "prefill attention" if is_prefill else "decode attention",
        f"{len(spans)} x {context:,}",
        kv_bytes + 2 * query.nbytes,
        lambda: kernels.attention(query, cache, plan, None),
        torchs,
    )


def _row_by_row(
    gpu: Any, sizes: Sizes, device: torch.device, dtype: torch.dtype, rows: int
) -> Iterator[Case]:
    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    x, weight = made(rows, sizes.hidden), made(sizes.hidden)
    yield Case(
        "RMS norm",
        f"{rows:,} x {sizes.hidden:,}",
        2 * x.nbytes,
        lambda: gpu.elementwise.rms_norm(x, weight, 1e-5),
        lambda: F.rms_norm(x, weight.shape, weight, 1e-5),
    )
    gate_up = made(rows, 2 * sizes.intermediate)
    gate, up = gate_up.chunk(2, dim=-1)
    yield Case(
        "SiLU-mul",
        f"{rows:,} x {sizes.intermediate:,}",
        gate_up.nbytes * 3 // 2,
        lambda: gpu.elementwise.silu_mul(gate_up),
        lambda: F.silu(gate) * up,
    )
    qkv = made(rows, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
    blocks = -(-rows // sizes.block_size)
    cache = made(blocks, sizes.kv_heads, sizes.block_size, 2 * sizes.head_dim)
    slots = torch.arange(rows, device=device)
    angle = torch.randn(rows, sizes.head_dim // 2, device=device)
    angles = angle.cos(), angle.sin()
    yield Case(
        "rotary and KV store",
        f"{rows:,} x {qkv.shape[1]} x {sizes.head_dim}",
        2 * qkv.nbytes,
        lambda: gpu.elementwise.rotate_and_store(qkv, angles, None, cache, slots),
        None,
    )


def _draws(gpu: Any, sizes: Sizes, device: torch.device, rows: int) -> Iterator[Case]:
    logits = torch.randn(rows, sizes.vocab, device=device) * 3
    top_p = 0.9

    def params(temperature: float) -> Any:
        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        return gpu.sampling.DrawParams(
            temperature=column(temperature, torch.float32),
            top_k=column(0, torch.int32),
            top_p=column(top_p, torch.float64),
            min_p=column(0.0, torch.float32),
            uniform=column(0.5, torch.float64),
        )

    def sorted_draw() -> Tensor:
        values, tokens = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        sums = values.double().cumsum(-1)
        wanted = top_p * sums[:, -1:]
        kept = values.double().where(sums - values < wanted, 0)
        # The draw is by ids, lower ones first.
        reached = torch.empty_like(kept).scatter_(1, tokens, kept).cumsum(-1)
        return torch.searchsorted(reached, 0.5 * reached[:, -1:], right=True)[:, 0]

    greedy, drawn, size = params(0.0), params(1.0), f"{rows:,} x {sizes.vocab:,}"
    yield Case(
        "greedy token",
        size,
        logits.nbytes,
        lambda: gpu.sampling.sample(logits, greedy),
        lambda: logits.argmax(-1),
    )
    yield Case(
        "draw, top-p",
        size,
        logits.nbytes,
        lambda: gpu.sampling.sample(logits, drawn),
        sorted_draw,
    )


def _experts(gpu: Any, sizes: Mixture, device: torch.device, dtype: torch.dtype, rows: int) -> Case:
    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    gate_up = made(sizes.experts, 2 * sizes.intermediate, sizes.hidden).mul_(sizes.hidden**-0.5)
    down = made(sizes.experts, sizes.hidden, sizes.intermediate).mul_(sizes.intermediate**-0.5)
    x = made(rows, sizes.hidden)
    scores = torch.rand(rows, sizes.experts, device=device)
    weights, chosen = scores.topk(sizes.per_token, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    touched = len(chosen.unique())
    of_expert = gate_up[0].nbytes + down[0].nbytes
    kernels = gpu.kernels.TritonKernels(device)
    plan = kernels.plan([Span(0, rows, [0] * rows)], KvShape(1, 16, 1, dtype))
    ours = kernels.experts(gate_up, down)
    torchs = PlainKernels().experts(gate_up, down)
    return Case(
        "experts",
        f"{rows:,} x {sizes.hidden:,}, {sizes.per_token} of {sizes.experts}",
        touched * of_expert + 2 * x.nbytes,
        lambda: ours(x, weights, chosen, plan),
        lambda: torchs(x, weights, chosen, plan),
    )

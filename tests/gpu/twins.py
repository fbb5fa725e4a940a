"""What each kernel of the GPU path computes, in plain torch: slowly, in float64, token by token.

Written from the definitions, not from the kernels: each token attends in a loop over its own
sequence's keys, each draw sorts its row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from xpyd_worker.kernels.api import Span


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight."""
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """[rows, hidden]: each row through its experts, one after the other."""
    rows: list[Tensor] = []
    for row, shares, picked in zip(x.double(), weights.double(), chosen.tolist(), strict=True):
        total = torch.zeros_like(row)
        for share, expert in zip(shares, picked, strict=True):
            inner = silu_mul((gate_up[expert].double() @ row)[None])[0]
            total += share * (down[expert].double() @ inner)
        rows.append(total)
    return torch.stack(rows)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[rows, heads, head_dim]: each pair (i, i + head_dim / 2) as a complex number times e^(ia)."""
    first, second = x.double().chunk(2, dim=-1)
    angle = torch.complex(cos.double(), sin.double())[:, None]
    turned = torch.complex(first, second) * angle
    return torch.cat((turned.real, turned.imag), dim=-1)


def place(span: Span, position: int, block_size: int) -> tuple[int, int]:
    """Block and offset of a sequence's token."""
    return span.block_ids[position // block_size], position % block_size


def attention(query: Tensor, cache: Tensor, spans: Sequence[Span], window: int | None) -> Tensor:
    """[rows, heads, head_dim] -> [rows, heads * head_dim]."""
    _, heads, dim = query.shape
    _, kv_heads, block_size, _ = cache.shape
    rows: list[Tensor] = []
    for span in spans:
        places = [place(span, at, block_size) for at in range(span.start + span.count)]
        stored = torch.stack([cache[block, :, offset] for block, offset in places]).double()
        stored = stored.repeat_interleave(heads // kv_heads, dim=1)
        for position in range(span.start, span.start + span.count):
            first = 0 if window is None else max(0, position + 1 - window)
            keys, values = stored[first : position + 1].split(dim, dim=-1)
            scores = torch.einsum("hd,thd->ht", query[len(rows)].double(), keys) * dim**-0.5
            rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values).reshape(-1))
    return torch.stack(rows)


def kept(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[list[int], list[float]]:
    """The tokens that a draw may give, best first and lower id first among equals, and their
    probabilities, which sum to 1. One row, float32."""
    row = logits.cpu()
    order = row.sort(descending=True, stable=True).indices.tolist()
    weights = ((row - row.max()) / temperature).exp().double().tolist()
    tokens = [token for token in order if weights[token] >= min_p]
    if top_k:
        least = row[order[min(top_k, len(order)) - 1]]
        tokens = [token for token in tokens if row[token] >= least]
    total, before = sum(weights[token] for token in tokens), 0.0
    head: list[int] = []
    for token in tokens:
        if head and top_p < 1 and before >= top_p * total:
            break
        head.append(token)
        before += weights[token]
    return head, [weights[token] / before for token in head]

# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN202
"""One token from each row of logits, greedy or drawn, without a sort: one program for a row.

Basic typing: Triton's language is untyped. What a draw keeps (top-k, top-p, min-p) is a question of
the form "how much lies at or above this logit", answered by bisection over the float's bits, which
are ordered like the floats; where its random number falls is found in one more pass, lower ids
first. Sums are in float64, taken in an order that the batch does not change: the sampler on the CPU
draws the same tokens but for rounding of exp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xpyd_worker.kernels.api import NOT_FINITE, DrawParams

# Below it a row is greedy: float32 logits divided by less could overflow (vLLM's bound).
_LEAST_TEMPERATURE = tl.constexpr(1e-5)
# exp of less is 0 in float32.
_LEAST_EXPONENT = tl.constexpr(-104.0)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_COLUMNS = 4096


@triton.jit
def _key(value):
    """An int32 for a float32, ordered alike; minus zero equals zero."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _at_least(row, vocab, key, best, temperature, min_p, columns: tl.constexpr):
    """How many tokens have at least this key, and their mass; the best token's is 1."""
    mass = tl.zeros((columns,), tl.float64)
    count = tl.zeros((columns,), tl.int32)
    for at in range(0, vocab, columns):
        token = at + tl.arange(0, columns)
        value = tl.load(row + token, mask=token < vocab, other=float("-inf"))
        is_counted = (token < vocab) & (_key(value) >= key)
        weight = tl.exp((value - best) / temperature)
        is_kept = is_counted & (weight >= min_p)
        mass += tl.where(is_kept, weight, 0.0).to(tl.float64)
        count += is_counted.to(tl.int32)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _search(
    row, vocab, low, high, wanted, best, temperature, min_p, by: tl.constexpr, columns: tl.constexpr
):
    """The largest key in low .. high - 1 that has enough at or above it: `wanted` tokens (by 0), or
    at least `wanted` mass (1). `low` has, `high` has not."""
    while high - low > 1:
        middle = low + (high - low) // 2
        count, mass = _at_least(row, vocab, middle.to(tl.int32), best, temperature, min_p, columns)
        is_enough = count >= wanted if by == 0 else mass >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit
def _border(row, vocab, key, best, temperature, min_p, columns: tl.constexpr):
    """The mass above the tokens with this very key, the mass of each, and how many there are."""
    upper, above = _at_least(row, vocab, (key + 1).to(tl.int32), best, temperature, min_p, columns)
    lower, through = _at_least(row, vocab, key.to(tl.int32), best, temperature, min_p, columns)
    count = lower - upper
    return above, (through - above) / count, count


@triton.jit
def _first(row, vocab, key, columns: tl.constexpr):
    """The lowest id that has this key."""
    found = 0 * key + vocab
    for at in range(0, vocab, columns):
        token = at + tl.arange(0, columns)
        value = tl.load(row + token, mask=token < vocab, other=float("-inf"))
        is_it = (token < vocab) & (_key(value) == key)
        found = tl.minimum(found, tl.min(tl.where(is_it, token, vocab), 0))
    return found


@triton.jit
def _fall(row, vocab, key, equals, target, best, temperature, min_p, columns: tl.constexpr):
    """The first token, in the order of ids, with which the mass of what is kept passes `target`, or
    the last that has any where rounding puts `target` behind that. Kept is what lies above `key`,
    and the first `equals` of those that have it."""
    found = 0 * key + vocab
    last = 0 * key
    seen = 0 * key
    before = 0.0 * target
    for at in range(0, vocab, columns):
        token = at + tl.arange(0, columns)
        value = tl.load(row + token, mask=token < vocab, other=float("-inf"))
        own = _key(value)
        weight = tl.exp((value - best) / temperature)
        is_equal = (token < vocab) & (own == key)
        number = tl.cumsum(is_equal.to(tl.int32), 0) + seen
        is_kept = (token < vocab) & ((own > key) | (is_equal & (number <= equals)))
        is_kept = is_kept & (weight >= min_p) & (weight > 0)
        mass = tl.where(is_kept, weight, 0.0).to(tl.float64)
        is_past = is_kept & (tl.cumsum(mass, 0) + before > target)
        found = tl.minimum(found, tl.min(tl.where(is_past, token, vocab), 0))
        last = tl.maximum(last, tl.max(tl.where(is_kept, token, 0), 0))
        seen += tl.sum(is_equal.to(tl.int32), 0)
        before += tl.sum(mass, 0)
    return tl.where(found < vocab, found, last)


@triton.jit
def _best(row, vocab, columns: tl.constexpr):
    """The highest logit, and whether the row is one to choose from."""
    bests = tl.full((columns,), float("-inf"), tl.float32)
    bad = tl.zeros((columns,), tl.int32)
    for at in range(0, vocab, columns):
        token = at + tl.arange(0, columns)
        value = tl.load(row + token, mask=token < vocab, other=float("-inf"))
        bad |= ((value != value) | (value == float("inf"))).to(tl.int32)
        bests = tl.maximum(bests, value)
    best = tl.max(bests, 0)
    return best, (tl.max(bad, 0) == 0) & (best > float("-inf"))


@triton.jit
def _sample(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    out,
    vocab,
    columns: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * vocab
    temperature = tl.load(temperatures + index)
    best, is_good = _best(row, vocab, columns)
    high = _key(best).to(tl.int64) + 1
    found = 0 * high + _NOT_FINITE
    if is_good & (temperature < _LEAST_TEMPERATURE):
        found = _first(row, vocab, high - 1, columns)
    if is_good & (temperature >= _LEAST_TEMPERATURE):
        top_k = tl.load(top_ks + index).to(tl.int64)
        top_p = tl.load(top_ps + index)
        min_p = tl.load(min_ps + index)
        low = _key(best + temperature * _LEAST_EXPONENT).to(tl.int64)
        if top_k > 0:
            low = _search(row, vocab, low, high, top_k, best, temperature, min_p, 0, columns)
        _, kept = _at_least(row, vocab, low.to(tl.int32), best, temperature, min_p, columns)
        equals = 0 * low + vocab
        if top_p < 1:
            wanted = top_p * kept
            low = _search(row, vocab, low, high, wanted, best, temperature, min_p, 1, columns)
            above, each, count = _border(row, vocab, low, best, temperature, min_p, columns)
            # Of those that equal the last, only so many as are needed.
            needed = tl.maximum(tl.ceil((wanted - above) / each), 1.0)
            needed = tl.minimum(needed, count.to(tl.float64))
            kept = above + needed * each
            equals = needed.to(tl.int64)
        target = tl.load(uniforms + index) * kept
        found = _fall(row, vocab, low, equals, target, best, temperature, min_p, columns)
    tl.store(out + index, found)


def sample(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Tokens [rows] int64 from float32 `logits` [rows, vocab]; NOT_FINITE where a row has none.
    Nothing waits for the device."""
    if logits.dtype != torch.float32:
        raise ValueError(f"logits are {logits.dtype}; float32 is needed")
    logits = logits.contiguous()
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    columns = min(_COLUMNS, triton.next_power_of_2(vocab))
    _sample[(rows,)](
        logits,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.uniform,
        out,
        vocab,
        columns=columns,
        num_warps=8,
    )
    return out

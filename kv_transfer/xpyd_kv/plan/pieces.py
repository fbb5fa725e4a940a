"""Where a token range and a head range lie in the blocks of either side. Pure.

Block sizes may differ when one divides the other. A unit is as many tokens as the smaller block
has: it lies within one block on each side, and is a whole block on at least one. The bytes of a
segment in a unit are [heads, tokens of the unit, row] on both sides, so what is read run by run on
P can be written run by run on D.
"""

from __future__ import annotations

from typing import NamedTuple

from xpyd_kv.plan.engine_layout import EngineLayout


class Unit(NamedTuple):
    """`tokens` tokens of a prompt. Blocks count from the prompt's first, tokens from the start of
    the block."""

    tokens: int
    source_block: int
    source_token: int
    destination_block: int
    destination_token: int


class Run(NamedTuple):
    """Adjacent bytes of one block of one layer."""

    offset_bytes: int
    length_bytes: int


def units(
    tokens: int, *, skip_tokens: int, source_block_size: int, destination_block_size: int
) -> list[Unit]:
    """The units that hold the tokens [skip_tokens, tokens) of a prompt, in their order.

    The last is whole even where the prompt ends in it, as blocks travel whole. A chunk's end within
    a unit therefore has to wait for the next chunk. ValueError when `skip_tokens` is no multiple of
    the smaller block size or leaves nothing to send.
    """
    size = min(source_block_size, destination_block_size)
    if skip_tokens % size:
        raise ValueError(f"skip_tokens {skip_tokens}: must be a multiple of {size}")
    if not 0 <= skip_tokens < tokens:
        raise ValueError(f"skip_tokens {skip_tokens}: must be 0 or more and below {tokens}")
    return [
        Unit(
            size,
            token // source_block_size,
            token % source_block_size,
            token // destination_block_size,
            token % destination_block_size,
        )
        for token in range(skip_tokens, tokens, size)
    ]


def runs(
    layout: EngineLayout, *, first_head: int, heads: int, first_token: int, tokens: int
) -> list[Run]:
    """The bytes of heads [first_head, first_head + heads) (counted within the rank) and tokens
    [first_token, first_token + tokens) of a block: one run where the block is taken whole or by one
    head, else one for each head."""
    head_bytes = layout.block_size * layout.row_bytes
    if tokens == layout.block_size:
        return [Run(first_head * head_bytes, heads * head_bytes)]
    return [
        Run(head * head_bytes + first_token * layout.row_bytes, tokens * layout.row_bytes)
        for head in range(first_head, first_head + heads)
    ]

"""Values and the block pool that engine, sessions and memory share.

The bottom of the package: everything else may import it. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import msgspec


@dataclass(frozen=True)
class KvLayout:
    """Shape of the paged cache of one rank.

    One block of one layer is `kv_heads` x `block_size` x 2 x `head_dim` elements, K then V per
    token, contiguous: `block_bytes` bytes. `layers` are absolute layer indices, in order.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    block_bytes: int

    @cached_property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_bytes * len(self.layers)


class BlockPool(Protocol):
    """Blocks with reference counts, and the prefix cache over them. Engine thread only."""

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free(self) -> int:
        """Blocks with reference count 0 (cached or not)."""
        ...

    def match_prefix(self, token_ids: Sequence[int], *, salt: bytes, max_tokens: int) -> list[int]:
        """The longest cached run of full blocks from the start, at most max_tokens long, one
        reference taken on each."""
        ...

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None when fewer are free."""
        ...

    def retain(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block."""
        ...

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block; at 0 a block is free, its cached content can still be
        hit."""
        ...


# --- P


class SendStatus(msgspec.Struct, frozen=True):
    """The state of a prompt's transfer: none (failed or cancelled), pending (no GRANT or PULL yet)
    or granted (and later done), the incarnation of the D that answered ('' before), and of none the
    reason."""

    state: str
    decode_incarnation: str = ""
    reason: str = ""


# --- D


class OfferedPrompt(msgspec.Struct, frozen=True):
    """A prompt that P announced: all offered ids (prompt, then continue_from), and how many are the
    prompt's."""

    token_ids: tuple[int, ...]
    prompt_tokens: int


class Wait(msgspec.Struct, frozen=True):
    """The KV is not there yet. Ask again after the next event or at the deadline. `for_blocks`: it
    would be pulled now and finds no room; who pulls before it takes room from it."""

    for_blocks: bool = False


class Landed(msgspec.Struct, frozen=True):
    """The KV of the first `tokens` tokens is in `block_ids`; the references are the caller's
    now.

    `skipped_tokens` of them were in the local prefix cache.
    """

    block_ids: tuple[int, ...]
    tokens: int
    skipped_tokens: int


class NoKv(msgspec.Struct, frozen=True):
    """The KV will not come: compute the prompt here. `reason` is a short word for metrics and
    logs."""

    reason: str


Admission = Wait | Landed | NoKv

"""OFFER's body and layout: what is checked before D believes any of it. Pure."""

from __future__ import annotations

import sys
from array import array
from hashlib import sha256

from xpyd_core.blocks import blocks_for
from xpyd_core.errors import ProtocolError
from xpyd_kv.connector.api import KvLayout
from xpyd_kv.wire import messages as wire


def check_offer(offer: wire.Offer, body: bytes, layout: KvLayout) -> None:
    """ProtocolError where header and body do not agree."""
    if not 0 < offer.prompt_tokens <= offer.tokens or len(body) != 4 * offer.tokens:
        raise ProtocolError("OFFER: number of tokens")
    if sha256(body).digest() != offer.digest:
        raise ProtocolError("OFFER: digest of the token ids")
    if offer.total_bytes != blocks_for(offer.tokens, layout.block_size) * layout.bytes_per_block:
        raise ProtocolError("OFFER: total bytes")


def token_ids_of(body: bytes) -> tuple[int, ...]:
    """Little-endian u32 ids."""
    ids = array("I", body)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)


def same_shape(theirs: wire.Layout, ours: KvLayout) -> bool:
    """Whether a block of theirs is, byte by byte, a block of ours."""
    return (
        tuple(theirs.layers) == ours.layers
        and theirs.kv_heads == ours.kv_heads
        and theirs.head_dim == ours.head_dim
        and theirs.block_size == ours.block_size
        and theirs.dtype == ours.dtype
        and theirs.block_bytes == ours.block_bytes
    )

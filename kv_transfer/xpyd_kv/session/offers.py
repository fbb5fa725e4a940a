"""OFFER and its body: what is checked before D believes any of it. Pure."""

from __future__ import annotations

import sys
from array import array
from hashlib import sha256

from xpyd_core.blocks import blocks_for
from xpyd_core.errors import ProtocolError
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.fit import engine_layout_of


def check_offer(offer: wire.Offer, body: bytes, theirs: wire.Layout) -> None:
    """ProtocolError where header, body and P's cache do not agree."""
    if not 0 < offer.prompt_tokens <= offer.tokens or len(body) != 4 * offer.tokens:
        raise ProtocolError("OFFER: number of tokens")
    if sha256(body).digest() != offer.digest:
        raise ProtocolError("OFFER: digest of the token ids")
    engine = engine_layout_of(theirs)
    blocks = blocks_for(offer.tokens, engine.block_size)
    if offer.total_bytes != blocks * engine.bytes_per_block:
        raise ProtocolError("OFFER: total bytes")


def token_ids_of(body: bytes) -> tuple[int, ...]:
    """Little-endian u32 ids."""
    ids = array("I", body)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)

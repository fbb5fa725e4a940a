"""Block hashes: one chain for the engine's prefix cache and the router's policies. Pure.

Block i of a prompt is its tokens [16 i, 16 i + 16). Its hash covers the hash of block i - 1, its
own tokens and the extras, so equal hashes mean equal prefixes. Only full blocks have one. The salt
enters the first block only, which separates everything behind it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

DEFAULT_BLOCK_SIZE = 16
SCHEME = "xpyd-block-v1"
"""The chain's name: another one means other hashes."""
_ROOT = SCHEME.encode()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32, the form they have in hashes and on the wire."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def prompt_digest(token_ids: Sequence[int]) -> str:
    """SHA-256 (hex) of a prompt's token ids: by it P and D see that they mean the same prompt."""
    return sha256(token_bytes(token_ids)).hexdigest()


def root_hash(salt: bytes = b"") -> bytes:
    """The hash before the first block's: the salt's place in the chain."""
    return sha256(_ROOT + salt).digest()


def next_block_hash(parent: bytes, token_ids: Sequence[int], extras: bytes = b"") -> bytes:
    """Hash of one full block behind the block (or root) whose hash is `parent`."""
    return sha256(parent + token_bytes(token_ids) + extras).digest()


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    salt: bytes = b"",
    extras: bytes = b"",
) -> None:
    """Append to `hashes` the hashes of the blocks of `token_ids` that became full since."""
    parent = hashes[-1] if hashes else root_hash(salt)
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = next_block_hash(parent, token_ids[start : start + block_size], extras)
        hashes.append(parent)


def block_hashes(
    token_ids: Sequence[int],
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    salt: bytes = b"",
    extras: bytes = b"",
) -> list[bytes]:
    """Hashes of all full blocks of `token_ids`, first block first."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, block_size=block_size, salt=salt, extras=extras)
    return hashes


def blocks_for(tokens: int, block_size: int = DEFAULT_BLOCK_SIZE) -> int:
    """Blocks that hold `tokens` tokens: 17 -> 2 at block size 16."""
    return -(-tokens // block_size)

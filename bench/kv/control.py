"""What a transfer costs beside its bytes: the product with a cache of one layer, whose prompt is
one block of 64 bytes."""

from __future__ import annotations

from typing import Any

import torch

from bench.kv.contender import Place
from bench.kv.memory import Ring
from bench.kv.ours import OurReceiver, OurSender, RingPool, _End
from bench.kv.shape import BLOCK_TOKENS
from xpyd_kv.memory.paged import PagedMemory
from xpyd_kv.transport.host.shared_memory import SharedMemory

_BLOCKS = 64
_WIDTH = 2
"""One K and one V of a byte: 32 bytes to a block."""


def _end(role: str, place: Place, transport: str) -> _End:
    size = _BLOCKS * BLOCK_TOKENS * _WIDTH
    shared = SharedMemory(size) if transport == "shm" and role == "P" else None
    memory = shared.buffer if shared is not None else bytearray(size)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).view(_BLOCKS, 1, BLOCK_TOKENS, _WIDTH)
    return _End(
        role,
        transport,
        memory=PagedMemory([tensor], layers=[0]),
        pool=RingPool(Ring(_BLOCKS, seed=0), _BLOCKS),
        folder=place.folder / "control",
        shared=shared,
    )


def make_receiver(place: Place, *, transport: str) -> OurReceiver:
    return OurReceiver(_end("D", place, transport))


def make_sender(place: Place, address: Any, *, transport: str) -> OurSender:
    return OurSender(_end("P", place, transport), address)

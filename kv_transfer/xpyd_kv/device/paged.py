"""The paged cache's tensors as bytes: the KvMemory of a worker on CPU.

It sits between the runner, which owns the tensors, and the transfer, which sees memoryviews only.
torch stays inside this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from xpyd_core.errors import XpydError
from xpyd_kv.connector.api import KvLayout

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

_DIMENSIONS = 4


class PagedMemory:
    """KvMemory over one contiguous CPU tensor for each layer.

    Each tensor is [num_blocks, kv_heads, block_size, 2 * head_dim], all alike; `layers` are their
    absolute layer indices. The tensors must live as long as this object; it keeps them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, layers: Sequence[int]) -> None:
        _check(tensors, layers)
        first = tensors[0]
        num_blocks, kv_heads, block_size, width = first.shape
        block_bytes = kv_heads * block_size * width * first.element_size()
        self._tensors = tuple(tensors)
        self._views = [_bytes_of(tensor) for tensor in tensors]
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._layout = KvLayout(
            layers=tuple(layers),
            kv_heads=kv_heads,
            head_dim=width // 2,
            block_size=block_size,
            dtype=str(first.dtype).removeprefix("torch."),
            block_bytes=block_bytes,
        )

    @property
    def layout(self) -> KvLayout:
        """Shape of the cache."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self._num_blocks

    def block_view(self, layer: int, block_id: int) -> memoryview:
        """Writable bytes of one block of one layer (index into `layout.layers`)."""
        start = block_id * self._block_bytes
        return self._views[layer][start : start + self._block_bytes]


def _check(tensors: Sequence[torch.Tensor], layers: Sequence[int]) -> None:
    if not tensors or len(tensors) != len(layers):
        raise XpydError(f"{len(tensors)} cache tensors for {len(layers)} layers")
    first = tensors[0]
    for tensor in tensors:
        if (
            tensor.ndim != _DIMENSIONS
            or tensor.shape != first.shape
            or tensor.dtype != first.dtype
            or tensor.device.type != "cpu"
            or not tensor.is_contiguous()
        ):
            raise XpydError(
                "cache tensors must be alike: contiguous on the CPU, "
                "[blocks, kv heads, block size, 2 * head dim]"
            )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # numpy has no bfloat16: look at the same memory as bytes first.
    import torch

    array = tensor.detach().view(torch.uint8).numpy()
    # numpy's stubs do not say that an array is a buffer before Python 3.12.
    return memoryview(cast("Buffer", array)).cast("B")

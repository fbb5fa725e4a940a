"""The paged cache's tensors as bytes: the KvMemory of a worker, on the CPU or on a GPU.

It sits between the runner, which owns the tensors, and the transfer, which sees views only. torch
stays inside this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from xpyd_core.errors import XpydError
from xpyd_kv.memory.api import Deviation
from xpyd_kv.memory.device import Device, DeviceView, Event
from xpyd_kv.spans import join
from xpyd_kv.values import KvLayout

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

V = TypeVar("V", memoryview, DeviceView)
_DIMENSIONS = 4


class _Paged(Generic[V]):
    """One piece of memory for each layer, `layout.block_bytes` for each block."""

    def __init__(self, regions: Sequence[V], layout: KvLayout) -> None:
        self.layout = layout
        self.regions = tuple(regions)
        """The whole cache, writable: one view for each layer."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return len(self.regions[0]) // self.layout.block_bytes

    def block_view(self, layer: int, block_id: int) -> V:
        """Writable bytes of one block of one layer (index into `layout.layers`)."""
        size = self.layout.block_bytes
        return self.regions[layer][block_id * size : (block_id + 1) * size]

    def views(self, layers: Sequence[int], block_ids: Sequence[int]) -> list[V]:
        """Return the bytes of these blocks of these layers, layer after layer, with neighbours
        joined."""
        size = self.layout.block_bytes
        spans = join((block_id * size for block_id in block_ids), repeat(size))
        ranges = [(start, start + length) for start, length in spans]
        return [self.regions[layer][begin:end] for layer in layers for begin, end in ranges]


class PagedMemory(_Paged[memoryview]):
    """KvMemory over one contiguous CPU tensor for each layer.

    Each tensor is [num_blocks, kv_heads, block_size, 2 * head_dim], all alike; `layers` are their
    absolute layer indices. The tensors must live as long as this object; it keeps them.
    `is_transposed`: their bytes are those of TransposedMemory; `lands_transposed`: so are those
    that land.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        layers: Sequence[int],
        is_transposed: bool = False,
        lands_transposed: bool = False,
    ) -> None:
        layout = layout_of(tensors, layers=layers, device_type="cpu")
        super().__init__([_bytes_of(tensor) for tensor in tensors], layout)
        self.device = None
        self._tensors = tuple(tensors)
        self._is_transposed = is_transposed
        self._lands_transposed = lands_transposed

    def written(self) -> None:
        """Return None: the calls of a CPU model have returned when it has written."""

    def deviation(
        self, layer: int, block_ids: Sequence[int], landed: Sequence[memoryview], *, tokens: int
    ) -> Deviation:
        """How far KV that has landed is from these blocks of a layer, in the first `tokens`."""
        own = self._tensors[layer][list(block_ids)]
        theirs = _blocks_of(bytearray(b"".join(landed)), self.layout)
        own = _by_token(own) if self._is_transposed else own
        theirs = _by_token(theirs) if self._lands_transposed else theirs
        return _deviation(self.layout, layer, theirs, own, tokens)


class TransposedMemory(PagedMemory):
    """A CPU cache whose blocks hold, for each head, K as [dim, token], then V as [token, dim],
    under the shape of PagedMemory: vLLM's. Peers that cut blocks at a token can have its bytes.

    `views` and `block_view` are copies with K and V of each token: what a P sends. What a D takes
    is written as it comes, by PagedMemory, and then turned in place, by `turn`.
    """

    def block_view(self, layer: int, block_id: int) -> memoryview:
        """A copy of the bytes of one block of one layer, token by token."""
        (view,) = self.views((layer,), (block_id,))
        return view

    def views(self, layers: Sequence[int], block_ids: Sequence[int]) -> list[memoryview]:
        """Copies, one for each layer."""
        return [_bytes_of(_by_token(self._tensors[layer][list(block_ids)])) for layer in layers]


def farthest(found: Sequence[Deviation]) -> Deviation:
    """The largest; one that is no number is larger than all."""
    return max(found, key=lambda one: (one.deviation != one.deviation, one.deviation))


def turn(tensors: Sequence[torch.Tensor], block_ids: Sequence[int]) -> None:
    """Make of blocks with K and V of each token those of TransposedMemory, in place."""
    import torch

    blocks = list(block_ids)
    for tensor in tensors:
        found = tensor[blocks]
        number, heads, _, width = found.shape
        k, v = found[..., : width // 2], found[..., width // 2 :]
        parts = (k.transpose(2, 3).reshape(number, heads, -1), v.reshape(number, heads, -1))
        tensor[blocks] = torch.cat(parts, dim=2).view(found.shape)


def _by_token(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    number, heads, size, width = blocks.shape
    flat, half = blocks.reshape(number, heads, -1), size * width // 2
    k, v = flat[..., :half], flat[..., half:]
    rows = k.reshape(number, heads, width // 2, size).transpose(2, 3)
    return torch.cat((rows, v.reshape(number, heads, size, width // 2)), dim=3)


class DevicePagedMemory(_Paged[DeviceView]):
    """KvMemory over the device memory of each layer's tensor.

    `region` is the allocation of `device` that all of them lie in: what a peer on this machine may
    open. The memory stays its owner's.
    """

    def __init__(
        self, device: Device, layers: Sequence[DeviceView], *, layout: KvLayout, region: DeviceView
    ) -> None:
        first, end = region.address, region.address + region.length
        for view in layers:
            if not first <= view.address <= end - view.length or view.length != len(layers[0]):
                raise XpydError("cache memory must be alike and in one allocation")
        if len(layers) != len(layout.layers) or len(layers[0]) % layout.block_bytes:
            raise XpydError(f"{len(layers)} pieces of memory for {len(layout.layers)} layers")
        super().__init__(layers, layout)
        self.device = device
        self.region = region

    def written(self) -> Event:
        """Engine thread: when all that the model has enqueued by now is in the cache."""
        return self.device.compute_stream().record()

    def deviation(self, layer: int, landed: bytearray, own: bytearray, *, tokens: int) -> Deviation:
        """As PagedMemory's, of bytes that were brought to the host."""
        blocks = [_blocks_of(data, self.layout) for data in (landed, own)]
        return _deviation(self.layout, layer, blocks[0], blocks[1], tokens)


def _blocks_of(data: bytearray, layout: KvLayout) -> torch.Tensor:
    import torch

    raw = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, layout.dtype))
    return raw.view(-1, layout.kv_heads, layout.block_size, 2 * layout.head_dim)


def _deviation(
    layout: KvLayout, layer: int, theirs: torch.Tensor, own: torch.Tensor, tokens: int
) -> Deviation:
    """Of blocks that are token by token."""
    import torch

    # [head, token, K|V]
    rows, expected = (
        blocks.transpose(0, 1).flatten(1, 2)[:, :tokens].double() for blocks in (theirs, own)
    )
    found: list[float] = []
    for part in (slice(0, layout.head_dim), slice(layout.head_dim, None)):
        apart = ((rows - expected)[..., part] ** 2).sum(dim=2) ** 0.5
        usual = (expected[..., part] ** 2).sum(dim=2).mean(dim=1, keepdim=True) ** 0.5
        # What is 0 on both sides agrees.
        ratios = torch.where(apart == 0, 0.0, apart / usual)
        found.append(float(ratios.max()))
    at = layout.layers[layer]
    return farthest([Deviation(at, "K", found[0]), Deviation(at, "V", found[1])])


def paged_over(
    device: Device,
    region: DeviceView,
    flat: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    *,
    layers: Sequence[int],
) -> DevicePagedMemory:
    """The KvMemory of cache tensors (as in PagedMemory) cut from `flat`, the bytes of `region` as
    torch sees them. XpydError for others."""
    layout = layout_of(tensors, layers=layers, device_type=flat.device.type)
    starts = [tensor.data_ptr() - flat.data_ptr() for tensor in tensors]
    size = tensors[0].nbytes
    if not all(0 <= start <= len(region) - size for start in starts):
        raise XpydError("cache tensors must be cut from the memory that peers may open")
    views = [region[start : start + size] for start in starts]
    return DevicePagedMemory(device, views, layout=layout, region=region)


def layout_of(
    tensors: Sequence[torch.Tensor], *, layers: Sequence[int], device_type: str
) -> KvLayout:
    """The shape of a cache of one tensor for each layer, as in PagedMemory. XpydError when they are
    not alike, contiguous and on a device of this type."""
    if not tensors or len(tensors) != len(layers):
        raise XpydError(f"{len(tensors)} cache tensors for {len(layers)} layers")
    first = tensors[0]
    for tensor in tensors:
        if (
            tensor.ndim != _DIMENSIONS
            or tensor.shape != first.shape
            or tensor.dtype != first.dtype
            or tensor.device.type != device_type
            or not tensor.is_contiguous()
        ):
            raise XpydError(
                f"cache tensors must be alike: contiguous on {device_type}, "
                "[blocks, kv heads, block size, 2 * head dim]"
            )
    _, kv_heads, block_size, width = first.shape
    return KvLayout(
        layers=tuple(layers),
        kv_heads=kv_heads,
        head_dim=width // 2,
        block_size=block_size,
        dtype=str(first.dtype).removeprefix("torch."),
        block_bytes=kv_heads * block_size * width * first.element_size(),
    )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # numpy has no bfloat16: look at the same memory as bytes first.
    import torch

    array = tensor.detach().view(torch.uint8).numpy()
    # numpy's stubs do not say that an array is a buffer before Python 3.12.
    return memoryview(cast("Buffer", array)).cast("B")

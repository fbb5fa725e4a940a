"""The paged cache's tensors as bytes."""

from __future__ import annotations

import pytest
import torch

from tests.kv.device_fake import DeviceFault, Machine
from tests.kv.kvfakes import LAYOUT
from xpyd_core.errors import XpydError
from xpyd_kv.memory.paged import DevicePagedMemory, PagedMemory


def cache(dtype: torch.dtype, layers: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(5, 3, 4, 8, dtype=dtype) for _ in range(layers)]


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)]
)
def test_a_block_of_a_layer_is_one_writable_run_of_the_tensors_own_bytes(
    dtype: torch.dtype, size: int
) -> None:
    tensors = cache(dtype)
    memory = PagedMemory(tensors, layers=[4, 7])
    layout = memory.layout
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.block_size) == ((4, 7), 3, 4, 4)
    assert layout.dtype == str(dtype).removeprefix("torch.")
    assert layout.block_bytes == 3 * 4 * 8 * size
    assert memory.num_blocks == 5
    tensors[1][2] = torch.arange(96, dtype=dtype).reshape(3, 4, 8)
    view = memory.block_view(1, 2)
    assert (len(view), view.format, view.readonly) == (layout.block_bytes, "B", False)
    memory.block_view(0, 4)[:] = view
    assert torch.equal(tensors[0][4], tensors[1][2])
    assert not tensors[0][:4].any()


def test_a_cache_that_needs_no_gradient_is_not_asked_for_one() -> None:
    tensors = [t.requires_grad_() for t in cache(torch.float32)]
    PagedMemory(tensors, layers=[0, 1]).block_view(0, 0)[:4] = b"\0\0\x80?"
    assert tensors[0][0, 0, 0, 0].item() == 1.0


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        cache(torch.float32, 1),
        [*cache(torch.float32, 1), *cache(torch.float16, 1)],
        [torch.zeros(5, 3, 4, 8), torch.zeros(5, 3, 8, 8)],
        [torch.zeros(5, 3, 4, 8).transpose(1, 2)] * 2,
        [torch.zeros(5, 3, 8)] * 2,
        [torch.zeros(5, 3, 4, 8, device="meta")] * 2,
    ],
)
def test_tensors_of_another_shape_are_refused(tensors: list[torch.Tensor]) -> None:
    with pytest.raises(XpydError):
        PagedMemory(tensors, layers=[0, 1])


def test_a_cache_on_a_device_is_places_and_an_event_says_when_the_model_wrote_them() -> None:
    machine = Machine()
    gpu = machine.device("p")
    region = gpu.allocate(2 * 5 * LAYOUT.block_bytes * 3)
    size = 5 * LAYOUT.block_bytes
    layers = [region[layer * size : (layer + 1) * size] for layer in range(3)]
    memory = DevicePagedMemory(gpu, layers, layout=LAYOUT, region=region)
    assert (memory.layout, memory.num_blocks) == (LAYOUT, 5)
    block = memory.block_view(1, 4)
    assert (block.address, len(block)) == (
        region.address + size + 4 * LAYOUT.block_bytes,
        LAYOUT.block_bytes,
    )
    gpu.compute(block, b"k" * len(block))
    event = memory.written()
    with pytest.raises(DeviceFault):
        gpu.read(block)
    assert event.wait(1.0)
    assert gpu.read(block) == b"k" * len(block)


def test_device_memory_that_is_no_cache_is_refused() -> None:
    gpu = Machine().device("p")
    region = gpu.allocate(3 * LAYOUT.block_bytes)
    size = LAYOUT.block_bytes
    good = [region[i * size : (i + 1) * size] for i in range(3)]
    outside = gpu.allocate(size)
    for bad in (good[:2], [*good[:2], outside], [good[0], good[1], good[2][:-8]]):
        with pytest.raises(XpydError):
            DevicePagedMemory(gpu, bad, layout=LAYOUT, region=region)


def test_neighbouring_blocks_of_a_layer_are_one_view():
    memory = PagedMemory(cache(torch.float32), layers=[0, 1])
    ids = [3, 1, 2, 0]
    for layer in range(2):
        for n, block in enumerate(ids):
            memory.block_view(layer, block)[:1] = bytes([10 * layer + n])
    views = memory.views(range(2), ids)
    size = memory.layout.block_bytes
    assert list(map(len, views)) == [size, 2 * size, size] * 2
    assert b"".join(views)[::size] == bytes([0, 1, 2, 3, 10, 11, 12, 13])
    assert memory.views([1], []) == []

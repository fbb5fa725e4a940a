"""The seam on a real GPU: what the fake stands for. Runs where there is one (`make test-gpu`)."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys

import pytest

from xpyd_core.errors import UserError
from xpyd_kv.memory.device import DeviceError

pytestmark = pytest.mark.gpu
PATIENCE_S = 30.0
# Opens the handle on its command line and prints a digest of what it finds behind it.
READER = """
import hashlib, sys
from xpyd_kv.memory.device import IpcHandle
from xpyd_kv.memory.cuda import CudaDevice, tensor_over
import torch
gpu = CudaDevice(0)
handle = bytes.fromhex(sys.argv[1])
size = int(sys.argv[2])
theirs = gpu.open_peer(IpcHandle(handle, size, gpu.uuid, bytes(16)))
mine, stream = gpu.allocate(size), gpu.stream()
stream.copy([mine], [theirs])
assert stream.record().wait(30.0)
gpu.close_peer(theirs)
found = tensor_over(mine, (size,), torch.uint8).cpu().numpy().tobytes()
print(hashlib.sha256(found).hexdigest())
"""


@pytest.fixture
def gpu():
    from xpyd_kv.memory.cuda import CudaDevice

    return CudaDevice(0)


def filled(gpu, body):
    import torch

    from xpyd_kv.memory.cuda import tensor_over

    view = gpu.allocate(len(body))
    tensor = tensor_over(view, (len(body),), torch.uint8)
    tensor.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
    torch.cuda.synchronize()
    return view


@pytest.mark.parametrize("unit", [4096, 24, 7])
def test_many_pieces_go_through_pinned_memory_and_back(gpu, unit):
    count = 500
    body = random.Random(1).randbytes(unit * count)
    source, target, slab = (
        filled(gpu, body),
        gpu.allocate(len(body)),
        gpu.allocate_pinned(len(body)),
    )
    order = list(range(count))
    random.Random(2).shuffle(order)
    stream = gpu.stream()
    stream.copy([slab], [source[i * unit : (i + 1) * unit] for i in order])
    assert stream.record().wait(PATIENCE_S)
    assert bytes(slab) == b"".join(body[i * unit : (i + 1) * unit] for i in order)
    stream.copy([target[i * unit : (i + 1) * unit] for i in order], [slab])
    slab_again = gpu.allocate_pinned(len(body))
    stream.copy([slab_again], [target])
    assert stream.record().wait(PATIENCE_S)
    assert bytes(slab_again) == body
    stream.close()
    for memory in (source, target):
        gpu.free(memory)
    for memory in (slab, slab_again):
        gpu.free_pinned(memory)


def test_a_copy_waits_for_the_models_stream(gpu):
    import torch

    from xpyd_kv.memory.cuda import tensor_over

    size = 1 << 24
    cache, slab = filled(gpu, bytes(size)), gpu.allocate_pinned(size)
    tensor = tensor_over(cache, (size,), torch.uint8)
    stream = gpu.stream()
    work = torch.rand(4096, 4096, device="cuda")
    for _ in range(20):
        work = work @ work
        work /= work.max()
    tensor.fill_(7)
    stream.wait(gpu.compute_stream().record())
    stream.copy([slab], [cache])
    assert stream.record().wait(PATIENCE_S)
    assert bytes(slab) == b"\7" * size


def test_a_cache_of_torch_tensors_is_this_memory(gpu):
    import torch

    from xpyd_kv.memory.cuda import tensor_over
    from xpyd_kv.memory.paged import paged_over

    shape = (5, 3, 4, 8)
    size = 2 * 5 * 3 * 4 * 8
    region = gpu.allocate(2 * size)
    flat = tensor_over(region, (2 * size,), torch.uint8)
    tensors = [flat[layer * size :][:size].view(torch.bfloat16).view(shape) for layer in range(2)]
    memory = paged_over(gpu, region, flat, tensors, layers=[4, 7])
    tensors[1][3] = 1.5
    assert memory.written().wait(PATIENCE_S)
    block, slab = memory.block_view(1, 3), gpu.allocate_pinned(memory.layout.block_bytes)
    stream = gpu.stream()
    stream.copy([slab], [block])
    assert stream.record().wait(PATIENCE_S)
    assert bytes(slab) == b"\xc0\x3f" * 96


def test_another_process_reads_an_exported_allocation(gpu):
    body = random.Random(3).randbytes(1 << 20)
    memory = filled(gpu, body)
    handle = gpu.export(memory)
    done = subprocess.run(
        [sys.executable, "-c", READER, handle.handle.hex(), str(len(body))],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == hashlib.sha256(body).hexdigest()


def test_a_handle_of_this_process_is_its_own_memory_until_that_is_freed(gpu):
    memory = filled(gpu, b"12345678")
    handle = gpu.export(memory)
    own = gpu.open_peer(handle)
    assert own == memory
    gpu.close_peer(own)
    gpu.free(memory)
    with pytest.raises(DeviceError):
        gpu.open_peer(handle)


def test_memory_that_is_not_there_and_host_memory_that_is_not_pinned_are_refused(gpu):
    with pytest.raises(UserError):
        gpu.allocate(1 << 50)
    memory = gpu.allocate(8)
    with pytest.raises(ValueError, match="not pinned"):
        gpu.stream().copy([memory], [memoryview(bytearray(8))])
    gpu.free(memory)

"""A worker's KV cache on a GPU: its memory, what is refused, and its transports."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.kv.device_fake import FakeDevice, Machine
from tests.kv.kvfakes import FakePool
from tests.worker.device_pair import cache_on
from tests.worker.kv_pair import KEY
from xpyd_core.errors import UserError, XpydError
from xpyd_kv.memory.paged import PagedMemory
from xpyd_kv.transport.devices import paths
from xpyd_kv.transport.devices.nccl.library import NcclLimits
from xpyd_kv.transport.settings import TRANSPORTS
from xpyd_worker.config import MIB, WorkerConfig
from xpyd_worker.kv.cache import check, kv_overhead, open_cache, warm_up
from xpyd_worker.kv.engine import HeldKv, Kv, KvParts, make_kv

SHAPE = (6, 2, 16, 8)
LAYER_BYTES = 6 * 2 * 16 * 8 * 4
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def config(role: Any = "Prefill", **fields: Any) -> WorkerConfig:
    return WorkerConfig("m", role=role, **{"kv_port": 0, "kv_host_pool_bytes": MIB, **fields})


@pytest.fixture
def kv_on() -> Iterator[Callable[[Machine, WorkerConfig], Kv]]:
    """Makes the transfer of a worker with two layers on a fake GPU, not started."""
    made: list[tuple[Machine, Kv]] = []

    def make(machine: Machine, settings: WorkerConfig) -> Kv:
        made.append((machine, _kv_on(machine, settings)))
        return made[-1][1]

    yield make
    for machine, kv in made:
        kv.close(1.0)
        machine.check()


def _kv_on(machine: Machine, settings: WorkerConfig) -> Kv:
    gpu = cache_on(machine.device(settings.role))
    flat = gpu.allocate(2 * LAYER_BYTES)
    layers = [flat[i * LAYER_BYTES :][:LAYER_BYTES].view(torch.float32) for i in range(2)]
    memory = gpu.paged([layer.view(SHAPE) for layer in layers], layers=range(2))
    return make_kv(
        settings,
        KvParts(
            held=HeldKv(memory, memory.regions, gpu=gpu),
            pool=FakePool(6, 16),
            wake=lambda: None,
            factors={},
            keys=(KEY,),
            incarnation="i",
            max_model_len=96,
            buffer_bytes=MIB,
        ),
    )


def names(kv: Kv) -> list[str]:
    assert kv.transports is not None
    return [path.name for path in kv.transports.paths]


# --- memory


def test_the_runners_tensors_and_the_transfers_places_are_the_same_bytes():
    machine = Machine()
    device = machine.device("p")
    gpu = cache_on(device)
    flat = gpu.allocate(2 * LAYER_BYTES + 100)
    assert flat.dtype == torch.uint8
    assert not flat.any()
    layers = [
        flat[i * LAYER_BYTES :][:LAYER_BYTES].view(torch.float32).view(SHAPE) for i in range(2)
    ]
    memory = gpu.paged(layers, layers=(3, 4))
    layers[1][4] = 2.5
    assert device.read(memory.block_view(1, 4)) == layers[1][4].numpy().tobytes()
    assert (memory.num_blocks, memory.layout.layers) == (6, (3, 4))
    # A peer opens an allocation, so what is lent is the whole one.
    assert len(memory.region) == len(flat)
    with pytest.raises(XpydError, match="cut from"):
        gpu.paged([torch.zeros(SHAPE), layers[1]], layers=range(2))
    with pytest.raises(XpydError, match="once"):
        gpu.allocate(1)
    gpu.close(1.0)
    gpu.close(1.0)
    machine.check()


def test_a_gpu_with_too_little_memory_says_what_to_lower():
    class Full(FakeDevice):
        def allocate(self, size_bytes):
            raise UserError("out of memory")

    gpu = cache_on(Full(Machine(), "p", "GPU-0", 0))
    with pytest.raises(UserError, match=r"1\.0 GiB .*--gpu-memory-utilization"):
        gpu.allocate(2**30)


def test_memory_that_a_model_may_still_write_is_left_to_the_end_of_the_process(caplog):
    machine = Machine()
    device = machine.device("p")
    gpu = cache_on(device)
    gpu.allocate(64)
    machine.is_stalled = True
    gpu.close(0.0)
    assert "has not ended" in caplog.text
    assert machine.faults == []


def test_only_a_worker_that_moves_kv_from_a_gpu_keeps_its_cache_so():
    assert open_cache(config("Aggregated"), CUDA) is None
    assert open_cache(config("Prefill"), CPU) is None
    assert open_cache(config("Decode"), CPU) is None


def test_the_copies_are_tried_before_the_model_is_loaded_and_leave_nothing_behind():
    machine = Machine()
    warm_up(machine.device("p"))
    machine.check()
    machine.is_stalled = True
    with pytest.raises(UserError, match="has not copied"):
        warm_up(machine.device("p"))
    machine.broken = "no kernel image"
    with pytest.raises(UserError, match="no kernel image"):
        warm_up(machine.device("p"))


# --- what cannot work


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"kv_transports": ("shm",)}, "--kv-transport shm"),
        ({"kv_connections": 2}, "--kv-connections 2"),
    ],
)
def test_what_a_cache_on_a_gpu_cannot_do_is_refused_by_its_flag(fields, flag):
    check(config())
    with pytest.raises(UserError, match=flag):
        check(config(**fields))
    with pytest.raises(UserError, match=flag):
        open_cache(config(**fields), CUDA)


@pytest.mark.parametrize("name", ["cuda_ipc", "nccl"])
def test_a_cache_on_a_cpu_has_no_way_between_gpus(name):
    parts = KvParts(
        held=HeldKv(PagedMemory([torch.zeros(SHAPE) for _ in range(2)], layers=range(2))),
        pool=FakePool(6, 16),
        wake=lambda: None,
        factors={},
        keys=(KEY,),
        incarnation="i",
        max_model_len=96,
        buffer_bytes=MIB,
    )
    with pytest.raises(UserError, match="needs a KV cache on a GPU"):
        make_kv(config(kv_transports=(name,)), parts)


# --- transports


@pytest.mark.parametrize("role", ["Prefill", "Decode"])
@pytest.mark.parametrize("transports", [TRANSPORTS, ("cuda_ipc",), ("nccl",), ("tcp",)])
def test_all_that_is_taken_at_start_is_given_back_at_the_end(kv_on, role, transports):
    kv = kv_on(Machine(), config(role, kv_transports=transports, kv_mode="get"))
    assert kv.transports is not None
    assert kv.transports.gpu == "GPU-0"
    assert kv.connector is not None
    assert kv.connector.store is not None
    # The fixture closes it, and the machine misses nothing.


def test_nccl_is_offered_by_its_name_only(kv_on, monkeypatch):
    monkeypatch.setattr(paths, "nixl_version", lambda: None)
    assert names(kv_on(Machine(), config(kv_transports=TRANSPORTS))) == ["cuda_ipc"]
    kv = kv_on(Machine(), config(kv_transports=("nccl",)))
    assert names(kv) == ["cuda_ipc", "nccl"]
    assert kv.transports is not None
    assert kv.transports.nccl is not None


def test_auto_goes_on_without_a_nixl_that_does_not_work_and_its_name_alone_does_not(
    kv_on, monkeypatch, caplog
):
    def broken() -> None:
        raise UserError("KV transport nixl: cannot be loaded")

    monkeypatch.setattr(paths, "nixl_version", lambda: "1.5.1")
    monkeypatch.setattr(paths, "load_nixl", broken)
    with caplog.at_level(logging.WARNING):
        assert names(kv_on(Machine(), config(kv_transports=TRANSPORTS))) == ["cuda_ipc"]
    assert "goes without nixl" in caplog.text
    with pytest.raises(UserError, match="cannot be loaded"):
        kv_on(Machine(), config(kv_transports=("nixl",)))


def test_slabs_hold_the_longest_frame_that_is_announced_and_sent(kv_on):
    settings = config("Decode", kv_group_bytes=3 * MIB + 5)
    kv = kv_on(Machine(), settings)
    found = kv.transports
    assert found is not None
    assert found.staging is not None
    assert found.max_data_bytes == found.frames.max_frame_bytes == 6 * MIB + 10
    assert found.staging.slab_bytes >= found.max_data_bytes
    assert found.staging.slab_bytes % 4096 == 0
    # However small the groups, a block travels in one frame.
    small = kv_on(Machine(), config(kv_group_bytes=1)).transports
    assert small is not None
    assert small.max_data_bytes == LAYER_BYTES // 6


def test_what_transfers_take_of_the_gpu_beside_the_cache_is_known_before():
    size = 8 * MIB
    for role, mode, has_buffer in (
        ("Aggregated", "get", False),
        ("Prefill", "put_async", False),
        ("Prefill", "get", True),
        ("Decode", "put_async", True),
    ):
        by_size = kv_overhead(config(role, kv_mode=mode, kv_buffer_bytes=size))
        assert by_size == (size if has_buffer else 0, 0)
        by_share = kv_overhead(config(role, kv_mode=mode, kv_buffer_percent=7))
        assert by_share == (0, 7 if has_buffer else 0)
    most = NcclLimits().most_bytes
    assert kv_overhead(config("Prefill", kv_transports=("nccl",))) == (most, 0)
    assert kv_overhead(config("Aggregated", kv_transports=("nccl",))) == (0, 0)


def test_what_the_transfers_thread_may_still_use_is_not_given_back(kv_on):
    machine = Machine()
    kv = kv_on(machine, config("Decode"))
    kv.start()
    goes_on, holds = threading.Event(), threading.Event()

    def hold() -> None:
        holds.set()
        assert goes_on.wait(30.0)

    kv.connector.endpoint.call(hold)
    assert holds.wait(30.0)
    kv.close(0.0)
    with pytest.raises(AssertionError):
        machine.check()
    goes_on.set()


def test_what_a_communicator_that_hangs_says_ends_the_worker(kv_on):
    kv = kv_on(Machine(), config(kv_transports=("nccl",)))
    assert kv.loss.reason == ""
    kv.loss.give_up("NCCL: not ended")
    kv.loss.give_up("NCCL: another")
    assert kv.loss.reason == "NCCL: not ended"

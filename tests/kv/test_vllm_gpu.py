"""Our connector in a fake of vLLM's engine whose caches are on GPUs: fake ones here, and the first
GPU of the machine by `make test-gpu`, which nobody has run yet.

The model runs on a stream of its own, which is the current one in the thread of vLLM's worker and
nowhere else, as in vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.kv import vllm_engine
from tests.kv.device_fake import FakeDevice, FakeStream, Machine
from tests.kv.nccl_fake import FakeNccl, World
from tests.kv.test_vllm_connector import assert_all_is_back, prefill, prompt, serve
from xpyd_core.compat import HEAD_TOKEN_KV
from xpyd_core.errors import UserError, XpydError
from xpyd_kv.memory.device import DeviceView
from xpyd_kv.spans import Span
from xpyd_kv.vllm import engine_api, worker
from xpyd_kv.vllm.gpu import Gpu, check_transports, open_gpu

Pair = Callable[..., Any]
POOL, BUFFER = {"pool_bytes": 1 << 20}, {"buffer_bytes": 1 << 20}
PATIENCE_S = 30.0


class OwnStreamDevice(FakeDevice):
    """A fake GPU whose model runs on a stream that is current in the thread that made it alone."""

    def __init__(self, machine: Machine, process: str) -> None:
        super().__init__(machine, process, "GPU-0", 0)
        self._thread = threading.get_ident()
        self._default = FakeStream(self, is_compute=True)

    def compute_stream(self) -> FakeStream:
        is_model_s = threading.get_ident() == self._thread
        return self._compute if is_model_s else self._default


class FakeGpuMemory:
    """A fake GPU: nothing runs before somebody asks for an event behind it."""

    def __init__(self, machine: Machine, process: str, *, world: World | None = None) -> None:
        self.device = OwnStreamDevice(machine, process)
        self.others_bytes = 0
        """What else is in the driver's allocation."""
        self._world = world or World(machine)
        self._region: DeviceView | None = None
        self._flat = torch.empty(0)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        self._region = self.device.allocate(size_bytes + self.others_bytes)
        data = self.device.bytes_of(self.device.place_of(self._region))
        self._flat = torch.frombuffer(data, dtype=torch.uint8)
        return self._flat[:size_bytes]

    def open_gpu(self, tensor: torch.Tensor) -> Gpu:
        whole = self._region
        assert whole is not None
        return Gpu(
            self.device,
            "cpu",
            view_of=self._view,
            allocation_of=lambda _: whole,
            load_nccl=lambda: FakeNccl(self._world, self.device),
        )

    @contextmanager
    def model(self) -> Iterator[None]:
        yield

    def run(self, call: Any, *, reads: Any = (), writes: Any = ()) -> None:
        spans = [[self._span(one) for one in some] for some in (reads, writes)]
        self.device.compute_stream().enqueue("the model", *spans, call)

    def finish(self) -> None:
        assert self.device.compute_stream().record().wait(PATIENCE_S)

    def close(self) -> None:
        self.finish()
        if self._region is not None:
            self.device.free(self._region)

    def _view(self, tensor: torch.Tensor) -> DeviceView:
        assert self._region is not None
        start = tensor.data_ptr() - self._flat.data_ptr()
        return self._region[start : start + tensor.nbytes]

    def _span(self, tensor: torch.Tensor) -> Span:
        view = self._view(tensor)
        return Span(view.address, view.length)


class RealGpuMemory:
    """A GPU of this machine. Not run on one yet. `process`: one for P and D, which are in one."""

    def __init__(self, process: Any, index: int = 0) -> None:
        self._process = process
        self._stream = torch.cuda.Stream(torch.device("cuda", index))

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self._stream.device)

    def open_gpu(self, tensor: torch.Tensor) -> Gpu | None:
        return open_gpu(tensor, self._process)

    @contextmanager
    def model(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def run(self, call: Any, *, reads: Any = (), writes: Any = ()) -> None:
        with torch.cuda.stream(self._stream):
            # Long enough that what does not wait for this reads other bytes.
            torch.cuda._sleep(20_000_000)
            call()

    def finish(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.finish()


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.check()


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def pair(request: Any, tmp_path: Any) -> Pair:
    """Makes a P and a D whose caches are on one GPU."""
    if request.param == "real":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        from xpyd_kv.memory.cuda import CudaProcess

        process = CudaProcess()
        memories: dict[str, Any] = {name: lambda: RealGpuMemory(process) for name in "pd"}
    else:
        machine = request.getfixturevalue("machine")
        world = World(machine)
        memories = {
            name: lambda name=name: FakeGpuMemory(machine, name, world=world) for name in "pd"
        }

    def make(p: dict[str, Any] | None = None, d: dict[str, Any] | None = None, **both: Any) -> Any:
        if "uds" in both.get("transports", ()):
            both["socket_dir"] = str(tmp_path)
        return vllm_engine.pair(
            {"memory": memories["p"], **both, **(p or {})},
            {"memory": memories["d"], **both, **(d or {})},
        )

    return make


@pytest.mark.parametrize("mode", ["put_async", "put", "get"])
@pytest.mark.parametrize("store", [{}, BUFFER, POOL], ids=["blocks", "buffer", "pool"])
def test_d_answers_as_one_engine_from_caches_on_gpus(pair, mode, store):
    with pair({"chunk": 50, "mode": mode, **store}, store) as (p, d):
        for number, length in enumerate((1, 8, 9, 100, 131)):
            assert serve(p, d, prompt(length, number)).external == length
        # Blocks that requests have given back are others' now.
        serve(p, d, [*prompt(100, 3), *prompt(30, 9)])
        assert d.recomputed == []
        assert_all_is_back(p, d)


@pytest.mark.parametrize("transports", [["cuda_ipc"], ["cuda_ipc", "uds", "tcp"], ["uds"], ["tcp"]])
def test_each_transport_moves_kv_between_gpus(pair, transports):
    with pair({"chunk": 40}, POOL, transports=transports) as (p, d):
        for number, length in enumerate((3, 100)):
            assert serve(p, d, prompt(length, number)).external == length
        assert d.recomputed == []
        assert_all_is_back(p, d)
        assert list(d.scheduler._half.connector.metrics.transfer_s) == transports[:1]


def test_nccl_moves_kv_between_fake_gpus(machine):
    world = World(machine)
    both = {"transports": ["nccl"]}
    of_p = {"memory": lambda: FakeGpuMemory(machine, "p", world=world), **both}
    of_d = {"memory": lambda: FakeGpuMemory(machine, "d", world=world), **both}
    with vllm_engine.pair(of_p, of_d) as (p, d):
        assert serve(p, d, prompt(100)).external == 100
        assert d.recomputed == []
        assert_all_is_back(p, d)


def test_a_d_on_a_cpu_takes_kv_from_a_gpu(pair, monkeypatch):
    """Equal bytes on both, as where the CPU's K is not transposed."""
    monkeypatch.setattr(worker, "transposed_k", lambda _: HEAD_TOKEN_KV)
    with pair({}, {"memory": vllm_engine.HostMemory}) as (p, d):
        assert serve(p, d, prompt(90)).external == 90


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("store", [BUFFER, POOL], ids=["buffer", "pool"])
@pytest.mark.parametrize("is_liar", [False, True])
def test_a_d_on_a_gpu_compares_kv_of_another_engine_first(
    machine, monkeypatch, caplog, tp, store, is_liar
):
    caplog.set_level("INFO")
    d = vllm_engine.FakeVllm("consumer", memory=lambda: FakeGpuMemory(machine, "d"), tp=tp, **store)
    monkeypatch.setattr(engine_api, "vllm_version", "0.99.0")
    of_p: Any = {"memory": lambda: FakeGpuMemory(machine, "p"), "transposed": is_liar}
    p = vllm_engine.FakeVllm("producer", **of_p)
    try:
        assert serve(p, d, prompt(70)).external == 0
        assert_all_is_back(p, d)
        of_first = dict(d.scheduler._half.connector.metrics.not_received)
        assert of_first == {"unverified": 1}
        assert serve(p, d, prompt(60, 1)).external == (0 if is_liar else 60)
        assert_all_is_back(p, d)
    finally:
        p.close()
        d.close()
    (line,) = [r.getMessage() for r in caplog.records if "first contact" in r.getMessage()]
    assert ("is not ours" in line) == is_liar


def test_memory_that_others_are_in_too_is_not_lent(machine):
    def make() -> FakeGpuMemory:
        memory = FakeGpuMemory(machine, "p")
        memory.others_bytes = 4 << 20
        return memory

    with pytest.raises(UserError, match="other tensors"):
        vllm_engine.FakeVllm("producer", memory=make, transports=["cuda_ipc"])
    of_d = {"memory": lambda: FakeGpuMemory(machine, "d"), "transports": ["cuda_ipc", "tcp"]}
    with vllm_engine.pair({"memory": make, "transports": ["cuda_ipc", "tcp"]}, of_d) as (p, d):
        assert serve(p, d, prompt(50)).external == 50
        assert list(d.scheduler._half.connector.metrics.transfer_s) == ["tcp"]


def test_no_step_follows_when_the_gpu_has_failed(machine):
    machine.is_lost = True
    of_p, of_d = ({"memory": lambda n=n: FakeGpuMemory(machine, n)} for n in "pd")
    with vllm_engine.pair(of_p, of_d) as (p, d):
        first, _ = prefill(p, d, prompt(60))
        machine.broken = "the GPU has fallen off the bus"
        [(_, rank)] = p.ranks
        rank._rank._give_up("the GPU has fallen off the bus")
        with pytest.raises(XpydError, match="fallen off the bus"):
            rank.bind_connector_metadata(worker.StepMetadata())
        machine.broken = ""
        assert first.said is not None


def layout_name(**changes: Any) -> str:
    config = vllm_engine.config_of("kv_producer", port=24099)
    shape, dtype = changes.pop("shape", (2, 1, 8, 16)), changes.pop("dtype", torch.float32)
    for name, value in changes.items():
        setattr(config.cache_config, name, value)
    return worker._layout_name(config, torch.zeros(shape, dtype=dtype), on_gpu=True)


def test_backends_whose_bytes_are_as_the_shape_says_go_with_our_engine_and_others_with_themselves(
    monkeypatch,
):
    assert layout_name() == HEAD_TOKEN_KV
    monkeypatch.setattr(engine_api, "attention_backends", lambda _: ["B12X", "FLASH_ATTN"])
    assert layout_name() == f"vllm-{engine_api.vllm_version} B12X+FLASH_ATTN 8"


def test_a_cache_of_another_backend_on_a_gpu_cannot_be_portable(pair, monkeypatch):
    monkeypatch.setattr(engine_api, "attention_backends", lambda _: ["B12X"])
    with pytest.raises(UserError, match=r"portable.* B12X "), pair({"portable": True}, {}):
        pytest.fail("it has started")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_cache_layout": "LBNHC"}, "LBNHC"),
        ({"cache_dtype": "fp8"}, "scales"),
        ({"dtype": torch.uint8}, "scales"),
        ({"shape": (2, 1, 8, 24)}, "head's size"),
        ({"block_size": 32}, "--block-size 8"),
    ],
)
def test_caches_on_gpus_whose_bytes_are_not_known_are_refused(changes, reason):
    with pytest.raises(UserError, match=reason):
        layout_name(**changes)


def test_a_cache_on_another_device_is_refused():
    with pytest.raises(UserError, match="on meta"):
        open_gpu(torch.zeros(1, device="meta"))


@pytest.mark.parametrize(
    ("transports", "on_gpu", "reason"),
    [
        (("shm",), False, "vLLM allocates"),
        (("tcp", "shm"), True, "vLLM allocates"),
        (("cuda_ipc",), False, "on a GPU"),
        (("nccl",), False, "on a GPU"),
        (("nixl", "tcp"), False, "on a GPU"),
        (("uds", "tcp"), True, "socket_dir"),
        (("nccl", "tcp"), True, "nccl goes alone"),
        (("cuda_ipc", "nixl"), True, "tcp or uds"),
    ],
)
def test_a_transport_that_cannot_move_this_cache_is_refused_by_name(transports, on_gpu, reason):
    with pytest.raises(UserError, match=reason):
        check_transports(transports, on_gpu=on_gpu, socket_dir="")


def test_nothing_lands_in_blocks_that_a_step_under_way_still_reads(machine):
    """The step is on a stream that the I/O thread, which opens landings, does not know."""
    of_p, of_d = ({"memory": lambda n=n: FakeGpuMemory(machine, n)} for n in "pd")
    with vllm_engine.pair(of_p, of_d) as (p, d):
        _, request = prefill(p, d, prompt(60))
        [memory], [caches] = d.memories, d.caches
        memory.run(lambda: None, reads=list(caches.values()))
        d.add(request)
        d.run(p, until=lambda: request.answer is not None)
        assert request.external == 60
        assert d.recomputed == []

"""A worker that loads on a GPU: its cache stands where the transfer can reach it, in each role. The
driver is a fake, and what would run on the GPU runs on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kv.device_fake import Machine
from tests.worker.device_pair import cache_on
from tests.worker.kv_pair import KEY, MIB
from xpyd_core.errors import UserError
from xpyd_kv.memory.device import DeviceView
from xpyd_worker.config import WorkerConfig
from xpyd_worker.load import engine, one_rank
from xpyd_worker.runner import device
from xpyd_worker.runner.gpu_memory import GpuUse, Profile
from xpyd_worker.runner.load import CpuFit, fit_on_cpu

MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
CACHE_BYTES = 4 * MIB


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the runner's loader was given; instead of it the CPU's loads."""
    seen: dict[str, Any] = {}

    class Part:
        """A part on the CPU that fits as one on a GPU does."""

        use = GpuUse(Profile(2**30, 0, 0, 0), 0)

        def __init__(self, fit: CpuFit) -> None:
            self._fit = fit

        def fit(self) -> Part:
            return self

        def make_runner(self, make_memory: Any) -> Any:
            seen["make_memory"] = make_memory
            return self._fit.make_runner(**({"make_memory": make_memory} if make_memory else {}))

    def part_on_gpu(folder: Path, config: Any, **options: Any) -> Any:
        seen.update(options)
        return Part(fit_on_cpu(folder, config, dtype=torch.float32, kv_cache_bytes=CACHE_BYTES))

    monkeypatch.setattr(one_rank, "choose_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(device, "compute_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a fake")
    monkeypatch.setattr(one_rank, "part_on_gpu", part_on_gpu)
    return seen


def load(role: Any, **changes: Any) -> engine.LoadedEngine:
    config = WorkerConfig(
        str(MODEL), role=role, device="cuda", port=1, kv_port=0, kv_host_pool_bytes=MIB, **changes
    )
    return engine.load(
        config, deliver=lambda _: None, keys=(KEY,), incarnation="i", make_store=None
    )


@pytest.mark.parametrize("role", ["Prefill", "Decode"])
def test_the_cache_of_p_and_d_is_the_gpus_and_lent_whole(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], role: str
) -> None:
    machine = Machine()
    cache = cache_on(machine.device(role))
    monkeypatch.setattr(one_rank, "open_cache", lambda *_: cache)
    loaded = load(role)
    assert given["make_memory"] == cache.allocate
    limits = given["limits"]
    assert (limits.kv_overhead_bytes, limits.kv_overhead_percent) == (
        0,
        10 if role == "Decode" else 0,
    )
    assert limits.use_graphs == (role == "Decode")
    assert loaded.kv.gpu is cache
    assert loaded.kv.transports is not None
    assert loaded.kv.transports.paths[0].name == "cuda_ipc"
    store = loaded.kv.connector and loaded.kv.connector.store
    if role == "Decode":
        assert store is not None
        assert [type(region) for region in store.regions] == [DeviceView, memoryview]
        assert sum(map(len, store.regions[:1])) <= CACHE_BYTES // 10
    loaded.kv.close(1.0)
    machine.check()


def test_an_aggregated_engine_keeps_its_cache_with_torch(given: dict[str, Any]) -> None:
    loaded = load("Aggregated")
    assert given["make_memory"] is None
    assert loaded.kv.connector is None
    loaded.kv.close(1.0)


@pytest.mark.parametrize(
    ("given_bytes", "flag"), [(None, "--gpu-memory-utilization"), (MIB, "--kv-cache-memory")]
)
@pytest.mark.usefixtures("given")
def test_a_context_that_does_not_fit_names_the_flag_that_decides_the_caches_size(
    monkeypatch: pytest.MonkeyPatch, given_bytes: int | None, flag: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CACHE_BYTES", MIB // 4)
    with pytest.raises(UserError, match=f"--max-model-len: .* give more {flag} or"):
        load("Aggregated", max_model_len=1024, kv_cache_bytes=given_bytes)

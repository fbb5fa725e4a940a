"""KV between ranks whose caches are on a real GPU: what tests/worker/test_kv_rank_device.py runs
over fakes, as far as one device allows. All ranks share it, each by a device object of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kv.test_ranks_pairs import IDS, engines, is_back, move
from tests.worker.rank_pair import sides_on
from xpyd_kv.memory.device import DeviceView
from xpyd_worker.config import MIB
from xpyd_worker.kv.cache import DeviceCache

pytestmark = pytest.mark.gpu
LAYOUTS = ["tp2-pp2", "tp1-tp4 of 2 heads", "tp2xpp2-tp1"]


class RealHost:
    """The first GPU, for all."""

    def __init__(self) -> None:
        from xpyd_kv.memory.cuda import CudaProcess

        self._process = CudaProcess()

    def cache(self, rank: str) -> DeviceCache:
        from xpyd_kv.memory.cuda import CudaDevice

        return DeviceCache(
            CudaDevice(0, self._process),
            tensor_over=_tensor,
            load_nccl=lambda: pytest.skip("two ranks need two GPUs"),
        )

    def write(self, device: Any, view: DeviceView, data: bytes) -> None:
        # Behind a while of other work on the model's stream, as a layer's KV stands.
        torch.cuda._sleep(100_000)
        _tensor(view).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).pin_memory())

    def read(self, device: Any, view: DeviceView) -> bytes:
        return _tensor(view).cpu().numpy().tobytes()

    def check(self) -> None:
        """The driver would have failed by now."""


def _tensor(view: DeviceView) -> torch.Tensor:
    from xpyd_kv.memory.cuda import tensor_over

    return tensor_over(view, (len(view),), torch.uint8)


@pytest.fixture
def host() -> Iterator[RealHost]:
    yield RealHost()
    # Work that failed late is this test's fault.
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("transport", ["tcp", "uds", "cuda_ipc"])
def test_every_byte_arrives_over_every_transport(
    tmp_path: Path, host: RealHost, name: str, transport: str
) -> None:
    hosts = {"P": host, "D": host}
    with sides_on(hosts, *engines(name), tmp_path, kv_transports=(transport,)) as (p, d):
        for number in range(1, 4):
            landed = move(p, d, number=number)
            assert d.holds(landed.block_ids, IDS[0], len(IDS))
            d.pool.release(landed.block_ids)
        assert is_back(p.pool)
        assert is_back(d.pool)
        assert set(d.kv.metrics.transfer_s) == {transport}


@pytest.mark.parametrize("where", ["buffer", "pool"])
@pytest.mark.parametrize("on_gpu", ["PD", "P", "D"])
def test_what_lands_beside_the_cache_is_copied_in(
    tmp_path: Path, host: RealHost, on_gpu: str, where: str
) -> None:
    sizes = {"kv_buffer_bytes": MIB if where == "buffer" else 0, "kv_host_pool_bytes": MIB}
    hosts = dict.fromkeys(on_gpu, host)
    layouts = engines("tp2-pp2")
    with sides_on(hosts, *layouts, tmp_path, kv_direct_free=1.0, **sizes) as (p, d):
        landed = move(p, d)
        assert d.holds(landed.block_ids, IDS[0], len(IDS))
        assert d.kv.metrics.landings == {where: 1}

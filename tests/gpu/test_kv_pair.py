"""A prompt computed by one engine goes on in another, both with their KV cache on a real GPU: what
tests/worker/test_kv_device_pair.py runs over fakes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.models import make_model, model_config, shape_of
from tests.worker.kv_pair import Instance, alone, answers, moved, over, settings
from xpyd_worker.kv.cache import DeviceCache, warm_up
from xpyd_worker.runner.device import CudaDevice
from xpyd_worker.runner.kv_cache import KvCache, cache_bytes
from xpyd_worker.runner.runner import ModelRunner

pytestmark = pytest.mark.gpu
BLOCKS = 64
TOKENS = 8
LENGTHS = (5, 16, 90, 41)
DEVICE = torch.device("cuda", 0)
Make = Callable[..., Instance]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes instances on the first GPU, by two devices of this process, which may open each other's
    memory."""
    from xpyd_kv.memory import cuda

    config = model_config("llama", max_position_embeddings=512)
    shape = shape_of(config, torch.float32)
    process = cuda.CudaProcess()
    made: list[Instance] = []

    def one(role: str, **fields: Any) -> Instance:
        steps = CudaDevice(DEVICE)
        with steps.use():
            kernels, layers = steps.kernels(), config.num_layers
            model = make_model(config, kernels, DEVICE, torch.float32)
            size = cache_bytes(shape, num_layers=layers, num_blocks=BLOCKS)
            device = cuda.CudaDevice(0, process)
            warm_up(device)
            gpu = DeviceCache(
                device,
                tensor_over=lambda view: cuda.tensor_over(view, (len(view),), torch.uint8),
                load_nccl=lambda: pytest.skip("two ranks need two GPUs"),
            )
            cache = KvCache(shape, num_layers=layers, num_blocks=BLOCKS, memory=gpu.allocate(size))
        memory = gpu.paged(cache.layers, layers=range(layers))
        made.append(
            Instance(
                settings(role, kv_socket_dir=tmp_path, **fields),
                ModelRunner(model, config, kernels, cache, device=steps),
                memory=memory,
                cache=memory.regions,
                gpu=gpu,
            )
        )
        return made[-1].start()

    yield one
    for instance in made:
        instance.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(211) for _ in range(length)] for length in LENGTHS]


def by_one(p: Instance, prompts: list[list[int]]) -> list[list[int]]:
    """What the same model makes of them without a transfer."""
    numbers = range(100, 100 + len(prompts))
    for number, prompt in zip(numbers, prompts, strict=True):
        p.submit(alone(number, prompt, TOKENS))
    return [p.tokens(number) for number in numbers]


@pytest.mark.parametrize("mode", ["put_async", "put", "get"])
@pytest.mark.parametrize("transport", ["tcp", "uds", "cuda_ipc"])
def test_a_prompt_goes_on_in_another_engine(
    make: Make, prompts: list[list[int]], transport: str, mode: str
) -> None:
    p, d = (make(role, kv_transports=(transport,), kv_mode=mode) for role in ("Prefill", "Decode"))
    found = answers(p, d, prompts, TOKENS)
    assert found == by_one(p, prompts)
    where = "pulled" if mode == "get" else "direct"
    assert moved(d) == {where: len(LENGTHS), "tokens": sum(LENGTHS)}
    assert over(d) == [transport]


@pytest.mark.parametrize("where", ["buffer", "pool"])
def test_kv_that_landed_beside_the_cache_is_copied_in(
    make: Make, prompts: list[list[int]], where: str
) -> None:
    sizes = {"kv_buffer_bytes": 8 * 2**20 if where == "buffer" else 0}
    p, d = (make(role, kv_direct_free=1.0, **sizes) for role in ("Prefill", "Decode"))
    assert answers(p, d, prompts, TOKENS) == by_one(p, prompts)
    assert moved(d) == {where: len(LENGTHS), "tokens": sum(LENGTHS)}

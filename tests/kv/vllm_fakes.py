"""What a fake of vLLM's engine is made of: requests, blocks, "model", memory, configurations."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

import torch

from xpyd_core.blocks import block_hashes
from xpyd_core.request_id import pair_id_text

if TYPE_CHECKING:
    from xpyd_kv.vllm.gpu import Gpu

MODEL = Path(__file__).parents[2] / "examples/demo-model"
HEADS, HEAD_DIM, LAYERS = 4, 8, 4
# Test processes that run at once have addresses of their own.
HOST = f"127.0.{61 + os.getpid() // 250 % 100}.{1 + os.getpid() % 250}"


class Status(Enum):
    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5


@dataclass(eq=False)
class FakeRequest:
    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: Any = None
    status: Status = Status.WAITING
    num_output_tokens: int = 0
    lora_request: object = None
    mm_features: tuple[()] = ()
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    answer: int | None = None
    external: int = 0
    said: dict[str, Any] | None = None


@dataclass(frozen=True)
class FullAttentionSpec:
    """As vLLM's, which has many members more."""

    block_size: int = 8
    sliding_window: int | None = None


class RSWASpec(FullAttentionSpec): ...


@dataclass(frozen=True)
class SlidingWindowSpec:
    block_size: int = 8
    sliding_window: int = 32


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec:
    block_size: int = 8
    attention_chunk_size: int = 32


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any]


def groups_of(*specs: Any) -> Any:
    """The model's KV cache groups; without specs one of full attention."""
    groups = [
        SimpleNamespace(layer_names=["model.layers.0.self_attn.attn"], kv_cache_spec=spec)
        for spec in specs or (FullAttentionSpec(),)
    ]
    return SimpleNamespace(kv_cache_groups=groups)


class FakePool:
    """vLLM's BlockPool: references, a free queue, a prefix cache. Block 0 is never used."""

    def __init__(self, num_blocks: int, block_size: int, caches: bool) -> None:
        self.num_gpu_blocks = num_blocks
        self.block_size = block_size
        self.caches = caches
        self.blocks = [SimpleNamespace(id=block, refs=0) for block in range(num_blocks)]
        self.free = deque(range(1, num_blocks))
        self.cached: dict[bytes, int] = {}

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            if not block.refs:
                self.free.remove(block.id)
            block.refs += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            block.refs -= 1
            assert block.refs >= 0, f"block {block.id} is freed too often"
            if not block.refs:
                self.free.append(block.id)

    def take(self, number: int) -> list[int]:
        ids = [self.free.popleft() for _ in range(number)]
        self.cached = {key: block for key, block in self.cached.items() if block not in ids}
        for block in ids:
            self.blocks[block].refs = 1
        return ids

    def lookup(self, tokens: list[int]) -> list[int]:
        found: list[int] = []
        if self.caches:
            whole = (len(tokens) - 1) // self.block_size
            for key in block_hashes(tokens, block_size=self.block_size)[:whole]:
                if key not in self.cached:
                    break
                found.append(self.cached[key])
        return found

    def remember(self, tokens: list[int], blocks: list[int]) -> None:
        if self.caches:
            keys = block_hashes(tokens, block_size=self.block_size)
            for key, block in zip(keys, blocks, strict=False):
                self.cached.setdefault(key, block)


def kv_of(tokens: list[int]) -> torch.Tensor:
    """[layer, head, token, 2 * head_dim]: what the model writes."""
    running, marks = 1, []
    for token in tokens:
        running = (running * 31 + token) % 9973
        marks.append(running)
    base = torch.tensor(marks, dtype=torch.float32)[None, None, :, None]
    layer = torch.arange(LAYERS, dtype=torch.float32)[:, None, None, None] * 10_000
    head = torch.arange(HEADS, dtype=torch.float32)[None, :, None, None] * 100_000
    return base + layer + head + torch.arange(2 * HEAD_DIM, dtype=torch.float32) / 16


def answer_of(kv: torch.Tensor) -> int:
    """The next token, from all KV of a prompt."""
    weights = torch.arange(1, kv.shape[2] + 1, dtype=torch.float64)[None, None, :, None] % 17
    return int((kv.double() * weights).sum().item()) % 99_991


def config_of(
    role: str,
    *,
    port: int,
    tp: int = 1,
    pp: int = 1,
    block_size: int = 8,
    policy: str = "recompute",
    model: Path = MODEL,
    overrides: Mapping[str, Any] | None = None,
    quantization: str | None = None,
    rope: Mapping[str, Any] | None = None,
    max_model_len: int = 4096,
    **extra: Any,
) -> Any:
    """What vLLM gives to a connector. `overrides`: its `--hf-overrides`. `rope`: what it has
    read of the rotary embedding."""
    given = {
        "host": HOST,
        "insecure": True,
        "accept_unsigned_pairs": True,
        "group_bytes": 1,
        **extra,
    }
    transfer = SimpleNamespace(
        kv_connector="XpydConnector",
        kv_role=role,
        kv_port=port,
        engine_id=str(uuid4()),
        kv_load_failure_policy=policy,
        kv_connector_extra_config=given,
    )
    model_config = SimpleNamespace(
        model=str(model),
        tokenizer=str(model),
        hf_config_path=None,
        hf_overrides=overrides or {},
        hf_text_config=SimpleNamespace(rope_parameters=rope),
        quantization=quantization,
        quantization_config=None,
        served_model_name="demo-model",
        max_model_len=max_model_len,
        dtype=torch.float32,
        logits_processors=None,
        get_diff_sampling_param=dict,
        use_mla=False,
        enable_sleep_mode=False,
        get_head_size=lambda: HEAD_DIM,
        get_vocab_size=lambda: 4096,
        get_total_num_kv_heads=lambda: HEADS,
        get_total_num_hidden_layers=lambda: LAYERS,
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        nnodes=1,
        enable_dbo=False,
        ubatch_size=0,
        distributed_executor_backend="mp",
    )
    cache = SimpleNamespace(
        block_size=block_size,
        cache_dtype="auto",
        kv_cache_layout="LBHNC",
        enable_prefix_caching=True,
    )
    return SimpleNamespace(
        model_config=model_config, parallel_config=parallel, cache_config=cache,
        speculative_config=None, watermark_config=None, kv_transfer_config=transfer,
        instance_id="12345", shutdown_timeout=30.0,
    )  # fmt: skip


def ids(
    p: Any, d: Any, *, is_chat: bool = False, index: int = 0, uuid: str = ""
) -> tuple[str, str]:
    """The ids of one prompt at P and at D, as vLLM's API server makes them."""
    pair_id = pair_id_text(f"{HOST}:{p.port}", f"{HOST}:{d.port}", uuid or uuid4().hex)
    name = f"chatcmpl-{pair_id}" if is_chat else f"cmpl-{pair_id}-{index}"
    return f"{name}-1a2b3c4d", f"{name}-99aabb01"


class CacheMemory(Protocol):
    """Where a rank of a fake vLLM has its KV cache, and the stream that its "model" runs on."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Flat zeros, uint8."""
        ...

    def open_gpu(self, tensor: torch.Tensor) -> Gpu | None: ...

    def model(self) -> Any:
        """A context in which the thread is vLLM's, with the model's stream."""
        ...

    def run(
        self, call: Callable[[], None], *, reads: Sequence[Any] = (), writes: Sequence[Any] = ()
    ) -> None:
        """The model does this now, or when its stream comes to it, with these pieces of tensors."""
        ...

    def finish(self) -> None:
        """Wait for what the model has enqueued."""
        ...

    def close(self) -> None: ...


class HostMemory:
    """Ordinary memory: the model's calls have returned when it has written."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def open_gpu(self, tensor: torch.Tensor) -> Gpu | None:
        # vLLM, or what stands for it, is installed by now.
        from xpyd_kv.vllm.gpu import open_gpu

        return open_gpu(tensor)

    @contextmanager
    def model(self) -> Iterator[None]:
        yield

    def run(self, call: Any, *, reads: Any = (), writes: Any = ()) -> None:
        call()

    def finish(self) -> None: ...

    def close(self) -> None: ...

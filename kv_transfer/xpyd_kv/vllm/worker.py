"""A rank's half of the connector: its cache, what of it is sent, and what lands there.

In the process of one vLLM worker, also where it is the only one. The I/O thread of `part.endpoint`
moves the bytes; vLLM's thread calls the methods here. The scheduler's half says by each step's
metadata what the step computes, and which loads are over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from xpyd_core.compat import HEAD_TOKEN_KV, compat_factors, rope_parts, transposed_k
from xpyd_core.errors import UserError, XpydError
from xpyd_core.request_id import Address
from xpyd_kv.memory.paged import PagedMemory, TransposedMemory, turn
from xpyd_kv.memory.space import OwnSpace
from xpyd_kv.metrics import EndpointCounters
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.ranks.agent import StepSender
from xpyd_kv.ranks.build import build_rank
from xpyd_kv.transport.api import Handler
from xpyd_kv.transport.devices.paths import Transports, transports_for_gpu
from xpyd_kv.transport.endpoint import TcpEndpoint
from xpyd_kv.transport.settings import Identity
from xpyd_kv.values import KvLayout
from xpyd_kv.vllm import engine_api
from xpyd_kv.vllm.channel import RankChannel, Turns
from xpyd_kv.vllm.engine_api import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    VllmConfig,
)
from xpyd_kv.vllm.gpu import (
    Gpu,
    OpenGpu,
    VllmDeviceMemory,
    check_transports,
    device_memory,
    lendable,
    open_device,
    open_gpu,
)
from xpyd_kv.vllm.options import Options, incarnation_of, model_name, role_of
from xpyd_kv.wire.fit import wire_layout

if TYPE_CHECKING:
    from xpyd_kv.vllm.engine_api import Tensor

_CLOSE_S = 2.0
_HEAD_MAJOR = "LBHNC"
_PLAIN = ("bfloat16", "float16", "float32")
# In vLLM 0.32 and 0.33 these split what the shape says at the head's size into K and V, and write
# through the strides of the two parts.
_AS_THE_SHAPE_SAYS = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"}


@dataclass(kw_only=True)
class RankFacts(KVConnectorHandshakeMetadata):
    """What the scheduler's half must know of a rank."""

    channel: str
    address: str
    """Where a D's rank takes connections; '' on P."""
    kv_heads: int
    tp: int
    stages: tuple[tuple[int, ...], ...]
    block_size: int
    row_bytes: int
    head_dim: int
    dtype: str
    factors: dict[str, str]
    gpu: str = ""
    """The uuid of the GPU that has the rank's cache; '' for one on a CPU."""

    @property
    def engine(self) -> EngineLayout:
        """The layout of all ranks' caches together."""
        return EngineLayout(
            kv_heads=self.kv_heads,
            tp=self.tp,
            stages=self.stages,
            block_size=self.block_size,
            row_bytes=self.row_bytes,
        )


class Loaded(NamedTuple):
    """A request of a D whose KV is in these blocks."""

    request_id: str
    blocks: tuple[int, ...]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler's half with each step. `chunks` None: a step without a forward; else what
    P's ranks send of it. `is_moving`: KV is on its way. `landed` and `lost`: requests of a D whose
    loads are over, and where the KV is."""

    chunks: bytes | None = None
    is_moving: bool = False
    landed: list[Loaded] = field(default_factory=list["Loaded"])
    lost: list[str] = field(default_factory=list[str])


@dataclass
class StepsDone(KVConnectorWorkerMetadata):
    """How many steps are over on P's ranks, which all do the same."""

    steps: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return what all ranks say alike."""
        return self


class RankHalf:
    """What one rank has of the transfer, from `register_kv_caches` on."""

    def __init__(
        self, config: VllmConfig, options: Options, *, open_gpu: OpenGpu = open_gpu
    ) -> None:
        self._config = config
        self._options = options
        self._open_gpu = open_gpu
        # The cache, where that is on a GPU.
        self._gpu_memory: VllmDeviceMemory | None = None
        self._transports: Transports | None = None
        self._space: OwnSpace | None = None
        # Why no step may follow.
        self._device_failure = ""
        self._role: Literal["P", "D"] = role_of(config)
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._steps = 0
        self._in_step = False
        self._is_moving = False
        self._turns: Turns | None = None
        self._layers: dict[str, int] = {}
        # D's caches, where blocks that have landed are token by token, and vLLM's are not.
        self._caches_to_turn: list[Tensor] = []
        self._sender: StepSender | None = None
        self._channel = RankChannel()
        self._endpoint: TcpEndpoint | None = None
        self.facts: RankFacts | None = None

    # --- start and end

    def register(self, caches: Mapping[str, Tensor]) -> None:
        """Take the caches and start the I/O thread. UserError for caches whose bytes have no name
        here, and for a port that is taken."""
        names = sorted(caches, key=engine_api.extract_layer_index)
        indices = [engine_api.extract_layer_index(name) for name in names]
        tensors = [caches[name] for name in names]
        options = self._options
        gpu = open_device(self._open_gpu, tensors[0])
        check_transports(options.transports, on_gpu=gpu is not None, socket_dir=options.socket_dir)
        layout_name = _layout_name(self._config, tensors[0], on_gpu=gpu is not None)
        if options.portable:
            _check_portable(layout_name, tensors[0].shape[2], on_gpu=gpu is not None)
        if gpu is None:
            memory = self._memory(tensors, indices, layout_name)
            transports = Transports(options.settings.frames)
        else:
            memory = self._gpu_memory = device_memory(gpu, tensors, indices)
            transports = self._gpu_transports(gpu, memory)
        self._transports = transports
        layout, config = memory.layout, self._config
        engine = _engine_layout(config, layout, indices)
        rank = engine_api.pipeline_rank() * engine.tp + engine_api.tensor_rank()
        sent_layout = HEAD_TOKEN_KV if options.portable else layout_name
        factors = _factors(config, options, kv_dtype=layout.dtype, kv_layout=sent_layout)
        transfer = config.kv_transfer_config
        listen = Address(options.host, transfer.kv_port + 1 + rank) if self._role == "D" else None
        counters = EndpointCounters()

        def make_endpoint(handler: Handler) -> TcpEndpoint:
            return TcpEndpoint(
                handler,
                counters=counters,
                identity=Identity(
                    transfer.engine_id,
                    incarnation_of(config),
                    self._role,
                    rank=rank,
                    host=transports.host,
                    gpu=transports.gpu,
                ),
                layout=wire_layout(
                    layout,
                    factors=factors,
                    max_tokens=memory.num_blocks * layout.block_size,
                    max_data_bytes=transports.max_data_bytes,
                    engine=engine,
                ),
                keys=options.keys,
                takes="ranks",
                listen=listen,
                source_host=options.host,
                transports=options.transports,
                socket_dir=Path(options.socket_dir) if options.socket_dir else None,
                paths=transports.paths,
                staging=transports.staging,
                encrypted=options.is_encrypted,
            )

        part = build_rank(
            self._role,
            channel=self._channel,
            make_endpoint=make_endpoint,
            memory=memory,
            engine=engine,
            settings=replace(options.settings, frames=transports.frames),
            give_up=self._give_up,
            counters=counters,
        )
        self._space = part.space
        part.endpoint.start()
        assert isinstance(part.endpoint, TcpEndpoint)
        self._endpoint, self._sender = part.endpoint, part.sender
        self._turns = Turns(part.endpoint)
        self._layers = {name: at for at, name in enumerate(names)}
        self.facts = RankFacts(
            channel=self._channel.name,
            address=str(listen or ""),
            kv_heads=engine.kv_heads,
            tp=engine.tp,
            stages=engine.stages,
            block_size=engine.block_size,
            row_bytes=engine.row_bytes,
            head_dim=layout.head_dim,
            dtype=layout.dtype,
            factors=factors,
            gpu=transports.gpu,
        )

    def _gpu_transports(self, gpu: Gpu, memory: VllmDeviceMemory) -> Transports:
        options, is_p = self._options, self._role == "P"
        return transports_for_gpu(
            options.transports,
            memory,
            is_p=is_p,
            group_bytes=options.settings.frames.group_bytes,
            lends=lendable(gpu, memory, options.transports) if is_p else None,
            load_nccl=gpu.load_nccl,
            landings=lambda: () if self._space is None else self._space.regions,
            give_up=self._give_up,
        )

    def _give_up(self, reason: str) -> None:
        """Any thread. What the GPU still writes to is not known any more: vLLM must end."""
        engine_api.log().error("the KV transfer has failed: %s", reason)
        self._device_failure = self._device_failure or reason

    def _memory(self, tensors: list[Tensor], layers: list[int], name: str) -> PagedMemory:
        """The caches, which are on a CPU, as the transfer sees them."""
        if not self._options.portable or name == HEAD_TOKEN_KV:
            kept = name == transposed_k(tensors[0].shape[2])
            return PagedMemory(tensors, layers=layers, is_transposed=kept, lands_transposed=kept)
        if self._role == "P":
            return TransposedMemory(tensors, layers=layers)
        self._caches_to_turn = tensors
        return PagedMemory(tensors, layers=layers, is_transposed=True)

    def close(self) -> None:
        """End the I/O thread and the channel's."""
        if self._endpoint is not None:
            is_over = self._endpoint.close(_CLOSE_S)
            if is_over and self._transports is not None:
                self._transports.close(self._space, deadline_s=_CLOSE_S)
            self._endpoint = None
        self._channel.close()

    # --- a step, on vLLM's thread

    def begin_step(self, metadata: KVConnectorMetadata) -> None:
        """The step's metadata has come, before its forward. XpydError when the GPU has failed:
        vLLM ends with it."""
        assert isinstance(metadata, StepMetadata)
        if self._device_failure:
            raise XpydError(f"the KV transfer has failed: {self._device_failure}")
        if self._gpu_memory is not None:
            self._gpu_memory.follow()
        for loaded in metadata.landed:
            turn(self._caches_to_turn, loaded.blocks)
            self._finished.add(loaded.request_id)
        self._finished.update(metadata.lost)
        self._failed.update(metadata.lost)
        self._in_step = metadata.chunks is not None
        self._is_moving = metadata.is_moving
        if self._sender is not None and metadata.chunks is not None:
            self._sender.begin_step(metadata.chunks)

    def layer_done(self, name: str) -> None:
        """A layer of the forward is in the cache. Hot path."""
        if self._sender is not None and self._in_step:
            if self._gpu_memory is not None:
                # The layer is enqueued, not computed: what is sent waits for an event behind it.
                self._gpu_memory.follow()
            self._sender.layer_done(self._layers[name])

    def end_step(self) -> None:
        """The forward is over."""
        if self._in_step:
            self._in_step = False
            self._steps += 1
            if self._sender is not None:
                self._sender.step_done(failed=False)

    def results(self) -> KVConnectorTransferResults:
        """The loads that are over, once."""
        if self._turns is not None:
            self._turns.give(is_moving=self._is_moving)
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(set(), finished, failed)

    def steps_done(self) -> StepsDone | None:
        """How many steps are over since the last call; None: none, or D's."""
        steps, self._steps = self._steps, 0
        return StepsDone(steps) if steps and self._sender is not None else None


def _layout_name(config: VllmConfig, tensor: Tensor, *, on_gpu: bool) -> str:
    """The name of what the bytes are. UserError for caches whose bytes are not known."""
    layout = config.cache_config.kv_cache_layout
    if layout != _HEAD_MAJOR:
        raise UserError(f"XpydConnector: KV cache layout {layout}; {_HEAD_MAJOR} is supported")
    _check_dtype(config, tensor)
    if on_gpu:
        return _layout_on_gpu(config, tensor)
    _, _, block_size, width = tensor.shape
    isa = engine_api.cpu_isa(config, block_size, width // 2)
    if isa == "vec":
        return transposed_k(block_size)
    # Known to be read and written by the same kernels only.
    return f"vllm-{engine_api.vllm_version} {isa} {block_size}"


def _check_dtype(config: VllmConfig, tensor: Tensor) -> None:
    """UserError for a cache whose dtype does not say what its numbers are."""
    dtype, given = str(tensor.dtype).removeprefix("torch."), config.cache_config.cache_dtype
    if dtype not in _PLAIN or given not in (*_PLAIN, "auto"):
        raise UserError(
            f"XpydConnector: --kv-cache-dtype {given} ({dtype}): the scales of such a cache do not "
            "move with it; give auto, or the model's own dtype"
        )


def _check_portable(layout_name: str, block_size: int, *, on_gpu: bool) -> None:
    """UserError for caches whose KV cannot be sent token by token: it is not known how, or on a GPU
    nothing turns it."""
    if layout_name == HEAD_TOKEN_KV or (not on_gpu and layout_name == transposed_k(block_size)):
        return
    where = "a GPU" if on_gpu else "a CPU"
    raise UserError(
        f"XpydConnector: portable: not with a KV cache of layout {layout_name!r} on {where}; "
        "leave portable out"
    )


def _layout_on_gpu(config: VllmConfig, tensor: Tensor) -> str:
    cache, head_size = config.cache_config, config.model_config.get_head_size()
    _, _, block_size, width = tensor.shape
    if width != 2 * head_size:
        raise UserError(
            f"XpydConnector: a KV cache of {width} numbers for each token of a head of {head_size};"
            " K and V of the head's size are supported"
        )
    if block_size != cache.block_size:
        raise UserError(
            f"XpydConnector: vLLM's blocks of {cache.block_size} tokens are blocks of {block_size} "
            f"to its kernels; give --block-size {block_size}"
        )
    backends = engine_api.attention_backends(config)
    if set(backends) <= _AS_THE_SHAPE_SAYS:
        return HEAD_TOKEN_KV
    # Known to be read and written by the same kernels only.
    return f"vllm-{engine_api.vllm_version} {'+'.join(sorted(backends))} {block_size}"


def _engine_layout(config: VllmConfig, layout: KvLayout, layers: list[int]) -> EngineLayout:
    """All ranks' caches together; `layout` and `layers` are this rank's. UserError: see _stages."""
    return EngineLayout(
        kv_heads=config.model_config.get_total_num_kv_heads(),
        tp=config.parallel_config.tensor_parallel_size,
        stages=_stages(config, layers),
        block_size=layout.block_size,
        row_bytes=layout.block_bytes // (layout.kv_heads * layout.block_size),
    )


def _factors(
    config: VllmConfig, options: Options, *, kv_dtype: str, kv_layout: str
) -> dict[str, str]:
    model = config.model_config
    factors = compat_factors(
        Path(model.model),
        model=model_name(config),
        revision="",
        kv_dtype=kv_dtype,
        kv_layout=kv_layout,
        overrides=model.hf_overrides,
        tokenizer=Path(model.tokenizer),
        encrypted=options.is_encrypted,
    )
    # Of a checkpoint that is quantized the bytes say it; another engine need not have a name.
    quantization = "" if "quantization_config" in factors else model.quantization or ""
    if model.quantization_config is not None:
        digest = sha256(repr(model.quantization_config).encode()).hexdigest()[:16]
        quantization = f"{quantization} {digest}"
    if quantization:
        factors["quantization"] = quantization
    if _is_long_rope(config):
        factors["long_rope"] = "true"
    return factors


def _is_long_rope(config: VllmConfig) -> bool:
    """Whether positions are rotated by the factors for long contexts: where requests may be longer
    than what the model was first trained for, vLLM takes them for short ones, too."""
    model = config.model_config
    found = rope_parts(getattr(model.hf_text_config, "rope_parameters", None))
    return any(
        part.get("rope_type") == "longrope"
        and model.max_model_len > part["original_max_position_embeddings"]
        for part in found
    )


def _stages(config: VllmConfig, own: list[int]) -> tuple[tuple[int, ...], ...]:
    """The layers of each pipeline stage; `own` are this rank's. UserError where they differ from
    what vLLM says of its stages: layers without a KV cache."""
    stages = config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return (tuple(own),)
    total = config.model_config.get_total_num_hidden_layers()
    cuts = [engine_api.stage_layers(total, stage, stages) for stage in range(stages)]
    found = tuple(tuple(range(first, end)) for first, end in cuts)
    if found[engine_api.pipeline_rank()] != tuple(own):
        raise UserError("XpydConnector: with pipeline stages every layer must have a KV cache")
    return found

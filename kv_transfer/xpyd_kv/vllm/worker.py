"""A rank's half of the connector: its cache, what of it is sent, and what lands there.

In the process of one vLLM worker, also where it is the only one. The I/O thread of `part.endpoint`
moves the bytes; vLLM's thread calls the methods here. The scheduler's half says by each step's
metadata what the step computes, and which loads are over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from xpyd_core.compat import HEAD_TOKEN_KV, compat_factors, transposed_k
from xpyd_core.errors import UserError
from xpyd_core.request_id import Address
from xpyd_kv.memory.paged import PagedMemory, TransposedMemory, turn
from xpyd_kv.metrics import EndpointCounters
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.ranks.agent import StepSender
from xpyd_kv.ranks.build import build_rank
from xpyd_kv.transport.api import Handler
from xpyd_kv.transport.endpoint import TcpEndpoint
from xpyd_kv.transport.settings import Identity
from xpyd_kv.vllm import engine_api
from xpyd_kv.vllm.channel import RankChannel, Turns
from xpyd_kv.vllm.engine_api import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    VllmConfig,
)
from xpyd_kv.vllm.options import Options, incarnation_of, model_name, role_of
from xpyd_kv.wire.fit import wire_layout

if TYPE_CHECKING:
    from xpyd_kv.vllm.engine_api import Tensor

_CLOSE_S = 2.0
_HEAD_MAJOR = "LBHNC"


@dataclass
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

    def __init__(self, config: VllmConfig, options: Options) -> None:
        self._config = config
        self._options = options
        self._role: Literal["P", "D"] = role_of(config)
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._steps = 0
        self._in_step = False
        self._is_moving = False
        self._turns: Turns | None = None
        self._layers: dict[str, int] = {}
        # D's caches whose blocks are not as they came.
        self._to_turn: list[Tensor] = []
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
        layout_name = _layout_name(self._config, tensors[0])
        memory = self._memory(tensors, indices, layout_name)
        layout, config = memory.layout, self._config
        engine = EngineLayout(
            kv_heads=config.model_config.get_total_num_kv_heads(),
            tp=config.parallel_config.tensor_parallel_size,
            stages=_stages(config, indices),
            block_size=layout.block_size,
            row_bytes=layout.block_bytes // (layout.kv_heads * layout.block_size),
        )
        rank = engine_api.pipeline_rank() * engine.tp + engine_api.tensor_rank()
        factors = compat_factors(
            Path(config.model_config.model),
            model=model_name(config),
            revision="",
            kv_dtype=layout.dtype,
            kv_layout=HEAD_TOKEN_KV if self._options.portable else layout_name,
        )
        options, transfer = self._options, config.kv_transfer_config
        listen = Address(options.host, transfer.kv_port + 1 + rank) if self._role == "D" else None
        counters = EndpointCounters()

        def make_endpoint(handler: Handler) -> TcpEndpoint:
            return TcpEndpoint(
                handler,
                counters=counters,
                identity=Identity(
                    transfer.engine_id, incarnation_of(config), self._role, rank=rank
                ),
                layout=wire_layout(
                    layout,
                    factors=factors,
                    max_tokens=memory.num_blocks * layout.block_size,
                    engine=engine,
                ),
                keys=options.keys,
                takes="ranks",
                listen=listen,
                source_host=options.host,
                transports=options.transports,
                socket_dir=Path(options.socket_dir) if options.socket_dir else None,
            )

        part = build_rank(
            self._role,
            channel=self._channel,
            make_endpoint=make_endpoint,
            memory=memory,
            engine=engine,
            settings=options.settings,
            give_up=lambda reason: engine_api.log().error("the KV transfer has failed: %s", reason),
            counters=counters,
        )
        part.endpoint.start()
        assert isinstance(part.endpoint, TcpEndpoint)
        self._endpoint, self._sender = part.endpoint, part.sender
        self._turns = Turns(part.endpoint)
        self._layers = {name: at for at, name in enumerate(names)}
        self.facts = RankFacts(
            self._channel.name,
            str(listen or ""),
            engine.kv_heads,
            engine.tp,
            engine.stages,
            engine.block_size,
            engine.row_bytes,
            layout.head_dim,
            layout.dtype,
            factors,
        )

    def _memory(self, tensors: list[Tensor], layers: list[int], name: str) -> PagedMemory:
        """The caches as the transfer sees them. UserError where they should be portable, and it is
        not known how."""
        if not self._options.portable or name == HEAD_TOKEN_KV:
            return PagedMemory(tensors, layers=layers)
        if name != transposed_k(tensors[0].shape[2]):
            raise UserError(f"XpydConnector: portable: caches of layout {name!r} are not known")
        if self._role == "P":
            return TransposedMemory(tensors, layers=layers)
        self._to_turn = tensors
        return PagedMemory(tensors, layers=layers)

    def close(self) -> None:
        """End the I/O thread and the channel's."""
        if self._endpoint is not None:
            self._endpoint.close(_CLOSE_S)
        self._channel.close()

    # --- a step, on vLLM's thread

    def begin_step(self, metadata: KVConnectorMetadata) -> None:
        """The step's metadata has come, before its forward."""
        assert isinstance(metadata, StepMetadata)
        for loaded in metadata.landed:
            turn(self._to_turn, loaded.blocks)
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


def _layout_name(config: VllmConfig, tensor: Tensor) -> str:
    """The name of what the bytes are. UserError for caches whose bytes are not known."""
    if tensor.device.type != "cpu":
        raise UserError(
            f"XpydConnector: a KV cache on {tensor.device.type} is not supported; on a CPU it is"
        )
    layout = config.cache_config.kv_cache_layout
    if layout != _HEAD_MAJOR:
        raise UserError(f"XpydConnector: KV cache layout {layout}; {_HEAD_MAJOR} is supported")
    _, _, block_size, width = tensor.shape
    isa = engine_api.cpu_isa(tensor.dtype, block_size, width // 2)
    if isa == "vec":
        return transposed_k(block_size)
    # Known to be read and written by the same kernels only.
    return f"vllm-{engine_api.vllm_version} {isa} {block_size}"


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

"""The worker's configuration: one frozen value, read once by `command`, passed down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from xpyd_core.blocks import DEFAULT_BLOCK_SIZE
from xpyd_core.messages import HEARTBEAT_PERIOD_S
from xpyd_core.parallel.ranks import Sizes, replica_kv_port
from xpyd_core.pod_env import HTTP_PORT, KV_PORT, rendezvous_port
from xpyd_core.request_id import Address
from xpyd_core.tls import ServerFiles
from xpyd_kv.transport.settings import TRANSPORTS
from xpyd_kv.wire.messages import Mode
from xpyd_worker.engine.eplb import EplbConfig
from xpyd_worker.engine.request import Policy
from xpyd_worker.engine.speculation import SpeculativeConfig
from xpyd_worker.engine.step_times import LatencyGoal

Role = Literal["Prefill", "Decode", "Aggregated"]
OnRankLoss = Literal["end", "continue"]
# Each divides the larger ones, so that any P fits any D.
BLOCK_SIZES = (8, 16, 32, 64)
DTYPES = ("auto", "float32", "bfloat16", "float16")
# On a CPU a forward of 2,048 tokens takes seconds, for which every running decode waits.
AUTO_BATCHED_TOKENS = 512
# On a GPU it takes a tenth of a second, and fewer tokens would leave it idle.
AUTO_BATCHED_TOKENS_GPU = 2048
GIB = 1024**3
MIB = 1024**2
CPU_CACHE_BYTES = GIB
"""KV cache of an engine on a CPU without --kv-cache-memory."""


@dataclass(frozen=True)
class WorkerConfig:
    """What `xpyd worker` runs with."""

    model: str
    """Checkpoint: a folder, file:///folder or hf://organisation/name."""
    revision: str | None = None
    """Branch, tag or commit of an hf:// checkpoint."""
    served_model_names: tuple[str, ...] = ()
    """Names that requests may use; empty: the checkpoint's own."""
    device: str = "auto"
    """`cpu`, `cuda` (the first) or `cuda:N`; `auto`: a GPU where one can be used."""
    dtype: str = "auto"
    """`auto`: the checkpoint's, widened to float32 where the CPU is slow in 16 bits."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; None: the checkpoint's."""
    max_num_seqs: int = 256
    """Sequences in the running batch."""
    max_num_batched_tokens: int | None = None
    """Tokens of one forward: what a running decode waits for at most between two of its tokens.
    None: `batched_tokens` by device."""
    long_prefill_token_threshold: int = 0
    """Tokens of one prompt in one forward; 0: as many as the forward has room for."""
    scheduling_policy: Policy = "fcfs"
    """Which request goes first: the one that came first, or the one with the lower priority."""
    latency_goal: LatencyGoal = "itl"
    """Whether a step has no more of prompts than its decodes can wait for, or all there is room
    for."""
    speculative: SpeculativeConfig | None = None
    """How tokens that may follow are drafted; None: not at all."""
    kv_cache_bytes: int | None = None
    """Paged KV cache of each rank, all its layers; None: CPU_CACHE_BYTES, on a GPU what its share
    leaves."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights, the largest step, graphs and KV cache together."""
    enforce_eager: bool = False
    """Steps run without CUDA graphs."""
    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens of a block of it. P's and D's may differ where one divides the other."""
    prefix_caching: bool = True
    seed: int | None = None
    """Base of the seeds drawn for requests that come without one; None: another at each start."""
    generation_config: str = "auto"
    """Where sampling defaults come from: `auto`, the checkpoint's generation_config.json; `vllm`,
    none but OpenAI's; else a folder with such a file."""
    override_generation_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sampling defaults that win over those."""
    chat_template: str | None = None
    """A template in the place of the checkpoint's."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls; `auto`: as its template shows; `none`: chats have no tools.
    """
    reasoning_parser: str = "auto"
    """How it marks its reasoning, likewise; `none`: reasoning is content."""
    enable_auto_tool_choice: bool = False
    """An engine that cannot tell tool calls from content does not start."""
    threads: int | None = None
    """Threads of torch, of each rank; None: OMP_NUM_THREADS, else the cores, which ranks share."""
    tensor_parallel_size: int = 1
    """Ranks that share each layer."""
    pipeline_parallel_size: int = 1
    """Stages that hold the layers one behind the other."""
    enable_expert_parallel: bool = False
    """Whether experts are whole on the ranks that share a layer."""
    eplb: EplbConfig | None = None
    """How whole experts are placed anew by their load; None: they stay where they are loaded."""
    data_parallel_size: int = 1
    """Replicas of the engine, each with a copy of the model, behind one endpoint."""
    enable_elastic_ep: bool = False
    """Whether replicas may come and go while it serves."""
    data_parallel_size_file: Path | None = None
    """Says how many replicas there should be, while it serves; None: nothing but calls does."""
    on_rank_loss: OnRankLoss = "end"
    """What replicas that share experts do where a rank of one is lost (ADR 0129)."""
    replica: int = 0
    """The number of the replica that this is the configuration of."""
    custom_all_reduce: bool = True
    """Whether ranks on GPUs use the all-reduce of our own for small tensors, where the ranks' GPUs
    allow it."""
    layer_partition: tuple[int, ...] = ()
    """Layers of each stage; () as `xpyd_core.parallel.partition` divides them."""
    pods: int = 1
    """Pods that the ranks are in, each whole replicas or, of one replica, whole stages."""
    pod: int = 0
    """This pod's number; 0 serves HTTP and leads the others."""
    leader_address: str = ""
    """Host of pod 0."""
    rpc_port: int | None = None
    """Where pod 0 awaits the others; None: the port before the KV port."""

    role: Role = "Aggregated"
    host: str = "127.0.0.1"
    """Literal ip that HTTP and KV listen on and that heartbeats name."""
    port: int = HTTP_PORT
    tls: ServerFiles | None = None
    """Certificate of the HTTP port; None: it speaks plain HTTP."""
    has_open_probes: bool = False
    """Clients without a certificate get probes and metrics, and nothing else."""
    kv_port: int = KV_PORT
    kv_advertise: Address | None = None
    """KV address that others dial; None: host and kv_port."""
    kv_key_file: Path | None = None
    kv_mode: Mode = "put_async"
    """When a Prefill instance's KV moves; a Decode instance does what OFFER says."""
    kv_insecure: bool = False
    """The fleet has no secret: every peer that reaches the KV port counts as one of the fleet."""
    accept_unsigned_pairs: bool = False
    """Pair ids count without the router's MAC: for vllm-router and other proxies that make none."""
    kv_transports: tuple[str, ...] = TRANSPORTS
    """What may move KV, the best common one of each pair does."""
    kv_connections: int = 1
    """TCP connections that the DATA of a pair goes over; more than one: each with a thread."""
    kv_encrypted: bool = False
    """KV moves over TLS; then `kv_transports` is tcp alone."""
    kv_socket_dir: Path | None = None
    """Folder of Unix sockets shared by the instances of this machine; None: TCP only."""
    kv_direct_free: float = 0.1
    """Received KV lands in the own blocks while more than this share of them stays free; 1: never.
    """
    kv_buffer_bytes: int | None = None
    """Budget of the instance's device buffer, which its ranks share; None: `kv_buffer_percent` of
    the cache. A Prefill instance uses buffer and pool in mode get only."""
    kv_buffer_percent: int = 10
    kv_host_pool_bytes: int = 4 * GIB
    """Size of the instance's host pool, likewise; its memory is taken when first used."""
    kv_group_bytes: int = 4 * MIB
    """Layers are sent in groups of at least this many bytes."""
    kv_wait_s: float = 10
    """How long a Decode's request waits for KV, and in mode put a Prefill's step for a Decode."""
    kv_lease_s: float = 30
    kv_recompute: bool = True
    """False: a request whose KV does not come fails instead of being computed here."""

    discovery: tuple[Address, ...] = ()
    """Routers; a name with several addresses means all of them."""
    heartbeat_period_s: float = HEARTBEAT_PERIOD_S
    drain_timeout_s: float = 300
    """How long SIGTERM waits for requests and transfers to finish."""
    otlp_traces_endpoint: str | None = None
    """URL that spans are posted to; None: no tracing."""
    fleet: str = ""
    pool: str = ""
    instance: str = ""
    pod_revision: str = ""
    """The revision of the pool's template, for heartbeats."""
    fleet_revision: str = ""
    """The same of what all pools of the fleet have in common."""

    @property
    def sizes(self) -> Sizes:
        """How the model is divided over ranks. Replicas that share experts are one world of ranks;
        of others each has its own."""
        return Sizes(
            data=self.data_parallel_size if self.enable_expert_parallel else 1,
            tensor=self.tensor_parallel_size,
            pipeline=self.pipeline_parallel_size,
            has_whole_experts=self.enable_expert_parallel,
            redundant_experts=None if self.eplb is None else self.eplb.num_redundant_experts,
            is_elastic=(self.enable_elastic_ep and self.enable_expert_parallel)
            or self.outlives_replicas,
        )

    @property
    def first_rank(self) -> int:
        """How many ranks the replicas before this one have: ranks count through all of them, as
        processes, in logs and in metrics."""
        return self.replica * self.sizes.replica

    def of_replica(self, replica: int) -> WorkerConfig:
        """The configuration of one of the replicas: its KV ports, and its part of the instance's
        buffer and pool."""
        size, ranks, advertise = self.data_parallel_size, self.sizes.replica, self.kv_advertise
        if advertise is not None:
            port = replica_kv_port(advertise.port, replica, ranks)
            advertise = advertise._replace(port=port)
        buffer_bytes = self.kv_buffer_bytes
        return replace(
            self,
            replica=replica,
            kv_port=replica_kv_port(self.kv_port, replica, ranks),
            kv_advertise=advertise,
            kv_buffer_bytes=None if buffer_bytes is None else buffer_bytes // size,
            kv_host_pool_bytes=self.kv_host_pool_bytes // size,
        )

    @property
    def in_lock_step(self) -> bool:
        """Whether replicas, present or to come, share experts: all make the same forwards."""
        return self.has_replicas and self.enable_expert_parallel

    @property
    def outlives_replicas(self) -> bool:
        """Whether replicas that share experts go on where one of them is lost."""
        return self.in_lock_step and self.on_rank_loss == "continue"

    @property
    def has_ranks(self) -> bool:
        """Whether what computes is in processes of its own."""
        return self.sizes.replica > 1 or self.has_replicas

    @property
    def has_replicas(self) -> bool:
        """Whether there is more than one replica, or may be."""
        return self.data_parallel_size > 1 or self.enable_elastic_ep

    @property
    def pod_replicas(self) -> int:
        """How many replicas a pod has, where it has whole ones; else 1."""
        return max(1, self.data_parallel_size // self.pods)

    def pod_ranks(self, pod: int) -> range:
        """The ranks of this replica that run in pod `pod`."""
        ranks = self.sizes.replica
        if self.has_replicas:
            return range(ranks if pod == self.replica // self.pod_replicas else 0)
        each = ranks // self.pods
        return range(pod * each, (pod + 1) * each)

    @property
    def rendezvous_port(self) -> int:
        """Where pod 0 awaits the others, at its own address."""
        return rendezvous_port(self.kv_port) if self.rpc_port is None else self.rpc_port

    @property
    def drafts(self) -> SpeculativeConfig | None:
        """How tokens are drafted here. A Prefill instance puts out one token, so nothing may follow
        it."""
        return None if self.role == "Prefill" else self.speculative

    @property
    def cpu_cache_bytes(self) -> int:
        """The paged KV cache of each rank on a CPU."""
        return CPU_CACHE_BYTES if self.kv_cache_bytes is None else self.kv_cache_bytes

    @property
    def kv_address(self) -> Address:
        """The address of this instance in request ids."""
        return self.kv_advertise or Address(self.host, self.kv_port)

    @property
    def engine_id(self) -> str:
        """Who the engine is to its KV peers: unique in the fleet, and a restart has the same one.
        Not the KV address: P does not listen on it, so that two on one host may share it."""
        name = f"{self.host}/{self.port}"
        return name if self.data_parallel_size == 1 else f"{name}/{self.replica}"

    @property
    def moves_kv(self) -> bool:
        """Whether this instance sends or receives KV."""
        return self.role != "Aggregated"

    @property
    def lands_kv(self) -> bool:
        """Whether KV is kept in memory outside of the cache here: on a D before its request runs,
        on a P in mode get until it is pulled."""
        return self.role == "Decode" or (self.role == "Prefill" and self.kv_mode == "get")

    @property
    def shares_kv(self) -> bool:
        """Whether D's on this machine may read the KV cache in place."""
        is_possible = "shm" in self.kv_transports and self.kv_socket_dir is not None
        return self.role == "Prefill" and is_possible

    def batched_tokens(self, *, on_gpu: bool) -> int:
        """`max_num_batched_tokens`, or what `auto` is on this device."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(AUTO_BATCHED_TOKENS_GPU if on_gpu else AUTO_BATCHED_TOKENS, self.max_num_seqs)

    def buffer_bytes(self, cache_bytes: int) -> int:
        """Budget of the device buffer for a cache of this size, of all ranks."""
        if self.kv_buffer_bytes is not None:
            return self.kv_buffer_bytes
        return cache_bytes * self.kv_buffer_percent // 100

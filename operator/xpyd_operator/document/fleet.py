"""InferenceFleet, xpyd.dev/v1alpha1: the document's root, and rules over all of it.

A field or an enum's value enters the models together with the code behind it. Until then
`document.mistakes` names it as unsupported, so that a document is refused instead of obeyed in
part. Names and bounds are append-only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from xpyd_core.pod_env import (
    HTTP_PORT,
    LAST_PORT,
    rendezvous_port,
)
from xpyd_operator.document.base import (
    DNS_LABEL,
    ApiModel,
    Check,
    Numbers,
    Rule,
    Unique,
    matching,
    rule,
)
from xpyd_operator.document.engine import Engine, has_whole_experts
from xpyd_operator.document.engines import (
    POOL_ROLES,
    Annotations,
    Labels,
    Model,
    Pool,
)
from xpyd_operator.document.parallelism import MOST_DATA, RANKS
from xpyd_operator.document.rollout import Rollout
from xpyd_operator.document.router import Router
from xpyd_operator.document.transfer import KvTransfer


class Heartbeat(ApiModel):
    """An instance leaves the routers' registry after missedBeats intervals without a beat."""

    interval_milliseconds: Annotated[int, Field(ge=100, le=60000)] = 3000
    """How often engines send a heartbeat to the routers."""
    missed_beats: Annotated[int, Field(ge=2, le=60)] = 3
    """Beats missed before a router drops an engine."""
    accept_unsigned: bool = False
    """Routers also accept heartbeats that are not signed with the KV key: those of engines older
    than signing, for as long as an upgrade takes, and those of vLLM."""


class Drain(ApiModel):
    """How long a leaving instance may take."""

    timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 300
    """How long a leaving instance may take to finish its requests."""


class NetworkPolicy(ApiModel):
    """Who may reach the fleet's ports in a cluster whose network enforces policies."""

    enabled: bool = True
    """Only the fleet's own pods reach KV and discovery ports, and only those of its namespace, of
    the operator's and of monitoring the routers' admin port; everyone reaches the routers' HTTP."""


API_VERSION = "xpyd.dev/v1alpha1"
KIND = "InferenceFleet"
FLEET_NAME = re.compile(DNS_LABEL)


class Metadata(ApiModel):
    """Kubernetes object metadata; local mode uses the name and ignores the rest."""

    name: Annotated[
        str,
        Field(max_length=253),
        Check(
            f"size(self.metadata.name) <= 30 && self.metadata.name.matches('^({DNS_LABEL})$')",
            "must be a DNS label of at most 30 characters that begins with a letter "
            "(pod, Service and pool names are derived from it)",
            lambda name: len(name) <= 30 and bool(FLEET_NAME.fullmatch(name)),
            kind="object",
        ),
    ]
    """A DNS label of at most 30 characters that begins with a letter; pod names begin with it."""
    namespace: Annotated[
        str,
        Field(max_length=63),
        matching("[a-z0-9]([-a-z0-9]*[a-z0-9])?", "must be a DNS label"),
    ] = "default"
    """Namespace of the fleet and its children."""
    labels: Labels = Field(default_factory=dict[str, str])
    """Labels of the fleet."""
    annotations: Annotations = Field(default_factory=dict[str, str])
    """Annotations of the fleet."""


_IS_NIXL = "(has(self.engine.connector) && self.engine.connector == 'Nixl')"
_RANKS = RANKS.format("p")
_LAST_PORT = f"(self.kvTransfer.port + {_RANKS} + {MOST_DATA.format('p')} - 1)"
"""kv_ports()[-1]: each rank has a port, and each replica one before those of its ranks."""
_PORTS_CLASH = (
    # NixlConnector has one port for all ranks of an instance.
    f"!{_IS_NIXL} && ({_RANKS} > 1 || self.engine.type == 'VLLM') && "
    f"({_LAST_PORT} > {LAST_PORT} || "
    f"(self.kvTransfer.port - 1 <= {HTTP_PORT} && {_LAST_PORT} >= {HTTP_PORT}))"
)
_FIRST_CLASH = f"self.pools.filter(p, {_PORTS_CLASH})[0]"


def _clash(spec: Spec) -> tuple[str | int, ...]:
    """The first pool whose ranks have no ports, its ranks and the KV port; () for none."""
    port, is_vllm = spec.kv_transfer.port, spec.engine.type == "VLLM"
    for pool in () if spec.engine.is_nixl else spec.pools:
        ranks, last = pool.parallelism.ranks, pool.kv_ports(port, is_vllm=is_vllm)[-1]
        holds_http = rendezvous_port(port) <= HTTP_PORT <= last
        if (ranks > 1 or is_vllm) and (last > LAST_PORT or holds_http):
            return pool.name, ranks, port
    return ()


_SHARES_A_GPU = (
    "self.kvTransfer.transport == 'SharedMemory' && p.role != 'Aggregated' && p.resources.gpus > 0"
)
_FIRST_GPU = f"self.pools.filter(p, {_SHARES_A_GPU})[0]"


def _shares_a_gpu(spec: Spec) -> tuple[str | int, ...]:
    """The first pool with its KV on GPUs that SharedMemory would have to read, and their number."""
    if spec.kv_transfer.transport == "SharedMemory":
        for pool in spec.pools:
            if pool.role != "Aggregated" and pool.resources.gpus > 0:
                return pool.name, pool.resources.gpus
    return ()


_IS_SPLIT = f"p.resources.gpus > 0 && p.resources.gpus < {_RANKS}"


def _split(spec: Spec) -> tuple[str | int, ...]:
    """The first pool whose instances would be several pods; () for none."""
    for pool in spec.pools if spec.engine.type == "VLLM" else ():
        if 0 < pool.resources.gpus < pool.parallelism.ranks:
            return (pool.name,)
    return ()


_OWN = "has(p.rollout.{0}) ? p.rollout.{0} : self.rollout.{0}"
_CANNOT_MOVE = (
    f"has(p.rollout) && ({_OWN.format('maxSurgePercent')}) == 0 && "
    f"({_OWN.format('maxUnavailablePercent')}) == 0"
)


def _cannot_move(spec: Spec) -> tuple[str, ...]:
    """The first pool with a rollout of its own in which nothing could be replaced; () for none."""
    own = (pool for pool in spec.pools if pool.rollout is not None)
    stuck = (pool.name for pool in own if not spec.rollout.bounds_of(pool.rollout).can_move)
    return tuple(stuck)[:1]


_MOVES_FROM_COPIES = "p.role != 'Aggregated' && p.parallelism.data > 1"
_FIRST_OF_COPIES = f"self.pools.filter(p, {_MOVES_FROM_COPIES})[0]"


def _moves_from_copies(spec: Spec) -> tuple[str | int, ...]:
    """The first pool of vLLMs that move KV and have replicas, and how many; () for none."""
    for pool in spec.pools if spec.engine.type == "VLLM" else ():
        if pool.role != "Aggregated" and pool.parallelism.data > 1:
            return pool.name, pool.parallelism.data
    return ()


def _unused_by_nixl(name: str, cel: str, used: Callable[[KvTransfer], bool]) -> Rule[Spec]:
    """A rule that refuses a field of kvTransfer that NixlConnector has nothing for.

    `cel` is true where the field `name` differs from its default.
    """

    def holds(spec: Spec) -> bool:
        return not spec.engine.is_nixl or not used(spec.kv_transfer)

    message = "has no meaning with the connector Nixl: leave it out (docs/vllm.md)"
    found: Callable[[Callable[[Spec], bool]], Rule[Spec]]
    found = rule(f"!{_IS_NIXL} || !({cel})", message, field=f"kvTransfer.{name}")
    return found(holds)


_ON_GPUS = "self.pools.exists(p, p.role != 'Aggregated' && p.resources.gpus > 0)"
_ON_CPUS = "self.pools.exists(p, p.role != 'Aggregated' && p.resources.gpus == 0)"


class Spec(ApiModel):
    """What the user wants."""

    model: Model
    """Which checkpoint the fleet serves, and under which names."""
    engine: Engine = Engine()
    """What every engine gets in addition to what the fleet decides."""
    pools: Annotated[
        tuple[Pool, ...],
        Field(strict=False, min_length=1, max_length=8),
        Unique("name"),
        POOL_ROLES,
    ]
    """At least one Prefill and one Decode pool, or only Aggregated pools."""
    kv_transfer: KvTransfer = KvTransfer()
    """How KV moves from P to D."""
    router: Router = Router()
    """The HTTP entry."""
    heartbeat: Heartbeat = Heartbeat()
    """When an instance counts as gone."""
    drain: Drain = Drain()
    """How a leaving instance finishes."""
    rollout: Rollout = Rollout()
    """How a new revision replaces an old one."""
    network_policy: NetworkPolicy = NetworkPolicy()
    """Who may reach the fleet's ports."""

    def layouts(self) -> dict[str, str]:
        """By pool: how its instances split the model; engine.args may deal out the experts of all
        pools."""
        whole = has_whole_experts(self.engine.args)
        parts = {pool.name: pool.parallelism for pool in self.pools}
        return {name: (p.with_whole_experts if whole else p).layout for name, p in parts.items()}

    @rule(
        f"self.pools.all(p, !({_PORTS_CLASH}))",
        "instances of several ranks, and those of type VLLM, use the ports from port - 1 to "
        "port + data * (tensor * pipeline + 1) - 1, "
        f"which must end by {LAST_PORT} and not hold {HTTP_PORT}, where engines serve HTTP: "
        "set another port",
        field="kvTransfer.port",
        numbers=Numbers(
            "pool %s of %d ranks, port %d",
            f"{_FIRST_CLASH}.name, {RANKS.format(_FIRST_CLASH)}, self.kvTransfer.port",
            _clash,
        ),
    )
    def _has_ports_for_ranks(self) -> bool:
        return not _clash(self)

    @rule(
        f"self.pools.all(p, !({_CANNOT_MOVE}))",
        "with what its rollout leaves out as in spec.rollout, nothing of a pool could ever be "
        "replaced: set one of maxSurgePercent and maxUnavailablePercent of its rollout",
        field="pools",
        numbers=Numbers("pool %s", f"self.pools.filter(p, {_CANNOT_MOVE})[0].name", _cannot_move),
    )
    def _pools_can_move(self) -> bool:
        return not _cannot_move(self)

    @rule(
        f"self.pools.all(p, !({_SHARES_A_GPU}))",
        "SharedMemory moves no KV of a GPU, as no process maps another's GPU memory so: "
        "set another transport, or resources.gpus of Prefill and Decode pools to 0",
        field="kvTransfer.transport",
        numbers=Numbers(
            "pool %s, gpus %d", f"{_FIRST_GPU}.name, {_FIRST_GPU}.resources.gpus", _shares_a_gpu
        ),
    )
    def _shares_no_gpu(self) -> bool:
        return not _shares_a_gpu(self)

    @rule(
        "self.engine.type != 'VLLM' || has(self.engine.connector) || "
        "self.pools.all(p, p.role == 'Aggregated')",
        "Prefill and Decode pools of type VLLM need a connector: Xpyd or Nixl",
        field="engine.connector",
        missing=True,
    )
    def _has_connector(self) -> bool:
        is_whole = all(pool.role == "Aggregated" for pool in self.pools)
        return self.engine.type != "VLLM" or self.engine.connector is not None or is_whole

    @rule(
        f"self.engine.type != 'VLLM' || {_IS_NIXL} || !self.model.uri.startsWith('hf://') || "
        "self.pools.all(p, p.role == 'Aggregated')",
        "xpyd's connector for vLLM reads the checkpoint's folder: use file://, s3:// or pvc://",
        field="model.uri",
    )
    def _has_folder_for_vllm(self) -> bool:
        is_whole = all(pool.role == "Aggregated" for pool in self.pools)
        is_fine = self.engine.is_nixl or not self.model.uri.startswith("hf://")
        return self.engine.type != "VLLM" or is_fine or is_whole

    @rule(
        f"self.engine.type != 'VLLM' || self.pools.all(p, !({_IS_SPLIT}))",
        "an instance of vLLM is one pod: set resources.gpus to parallelism.tensor * pipeline * "
        "data",
        field="engine.type",
        numbers=Numbers("pool %s", f"self.pools.filter(p, {_IS_SPLIT})[0].name", _split),
    )
    def _is_one_pod(self) -> bool:
        return not _split(self)

    @rule(
        "self.engine.type != 'VLLM' || self.pools.all(p, !has(p.parallelism.maxData))",
        "replicas of a vLLM stay as they are: leave parallelism.maxData out",
        field="engine.type",
    )
    def _has_replicas_that_stay(self) -> bool:
        is_ours = self.engine.type != "VLLM"
        return is_ours or all(pool.parallelism.max_data is None for pool in self.pools)

    @rule(
        f"self.engine.type != 'VLLM' || self.pools.all(p, !({_MOVES_FROM_COPIES}))",
        "connectors and routers know one KV address of a vLLM, and each of its replicas would have "
        "its own: leave parallelism.data out of Prefill and Decode pools, and raise replicas",
        field="engine.type",
        numbers=Numbers(
            "pool %s, data %d",
            f"{_FIRST_OF_COPIES}.name, {_FIRST_OF_COPIES}.parallelism.data",
            _moves_from_copies,
        ),
    )
    def _moves_kv_of_one_copy(self) -> bool:
        return not _moves_from_copies(self)

    @rule(
        "self.engine.type != 'VLLM' || self.pools.all(p, !has(p.parallelism.onRankLoss) || "
        "p.parallelism.onRankLoss != 'Continue')",
        "an instance of vLLM ends with a rank: leave parallelism.onRankLoss out",
        field="engine.type",
    )
    def _ends_with_a_rank(self) -> bool:
        is_free = all(pool.parallelism.on_rank_loss == "Restart" for pool in self.pools)
        return self.engine.type != "VLLM" or is_free

    @rule(
        f"self.engine.type != 'VLLM' || {_IS_NIXL} || self.kvTransfer.transport != 'SharedMemory'",
        "vLLM allocates its KV cache itself, not in memory that engines share: "
        "set Auto, TCP or UDS",
        field="kvTransfer.transport",
    )
    def _has_transport_of_vllm(self) -> bool:
        is_free = self.engine.type != "VLLM" or self.engine.is_nixl
        return is_free or self.kv_transfer.transport != "SharedMemory"

    @rule(
        f"self.engine.type != 'VLLM' || {_IS_NIXL} || type(self.kvTransfer.bufferSize) == int || "
        "!string(self.kvTransfer.bufferSize).endsWith('%') || "
        "string(self.kvTransfer.bufferSize) == '10%'",
        "xpyd does not know the size of vLLM's KV cache: give a size such as 1Gi, or leave it out",
        field="kvTransfer.bufferSize",
    )
    def _knows_its_buffer(self) -> bool:
        size = self.kv_transfer.buffer_size
        is_free = self.engine.type != "VLLM" or self.engine.is_nixl
        return is_free or not size.endswith("%") or size == "10%"

    _has_no_mode = _unused_by_nixl(
        "mode", "self.kvTransfer.mode != 'PutAsync'", lambda kv: kv.mode != "PutAsync"
    )
    _has_no_transport = _unused_by_nixl(
        "transport", "self.kvTransfer.transport != 'Auto'", lambda kv: kv.transport != "Auto"
    )
    _has_no_folder = _unused_by_nixl(
        "sameHostPath", "has(self.kvTransfer.sameHostPath)", lambda kv: bool(kv.same_host_path)
    )
    _has_no_buffer = _unused_by_nixl(
        "bufferSize",
        "type(self.kvTransfer.bufferSize) == int || string(self.kvTransfer.bufferSize) != '10%'",
        lambda kv: kv.buffer_size != "10%",
    )
    _has_no_pool = _unused_by_nixl(
        "hostPoolSize",
        "has(self.kvTransfer.hostPoolSize)",
        lambda kv: kv.host_pool_size is not None,
    )
    _has_no_wait = _unused_by_nixl(
        "waitSeconds", "self.kvTransfer.waitSeconds != 10", lambda kv: kv.wait_seconds != 10
    )

    @rule(
        f"!{_IS_NIXL} || self.kvTransfer.verify != 'Strict'",
        "vLLM's own connectors know no probe, so that no pair would ever be verified: leave it out",
        field="kvTransfer.verify",
    )
    def _can_be_verified(self) -> bool:
        return not self.engine.is_nixl or self.kv_transfer.verify != "Strict"

    @rule(
        f"self.engine.type != 'VLLM' || !({_ON_GPUS} && {_ON_CPUS})",
        "between vLLMs no KV moves from a GPU to a CPU or back: set resources.gpus of all Prefill "
        "and Decode pools, or 0 in all",
        field="engine.connector",
    )
    def _has_one_kind_of_device(self) -> bool:
        kinds = {pool.resources.gpus > 0 for pool in self.pools if pool.role != "Aggregated"}
        return self.engine.type != "VLLM" or len(kinds) < 2

    @rule(
        f"!{_IS_NIXL} || self.networkPolicy.enabled || self.kvTransfer.insecure",
        "NIXL knows no key: without a network policy anyone in the cluster may read and write KV; "
        "leave it enabled, or say kvTransfer.insecure: true",
        field="networkPolicy.enabled",
        in_cluster=True,
    )
    def _keeps_others_from_nixl(self) -> bool:
        is_kept = self.network_policy.enabled or self.kv_transfer.insecure
        return not self.engine.is_nixl or is_kept


class InferenceFleet(ApiModel):
    """One fleet: a model, its pools and the router in front of them."""

    api_version: Literal["xpyd.dev/v1alpha1"]
    """Version of the API."""
    kind: Literal["InferenceFleet"]
    """Kind of the object."""
    metadata: Metadata
    """Name and namespace."""
    spec: Spec
    """What the user wants."""

    @property
    def name(self) -> str:
        """The fleet's name."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """The namespace that it lives in."""
        return self.metadata.namespace

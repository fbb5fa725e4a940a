"""spec.pools[]: instances of one role, their devices, bounds and pods."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Field

from xpyd_operator.document.base import DNS_LABEL, ApiModel, DnsName, Size
from xpyd_operator.document.pod import PodTemplate, shaped_like
from xpyd_operator.document.rules import Check, ListCheck, Numbers, matching, rule, transition

Role = Literal["Prefill", "Decode", "Aggregated"]
ROUTER = "router"
"""The router's place in pod names; a pool of this name would take it."""
MOST_CPU_RANKS = 64
"""Processes of one pod; one with GPUs has at most as many as Resources.gpus allows."""
POOL_NAME = matching(
    DNS_LABEL, "must be a DNS label of at most 16 characters that begins with a letter"
)


def _roles_fit(raw: list[Any]) -> bool:
    maps = [cast("dict[str, Any]", item) for item in raw if isinstance(item, dict)]
    known = [m.get("role") for m in maps if m.get("role") in ("Prefill", "Decode", "Aggregated")]
    if not known or len(known) < len(raw):
        return True  # a role that is wrong itself says enough
    return set(known) == {"Aggregated"} or {"Prefill", "Decode"} <= set(known)


POOL_ROLES = ListCheck(
    "self.all(p, p.role == 'Aggregated') || "
    "(self.exists(p, p.role == 'Prefill') && self.exists(p, p.role == 'Decode'))",
    "a fleet needs at least one Prefill and one Decode pool, or only Aggregated pools",
    _roles_fit,
)


class Parallelism(ApiModel):
    """How one instance splits the model: tensor * pipeline ranks, each a process with a GPU of its
    own or, in an instance on the CPU, a share of the cores. Any layout of Prefill pools goes with
    any of Decode pools."""

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks that share each layer; they must divide the model's attention heads, and never leave
    their pod."""
    pipeline: Annotated[int, Field(ge=1, le=64)] = 1
    """Stages, which share the layers among them; each has `tensor` ranks."""

    @property
    def ranks(self) -> int:
        """Processes of one instance that hold a part of the model."""
        return self.tensor * self.pipeline

    @property
    def layout(self) -> str:
        """For people: TP2xPP2."""
        return f"TP{self.tensor}xPP{self.pipeline}"


class Resources(ApiModel):
    """Devices and memory of one pod of an instance."""

    gpus: Annotated[int, Field(ge=0, le=16)] = 1
    """GPUs of a pod; 0: the instance is one pod on the CPU. Local mode runs only these."""
    gpu_resource_name: Annotated[
        str,
        Field(max_length=253),
        matching(
            "[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?",
            "must be a device plugin's resource such as nvidia.com/gpu",
        ),
    ] = ""
    """Resource of the device plugin that gives the GPUs; none: nvidia.com/gpu."""
    device_class_name: DnsName = ""
    """DeviceClass (dynamic resource allocation) that gives the GPUs, instead of a plugin."""
    shared_memory: Size = "8Gi"
    """Most that /dev/shm of a pod may hold."""

    @rule(
        "!has(self.deviceClassName) || !has(self.gpuResourceName)",
        "deviceClassName (DRA) and gpuResourceName (device plugin) exclude each other: "
        "leave one out",
        field="deviceClassName",
    )
    def _is_one(self) -> bool:
        return not self.device_class_name or not self.gpu_resource_name

    @rule(
        "self.gpus > 0 || (!has(self.deviceClassName) && !has(self.gpuResourceName))",
        "0 GPUs come from nowhere: leave deviceClassName and gpuResourceName out, or set gpus",
        field="gpus",
    )
    def _comes_from_somewhere(self) -> bool:
        return self.gpus > 0 or not (self.device_class_name or self.gpu_resource_name)


class Scaling(ApiModel):
    """Bounds that the pool's replicas keep, whoever scales it."""

    min_replicas: Annotated[int, Field(ge=0, le=1024)] = 0
    """Fewest instances."""
    max_replicas: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Most instances; none: 1024."""

    @rule(
        "!has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
        "minReplicas must not exceed maxReplicas",
        field="minReplicas",
    )
    def _are_in_order(self) -> bool:
        return self.max_replicas is None or self.min_replicas <= self.max_replicas


def _ranks(pool: Pool) -> tuple[int, ...]:
    parallelism = pool.parallelism
    return parallelism.tensor, parallelism.pipeline, parallelism.ranks


def _ranks_and_gpus(pool: Pool) -> tuple[int, ...]:
    return *_ranks(pool), pool.resources.gpus


def _tensor_and_gpus(pool: Pool) -> tuple[int, ...]:
    return pool.parallelism.tensor, pool.resources.gpus


class Pool(ApiModel):
    """Instances of one role."""

    name: Annotated[
        str,
        Field(max_length=16),
        POOL_NAME,
        Check(
            "self != 'router'",
            "must not be 'router': that is the name of the fleet's router",
            lambda name: name != ROUTER,
        ),
    ]
    """A DNS label that begins with a letter; pod names hold it."""
    role: Role
    """What its instances do: prefill, decode, or both (Aggregated). Never changes."""
    replicas: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Instances. The last declared value wins once: to apply the same document again does not undo
    a scale. None: what was scaled to, 1 at first."""
    parallelism: Parallelism = Parallelism()
    """How one instance splits the model."""
    resources: Resources = Resources()
    """Devices and memory of one pod of an instance."""
    scaling: Scaling = Scaling()
    """Bounds that the pool's replicas keep, whoever scales it."""
    template: Annotated[dict[str, Any] | None, shaped_like(PodTemplate)] = None
    """Merged into the engines' pods in a cluster; the engine's container is `engine`."""

    @rule(
        "self.resources.gpus <= 0 || self.parallelism.tensor < 1 || "
        "self.resources.gpus % self.parallelism.tensor == 0",
        "parallelism.tensor must divide resources.gpus, or a stage would straddle pods: "
        "set resources.gpus to a multiple of parallelism.tensor",
        field="parallelism.tensor",
        numbers=Numbers(
            "tensor %d, gpus %d",
            "self.parallelism.tensor, self.resources.gpus",
            _tensor_and_gpus,
        ),
    )
    def _tensor_stays_in_a_pod(self) -> bool:
        gpus = self.resources.gpus
        return gpus == 0 or gpus % self.parallelism.tensor == 0

    @rule(
        "self.resources.gpus <= 0 || self.parallelism.tensor < 1 || "
        "self.resources.gpus % self.parallelism.tensor != 0 || "
        "self.parallelism.tensor * self.parallelism.pipeline % self.resources.gpus == 0",
        "parallelism.tensor * pipeline must fill whole pods, or GPUs would idle: "
        "set resources.gpus to a divisor of it",
        field="parallelism",
        numbers=Numbers(
            "%d * %d = %d ranks, gpus %d",
            "self.parallelism.tensor, self.parallelism.pipeline, "
            "self.parallelism.tensor * self.parallelism.pipeline, self.resources.gpus",
            _ranks_and_gpus,
        ),
    )
    def _fills_pods(self) -> bool:
        gpus, parallelism = self.resources.gpus, self.parallelism
        # What straddles pods is told of by the rule before.
        return gpus == 0 or gpus % parallelism.tensor != 0 or parallelism.ranks % gpus == 0

    @rule(
        "self.resources.gpus != 0 || "
        f"self.parallelism.tensor * self.parallelism.pipeline <= {MOST_CPU_RANKS}",
        f"an instance on the CPU is one pod of at most {MOST_CPU_RANKS} ranks: "
        "lower parallelism.tensor or parallelism.pipeline",
        field="parallelism",
        numbers=Numbers(
            "%d * %d = %d ranks",
            "self.parallelism.tensor, self.parallelism.pipeline, "
            "self.parallelism.tensor * self.parallelism.pipeline",
            _ranks,
        ),
    )
    def _fits_a_cpu_pod(self) -> bool:
        return self.resources.gpus != 0 or self.parallelism.ranks <= MOST_CPU_RANKS

    @rule(
        "!has(self.replicas) || (self.replicas >= self.scaling.minReplicas && "
        "(!has(self.scaling.maxReplicas) || self.replicas <= self.scaling.maxReplicas))",
        "replicas must lie within scaling.minReplicas and scaling.maxReplicas",
        field="replicas",
    )
    def _keeps_its_bounds(self) -> bool:
        if self.replicas is None:
            return True
        most = self.scaling.max_replicas
        return self.replicas >= self.scaling.min_replicas and (
            most is None or self.replicas <= most
        )

    @transition(
        "self.role == oldSelf.role",
        "a pool's role is immutable: add a new pool and remove this one",
        field="role",
    )
    def _keeps_its_role(self, before: Pool) -> bool:
        return self.role == before.role

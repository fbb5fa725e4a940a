"""spec.model and spec.pools[]: the checkpoint, and the pods of engines.

A pool is a number of equal instances of one role, with their devices, bounds and pod template. The
content of a pod template is Kubernetes' own (`document.pod_template`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from xpyd_core.checkpoints import checkpoint_folder
from xpyd_core.parallel.ranks import kv_ports
from xpyd_operator.document.base import (
    DNS_LABEL,
    ApiModel,
    Check,
    DnsName,
    HostPath,
    KeyName,
    ListCheck,
    Numbers,
    Plain,
    Size,
    Unique,
    matching,
    rule,
    transition,
)
from xpyd_operator.document.parallelism import MOST_DATA, RANKS, Parallelism
from xpyd_operator.document.pod_template import POD_SPEC, without_nulls
from xpyd_operator.document.rollout import PoolRollout


def _drop_nulls(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {k: v for k, v in cast("dict[str, object]", value).items() if v is not None}


Labels = Annotated[
    dict[str, Annotated[str, Field(max_length=63)]],
    Field(max_length=64),
    BeforeValidator(_drop_nulls),
]
Annotations = Annotated[
    dict[str, Annotated[str, Field(max_length=16384)]],
    Field(max_length=64),
    BeforeValidator(_drop_nulls),
]


class PodMetadata(ApiModel):
    """Metadata of the pods, in addition to the operator's."""

    labels: Labels = Field(default_factory=dict[str, str])
    """Labels of the pods; the operator's own cannot be set."""
    annotations: Annotations = Field(default_factory=dict[str, str])
    """Annotations of the pods."""


class PodTemplate(ApiModel):
    """Merged strategically into the pods: lists by name, maps key by key."""

    metadata: PodMetadata | None = None
    """Labels and annotations of the pods."""
    spec: Annotated[dict[str, Any], BeforeValidator(without_nulls)] = Field(
        default_factory=dict[str, Any],
        json_schema_extra={POD_SPEC: True},
    )
    """A PodSpec: nodeSelector, tolerations, affinity, topologySpreadConstraints, volumes,
    containers, ... Fields that the operator owns are refused by a condition."""


class ShapedLike:
    """The value is checked as `model` is, and kept as a map of what it has."""

    def __init__(self, model: type[ApiModel]) -> None:
        self._model = model

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        model = handler.generate_schema(self._model)
        checked = core_schema.no_info_wrap_validator_function(_as_map, model)
        return core_schema.nullable_schema(
            checked, serialization=core_schema.simple_ser_schema("any")
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(schema)


def _as_map(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    checked: ApiModel = handler(value)
    return checked.model_dump(by_alias=True, exclude_unset=True)


class SecretRef(ApiModel):
    """A key of a Secret in the fleet's namespace."""

    name: DnsName
    """Name of the Secret."""
    key: KeyName = "token"
    """Key in the Secret."""


class ModelCache(ApiModel):
    """Where a cluster keeps checkpoints; it is mounted at /models. Into a PersistentVolumeClaim a
    Job downloads an hf:// or s3:// model, once for each revision and for all pods."""

    type: Literal["None", "HostPath", "PersistentVolumeClaim"] = "None"
    """None: nothing is kept; each pod downloads an hf:// or s3:// model into an emptyDir."""
    claim_name: DnsName = ""
    """Name of a PersistentVolumeClaim in the fleet's namespace."""
    path: HostPath = ""
    """Folder on the node. Pod security 'restricted' forbids hostPath."""
    read_only: bool = True
    """Engines may not write to it. An hf:// model must be in a HostPath already where this is true;
    a Job writes into a claim in any case."""

    @rule(
        "!has(self.type) || self.type != 'PersistentVolumeClaim' || has(self.claimName)",
        "type PersistentVolumeClaim needs the claim's name",
        field="claimName",
        missing=True,
    )
    def _has_claim(self) -> bool:
        return self.type != "PersistentVolumeClaim" or bool(self.claim_name)

    @rule(
        "!has(self.type) || self.type != 'HostPath' || has(self.path)",
        "type HostPath needs the folder's path",
        field="path",
        missing=True,
    )
    def _has_path(self) -> bool:
        return self.type != "HostPath" or bool(self.path)


class Model(ApiModel):
    """Which checkpoint the fleet serves, and under which names."""

    uri: Annotated[
        str,
        Field(max_length=512),
        Plain,
        matching(
            "(hf|file)://.+|s3://[a-z0-9][-.a-z0-9]{1,61}[a-z0-9]/.*[^/].*|"
            "pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/.*)?",
            "must be hf://ORG/NAME, file://FOLDER, s3://BUCKET/FOLDER or pvc://CLAIM/FOLDER",
        ),
    ]
    """hf://ORG/NAME or s3://BUCKET/FOLDER (downloaded, or from the cache), file://FOLDER, or
    pvc://CLAIM/FOLDER, a folder of a PersistentVolumeClaim. A relative folder of file:// begins at
    the document's own in local mode and at /models in a cluster."""
    revision: Annotated[str, Field(max_length=128), Plain] = ""
    """Branch, tag or commit of an hf:// model; of an s3:// model a text of your own: another one
    downloads again."""
    endpoint_url: Annotated[
        str,
        Field(max_length=512),
        matching("(https?://.+)?", "must be a URL such as https://minio.example:9000"),
    ] = ""
    """The store of an s3:// model, where it is not AWS."""
    served_names: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256), Plain], ...],
        Field(strict=False, max_length=8),
        Unique(),
    ] = ()
    """Names that requests may use; none: the checkpoint's own name."""
    secret_ref: SecretRef | None = None
    """Secret with the token of an hf:// model that is not public; of an s3:// model, with the keys
    AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_SESSION_TOKEN and AWS_REGION if needed."""
    cache: ModelCache = ModelCache()
    """Where a cluster keeps checkpoints."""

    @property
    def is_downloaded(self) -> bool:
        """Whether it comes from elsewhere into a folder."""
        return self.uri.startswith(("hf://", "s3://"))

    @property
    def by_pods(self) -> bool:
        """Whether each pod downloads it before its engine starts, in a cluster."""
        return self.uri.startswith("s3://") and not self.by_job

    def is_folder_of(self, path: str) -> bool:
        """Whether `path` is the folder that it is downloaded into, or lies in its claim."""
        folder = checkpoint_folder(self.uri, self.revision, self.endpoint_url)
        is_its_own = self.is_downloaded and path.rpartition("/")[2] == folder
        return is_its_own or self.uri.startswith("pvc://")

    @property
    def by_job(self) -> bool:
        """Whether a Job downloads it into a claim, in a cluster."""
        return self.is_downloaded and self.cache.type == "PersistentVolumeClaim"

    @rule(
        "!has(self.endpointUrl) || self.endpointUrl == '' || self.uri.startsWith('s3://')",
        "only an s3:// model has an endpoint: leave endpointUrl out",
        field="endpointUrl",
    )
    def _endpoint_is_of_a_store(self) -> bool:
        return not self.endpoint_url or self.uri.startswith("s3://")

    @rule(
        "!self.uri.startsWith('pvc://') || !has(self.cache) || !has(self.cache.type) || "
        "self.cache.type == 'None'",
        "a pvc:// model is in its claim already: leave cache out",
        field="cache",
    )
    def _claim_needs_no_cache(self) -> bool:
        return not self.uri.startswith("pvc://") or self.cache.type == "None"

    @rule(
        "!self.uri.startsWith('pvc://') || !self.uri.split('/').exists(part, part == '..')",
        "must be a folder in the claim, without '..'",
        field="uri",
    )
    def _stays_in_its_claim(self) -> bool:
        return not self.uri.startswith("pvc://") or ".." not in self.uri.split("/")


Role = Literal["Prefill", "Decode", "Aggregated"]
ROUTER = "router"
"""The router's part in pod names; no pool may have this name."""
MOST_CPU_RANKS = 64
"""Processes of one pod; one with GPUs has at most as many as Resources.gpus allows."""
POOL_NAME = matching(
    DNS_LABEL, "must be a DNS label of at most 16 characters that begins with a letter"
)


def _roles_fit(raw: list[Any]) -> bool:
    maps = [cast("dict[str, Any]", item) for item in raw if isinstance(item, dict)]
    known = [m.get("role") for m in maps if m.get("role") in ("Prefill", "Decode", "Aggregated")]
    if not known or len(known) < len(raw):
        return True  # a wrong role is reported by itself
    return set(known) == {"Aggregated"} or {"Prefill", "Decode"} <= set(known)


POOL_ROLES = ListCheck(
    "self.all(p, p.role == 'Aggregated') || "
    "(self.exists(p, p.role == 'Prefill') && self.exists(p, p.role == 'Decode'))",
    "a fleet needs at least one Prefill and one Decode pool, or only Aggregated pools",
    _roles_fit,
)


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
    """Bounds of the pool's replicas, also for `kubectl scale` and an HPA."""

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
    return parallelism.tensor, parallelism.pipeline, parallelism.most, parallelism.ranks


_RANKS = RANKS.format("self")
_MOST = MOST_DATA.format("self")
_FACTORS = f"self.parallelism.tensor, self.parallelism.pipeline, {_MOST}"


def _ranks_and_gpus(pool: Pool) -> tuple[int, ...]:
    return *_ranks(pool), pool.resources.gpus


def _gpus(pool: Pool) -> tuple[int, ...]:
    return (pool.resources.gpus,)


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
    """Bounds of the pool's replicas, also for `kubectl scale` and an HPA."""
    rollout: PoolRollout | None = None
    """How this pool is rolled out; what it leaves out is as spec.rollout says."""
    template: Annotated[dict[str, Any] | None, ShapedLike(PodTemplate)] = None
    """Merged into the engines' pods in a cluster; the engine's container is `engine`."""

    @property
    def with_replicas_that_stay(self) -> Pool:
        """The same, where no replicas come and go."""
        return self.model_copy(update={"parallelism": self.parallelism.with_replicas_that_stay})

    def kv_ports(self, first: int, *, is_vllm: bool) -> range:
        """The ports that an instance takes for KV. A rank of vLLM is another process than its
        scheduler also where it is alone."""
        sizes, is_elastic = self.parallelism.sizes, self.parallelism.max_data is not None
        found = kv_ports(first, sizes.data, sizes.replica, is_elastic=is_elastic)
        return range(first, first + 2) if is_vllm and len(found) == 1 else found

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
        f"{_RANKS} % self.resources.gpus == 0",
        "parallelism.tensor * pipeline * data must fill whole pods, or GPUs would idle: "
        "set resources.gpus to a divisor of it",
        field="parallelism",
        numbers=Numbers(
            "%d * %d * %d = %d ranks, gpus %d",
            f"{_FACTORS}, {_RANKS}, self.resources.gpus",
            _ranks_and_gpus,
        ),
    )
    def _fills_pods(self) -> bool:
        gpus, parallelism = self.resources.gpus, self.parallelism
        # The rule before reports stages that straddle pods.
        return gpus == 0 or gpus % parallelism.tensor != 0 or parallelism.ranks % gpus == 0

    @rule(
        "self.parallelism.data <= 1 || self.resources.gpus <= 0 || self.parallelism.tensor < 1 || "
        "self.parallelism.pipeline < 1 || self.resources.gpus % self.parallelism.tensor != 0 || "
        f"{_RANKS} % self.resources.gpus != 0 || "
        "self.resources.gpus % (self.parallelism.tensor * self.parallelism.pipeline) == 0",
        "a pod holds whole replicas: set resources.gpus to a multiple of parallelism.tensor * "
        "pipeline, or lower data and raise replicas",
        field="parallelism.data",
        numbers=Numbers(
            "%d * %d * %d = %d ranks, gpus %d",
            f"{_FACTORS}, {_RANKS}, self.resources.gpus",
            _ranks_and_gpus,
        ),
    )
    def _has_whole_replicas_in_a_pod(self) -> bool:
        gpus, parallelism = self.resources.gpus, self.parallelism
        # The rules before report what does not fill pods.
        is_even = gpus > 0 and gpus % parallelism.tensor == 0 and parallelism.ranks % gpus == 0
        return parallelism.data == 1 or not is_even or gpus % parallelism.sizes.replica == 0

    @rule(
        "!has(self.parallelism.maxData) || self.resources.gpus <= 0 || "
        f"self.resources.gpus >= {_RANKS}",
        "replicas come and go in one pod: set resources.gpus to parallelism.tensor * maxData, or "
        "lower maxData and raise replicas",
        field="parallelism.maxData",
        numbers=Numbers(
            "%d * %d * %d = %d ranks, gpus %d",
            f"{_FACTORS}, {_RANKS}, self.resources.gpus",
            _ranks_and_gpus,
        ),
    )
    def _has_its_replicas_in_a_pod(self) -> bool:
        gpus, parallelism = self.resources.gpus, self.parallelism
        return parallelism.max_data is None or gpus == 0 or gpus >= parallelism.ranks

    @rule(
        "!has(self.parallelism.maxData) || self.parallelism.expert <= 1 || "
        "self.resources.gpus == 0",
        "replicas that share experts come and go only in instances on the CPU: leave maxData out, "
        "or expert",
        field="parallelism.maxData",
        numbers=Numbers("gpus %d", "self.resources.gpus", _gpus),
    )
    def _may_share_experts_anew(self) -> bool:
        parallelism = self.parallelism
        return parallelism.max_data is None or parallelism.expert <= 1 or self.resources.gpus == 0

    @rule(
        f"self.resources.gpus != 0 || {_RANKS} <= {MOST_CPU_RANKS}",
        f"an instance on the CPU is one pod of at most {MOST_CPU_RANKS} ranks: "
        "lower parallelism.tensor, pipeline or data",
        field="parallelism",
        numbers=Numbers("%d * %d * %d = %d ranks", f"{_FACTORS}, {_RANKS}", _ranks),
    )
    def _fits_a_cpu_pod(self) -> bool:
        return self.resources.gpus != 0 or self.parallelism.ranks <= MOST_CPU_RANKS

    @rule(
        "!has(self.parallelism.onRankLoss) || self.parallelism.onRankLoss != 'Continue' || "
        "(self.role != 'Prefill' && self.resources.gpus == 0)",
        "replicas go on only in instances on the CPU whose role is not Prefill: set Restart",
        field="parallelism.onRankLoss",
    )
    def _others_can_go_on(self) -> bool:
        can = self.role != "Prefill" and self.resources.gpus == 0
        return self.parallelism.on_rank_loss == "Restart" or can

    @rule(
        "!has(self.replicas) || (self.replicas >= self.scaling.minReplicas && "
        "(!has(self.scaling.maxReplicas) || self.replicas <= self.scaling.maxReplicas))",
        "replicas must lie within scaling.minReplicas and scaling.maxReplicas",
        field="replicas",
    )
    def _keeps_its_bounds(self) -> bool:
        size, least, most = self.replicas, self.scaling.min_replicas, self.scaling.max_replicas
        return size is None or (size >= least and (most is None or size <= most))

    @transition(
        "self.role == oldSelf.role",
        "a pool's role is immutable: add a new pool and remove this one",
        field="role",
    )
    def _keeps_its_role(self, before: Pool) -> bool:
        return self.role == before.role

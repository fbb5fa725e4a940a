"""What a turn of a fleet sees (FleetState), as a value.

A FleetState holds the document as parsed, the fleet's objects from the cache, and what earlier
turns learnt. The methods answer questions that have one answer; `decide` makes the decisions.

See docs/adr/0008.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from xpyd_core.errors import UserError
from xpyd_operator.controller.decision.kinds import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    JOB,
    LEADER_WORKER_SET,
    POD,
    POOL,
    SUPPORT,
    Kind,
    Obj,
    controller_of,
)
from xpyd_operator.controller.decision.writes import CreateKey, DeleteKey, Effect
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.load import read_object
from xpyd_operator.manifests.names import (
    ANNOTATION_ROTATE,
    KEY_SLOTS,
    LABEL_POOL,
    LABEL_REVISION,
    Placement,
    Settings,
    kv_secret_name,
    model_job_name,
)
from xpyd_operator.manifests.objects import kv_order
from xpyd_operator.manifests.refusals import document_mistakes
from xpyd_operator.manifests.volumes import job_digest, model_in_pod
from xpyd_operator.plan.fleet import as_it_runs
from xpyd_operator.plan.template import fleet_want
from xpyd_operator.plan.values import ROUTER, FleetSeen, FleetWant
from xpyd_operator.status.canary import CanaryReport
from xpyd_operator.status.children import (
    Children,
    count,
    fields,
    fleet_seen,
    is_leaving,
    rows,
    short,
    text,
)
from xpyd_operator.status.drains import InstanceLoad
from xpyd_operator.status.instances import ReplicaCount
from xpyd_operator.status.models import DownloadProgress, ModelState, model_state
from xpyd_operator.status.problems import is_overdue
from xpyd_operator.status.rotation import (
    KeyOrder,
    Rotation,
    RouterKeys,
    not_ours,
    progress,
    read_order,
    rotate,
)
from xpyd_operator.status.routable import Gate
from xpyd_operator.status.upgrades import Upgrade
from xpyd_operator.status.verified import NOT_LOOKED, KvVerdict

ObjectRef = tuple[Kind, str]
"""Kind and name of an object in the fleet's namespace."""


@dataclass(frozen=True)
class ParsedDocument:
    """A document as parsed. It changes only with the object's generation.

    `mistakes`: why it is not obeyed; `fleet` None: it is no fleet at all. `unknown`: the fields
    that this version does not know, and goes without.
    """

    fleet: InferenceFleet | None
    want: FleetWant
    mistakes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class AppliedVersion:
    """The version of an object that was compared with, or got an apply of, what hashes to `digest`.

    `contained`: a comparison found all of it. False after an apply, until a comparison.
    """

    uid: str
    version: str
    generation: int
    digest: str
    contained: bool = False


@dataclass(frozen=True)
class FleetState:
    """What a turn of a fleet sees.

    `taken`: names that another owner's object holds. `settled`: what was applied or compared
    before, so that it is not repeated in vain. `contested`: effects that another client undoes each
    time; their writes pause for a while.

    `children` is the cache's own: a FleetState is good until the next await.
    """

    document: Obj
    parsed: ParsedDocument
    children: Mapping[Kind, Mapping[str, Obj]]
    settings: Settings
    served: frozenset[Kind]
    now: str
    taken: Mapping[ObjectRef, str] = field(default_factory=dict[ObjectRef, str])
    settled: Mapping[ObjectRef, AppliedVersion] = field(
        default_factory=dict[ObjectRef, AppliedVersion]
    )
    contested: frozenset[Effect] = frozenset()
    wants_key: bool = False
    ages: Mapping[str, float] = field(default_factory=dict[str, float])
    """For how many seconds the state of each pod has been seen, by the pod's uid."""
    kv: KvVerdict = NOT_LOOKED
    """What the routers' counts say of the fleet's KV."""
    has_pair: bool | None = None
    """Whether a router has instances that can serve a request; None: none has said."""
    keys: Mapping[str, RouterKeys] = field(default_factory=dict[str, RouterKeys])
    """What each router says of keys, by its pod."""
    loads: Mapping[str, InstanceLoad] = field(default_factory=dict[str, InstanceLoad])
    """What instances that leave still have, by pod, as routers say."""
    routers_canary: CanaryReport = field(default_factory=CanaryReport)
    """What routers say of a canary."""
    gates: Mapping[str, Gate] = field(default_factory=dict[str, Gate])
    """What the readiness gates of pods should be, by their uid; one that is left out stays as it
    is."""
    replicas: Mapping[str, ReplicaCount] = field(default_factory=dict[str, ReplicaCount])
    """The replicas that instances have, by pod, as routers say, where these come and go."""
    busy: Mapping[str, InstanceLoad] | None = None
    """What every instance has, as routers just said, where one of several has to go."""
    cordoned: frozenset[str] | None = frozenset()
    """Nodes that take no new pods; None: the operator may not read nodes."""
    made_keys: Mapping[str, str] = field(default_factory=dict[str, str])
    """The ids of keys that this process made, by slot."""
    deleted_key: str = ""
    """The slot whose Secret it deleted last."""
    progress: DownloadProgress | None = None
    """How far the pod of the Job is that downloads the model, as it says."""
    operator: str = ""
    """The release of this operator, for the fleet's mark; "": it has none."""
    upgrade: Upgrade | None = None
    """The defaults that the fleet's pods are made with, which `settings` has."""
    kept: frozenset[tuple[str, str]] = frozenset()
    """Pools and revisions as another version of the operator made them: they are only scaled."""

    @property
    def uid(self) -> str:
        """The document's uid."""
        return str(self.document["metadata"]["uid"])

    @property
    def placement(self) -> Placement:
        """Where the fleet's objects are rendered to."""
        return Placement(self.document["metadata"]["namespace"], self.uid, self.settings)

    @cached_property
    def own(self) -> Children:
        """The children without those that another owner controls, such as a deleted fleet's."""
        return replace(own_children(self.uid, self.children), cordoned=self.cordoned or frozenset())

    @cached_property
    def seen(self) -> FleetSeen:
        """What plan() looks at."""
        return fleet_seen(self.own, fields(self.document, "status"))

    @property
    def seen_leaving(self) -> FleetSeen:
        """The same of a fleet that is being deleted, without routers' pods that should have been
        gone: where a node is lost, engines do not wait for it, and give their GPUs back."""
        overdue = Counter(
            text(pod, "metadata", "labels", LABEL_REVISION)
            for pod in self.own.pods
            if text(pod, "metadata", "labels", LABEL_POOL) == ROUTER
            and is_leaving(pod)
            and is_overdue(pod, self.ages.get(text(pod, "metadata", "uid"), 0.0))
        )
        found = (
            replace(one, alive=max(0, one.alive - overdue[one.workload.revision]))
            if one.workload.pool == ROUTER
            else one
            for one in self.seen.workloads
        )
        return replace(self.seen, workloads=tuple(found))

    @cached_property
    def want(self) -> FleetWant:
        """What the turn works towards: the document, or what runs where it has mistakes."""
        parsed = self.parsed
        if parsed.fleet is not None and not parsed.mistakes and self.waits_for_model:
            return as_it_runs(parsed.want, self.seen, _running(self.seen))
        if parsed.fleet is None or not parsed.mistakes:
            return parsed.want
        last = rows(self.document, "status", "pools")
        admitted = {
            text(row, "name"): (text(row, "revision"), count(row, "replicas"))
            for row in last
            if text(row, "revision")
        }
        return as_it_runs(parsed.want, self.seen, admitted)

    @property
    def is_held(self) -> bool:
        """Whether the document is not obeyed: it has mistakes, and wants pods that do not run."""
        is_wrong = self.parsed.fleet is None or bool(self.parsed.mistakes)
        return self.parsed.fleet is None or (is_wrong and self.want != self.parsed.want)

    @cached_property
    def pools_paused(self) -> frozenset[str]:
        """The pools of which another revision than the document's runs, where it says paused."""
        wanted = {(pool.name, pool.revision) for pool in self.want.pools}
        runs = (one for one in self.seen.workloads if one.workload.replicas or one.alive)
        others = {(one.workload.pool, one.workload.revision) for one in runs} - wanted
        return frozenset(pool for pool, _ in others) if self.want.paused else frozenset()

    @property
    def is_paused(self) -> bool:
        """Whether the document pauses a rollout that is under way, or would begin."""
        return bool(self.pools_paused)

    @property
    def holds_back(self) -> bool:
        """Whether pods of the document wait: for its mistakes to be mended, or for its model."""
        return self.is_held or self.want != self.parsed.want

    @cached_property
    def model(self) -> ModelState | None:
        """The download of the document's model into its claim; None: no Job downloads it."""
        fleet = self.parsed.fleet
        if fleet is None or not fleet.spec.model.by_job:
            return None
        name = model_job_name(fleet.name, job_digest(fleet))
        job = next((job for job in self._own(JOB) if text(job, "metadata", "name") == name), None)
        return model_state(job, self.own.pods, self.progress, self.ages)

    @cached_property
    def rotation(self) -> Rotation | None:
        """What is due for the fleet's key; None: it has none of the operator's."""
        fleet, asked = self.parsed.fleet, asked_rotation(self.document)
        if fleet is None:
            return None
        if not fleet.spec.kv_transfer.has_own_key:
            insecure = fleet.spec.kv_transfer.insecure
            return Rotation(KeyOrder(), verdict=not_ours(insecure=insecure)) if asked else None
        order = key_order(self.document, self.children)
        found = progress(order, self.own.pods, self.keys)
        return rotate(
            order,
            asked=asked,
            made=self.made_keys,
            deleted=self.deleted_key,
            found=found,
            now=self.now,
        )

    @property
    def key_changes(self) -> tuple[tuple[CreateKey | DeleteKey, ...], tuple[Obj, ...]]:
        """Secrets with keys to make or to delete first, and the ConfigMap with their order. A
        rotation waits while the document is held back."""
        fleet, rotation = self.parsed.fleet, self.rotation
        if fleet is None or rotation is None or not fleet.spec.kv_transfer.has_own_key:
            return (), ()
        order = rotation.order
        writes: list[CreateKey | DeleteKey] = []
        if self.wants_key:
            writes.append(CreateKey(order.files[0]))
        if rotation.create and not self.holds_back:
            writes.append(CreateKey(rotation.create, anew=True))
        if rotation.delete and not self.holds_back:
            writes.append(DeleteKey(rotation.delete))
        return tuple(writes), (kv_order(fleet, self.placement, order.files, order.annotations),)

    @property
    def waits_for_model(self) -> bool:
        """Whether engines of the document's model cannot start yet."""
        return self.model is not None and not self.model.is_ready

    def _own(self, kind: Kind) -> tuple[Obj, ...]:
        return _own(self.uid, self.children, kind)


def own_children(uid: str, children: Mapping[Kind, Mapping[str, Obj]]) -> Children:
    """The children of the fleet of that uid, without those that another owner controls."""
    return Children(
        deployments=_own(uid, children, DEPLOYMENT),
        leader_worker_sets=_own(uid, children, LEADER_WORKER_SET),
        pods=tuple(children.get(POD, {}).values()),
        pools=_own(uid, children, POOL),
        others=tuple(obj for kind in SUPPORT for obj in _own(uid, children, kind)),
        records=tuple(
            obj
            for obj in children.get(CONTROLLER_REVISION, {}).values()
            if controller_of(obj) == uid
        ),
    )


def _own(uid: str, children: Mapping[Kind, Mapping[str, Obj]], kind: Kind) -> tuple[Obj, ...]:
    found = children.get(kind, {}).values()
    return tuple(obj for obj in found if controller_of(obj) in (None, uid))


def asked_rotation(document: Obj) -> str:
    """The document's wish for another key."""
    return short(text(document, "metadata", "annotations", ANNOTATION_ROTATE))


def key_order(document: Obj, children: Mapping[Kind, Mapping[str, Obj]]) -> KeyOrder:
    """The order of the fleet's keys as the cluster has it."""
    metadata = document["metadata"]
    first, second = (kv_secret_name(metadata["name"], metadata["uid"], s) for s in KEY_SLOTS)
    found = children.get(CONFIG_MAP, {}).get(first)
    if found is not None and controller_of(found) != metadata["uid"]:
        found = None
    is_second = text(document, "status", "kvKeySecret") == second
    return read_order(found, secret_is_second=is_second, asked=asked_rotation(document))


def signing_secret(document: Obj, children: Mapping[Kind, Mapping[str, Obj]]) -> str:
    """The name of the operator's Secret with the key that signs."""
    metadata, order = document["metadata"], key_order(document, children)
    return kv_secret_name(metadata["name"], metadata["uid"], order.files[0])


def _running(seen: FleetSeen) -> dict[str, tuple[str, int]]:
    """The pools that have instances, with their largest revision and its size: what goes on."""
    found: dict[str, tuple[str, int]] = {}
    for one in sorted(seen.workloads, key=lambda one: (one.ready, one.workload.replicas)):
        found[one.workload.pool] = one.workload.revision, one.workload.replicas
    return found


def read(document: Obj, settings: Settings) -> ParsedDocument:
    """Parse the document. Never raises: errors become mistakes."""
    name = str(document["metadata"]["name"])
    try:
        fleet, unknown = read_object(document)
    except UserError as error:
        # The first line counts them.
        mistakes = tuple(line.strip() for line in str(error).splitlines()[1:])
        return ParsedDocument(None, FleetWant(name, ()), mistakes or (str(error),))
    want = fleet_want(
        fleet,
        model=model_in_pod(fleet),
        in_cluster=True,
        image=settings.worker_image,
        router_image=settings.router_image,
        gated=settings.gated,
    )
    return ParsedDocument(fleet, want, document_mistakes(fleet, settings.worker_image), unknown)


def applied_version_of(obj: Obj, digest: str, *, contained: bool = False) -> AppliedVersion:
    """The AppliedVersion of an object as it is."""
    metadata = obj["metadata"]
    return AppliedVersion(
        str(metadata["uid"]),
        str(metadata.get("resourceVersion", "")),
        int(metadata.get("generation") or 0),
        digest,
        contained,
    )

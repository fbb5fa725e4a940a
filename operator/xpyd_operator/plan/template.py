"""Builds what is wanted from the document: one template for each pool and one for the router.

A template holds what the document says and nothing about the place. Addresses, names, threads and
sizes that the document leaves open are the shell's, so that another place is no new revision.
Defaults are left out of `pod`, so that a later version with more fields is no new revision either.
"""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

from pydantic import BaseModel

from xpyd_core.checkpoints import own_name
from xpyd_core.parallel.checks import DATA, DATA_FILE, ELASTIC, EXPERT, ON_LOSS, PIPELINE, TENSOR
from xpyd_operator.document.engine import has_whole_experts
from xpyd_operator.document.engines import Model, Pool
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.parallelism import Parallelism
from xpyd_operator.document.router import Router
from xpyd_operator.document.transfer import KvTransfer
from xpyd_operator.plan.values import MOST_REPLICAS, ROUTER, FleetWant, PoolWant, Template
from xpyd_operator.plan.vllm import beats_args, beats_itself, serve_args, variables

INSECURE_FLAG = "--kv-insecure"
"""The argument of engines and routers of a fleet without a key."""
REPLICAS_FOLDER, REPLICAS_FILE = "/etc/xpyd/replicas", "data"
"""Where a pod has its annotation with the number of replicas."""
_OF_ONE_ROLE = (
    *("--role=", "--kv-mode=", "--kv-buffer-size=", "--kv-host-pool-size="),
    "--kv-transfer-config=",
)
"""Arguments that a change may alter in Prefill pools alone."""
_TRANSPORTS = {"TCP": "tcp", "UDS": "uds", "SharedMemory": "shm"}
"""The document's names -> the worker's."""


def fleet_want(
    fleet: InferenceFleet,
    *,
    model: str,
    in_cluster: bool = False,
    image: str = "",
    router_image: str = "",
    stopping: bool = False,
    gated: bool = False,
) -> FleetWant:
    """What the document wants.

    `model`: what its URI means where the fleet runs. Elsewhere than in a cluster there is one
    address for the router and so one router, whose successor waits for its end. `image` and
    `router_image`: where the document names none; "" where pods have no image. `gated`: engines'
    pods have the readiness gate.
    """
    router, of_all = router_template(fleet, image=router_image), fleet.spec.rollout
    routers, surge, missing = 1, 0, 100
    if in_cluster:
        routers = fleet.spec.router.replicas
        surge, missing = of_all.bounds_of(None)
    pools = [PoolWant(ROUTER, router, revision_of(router), routers, surge, missing)]
    common = fleet_revision_of(fleet, model=model, image=image)
    for pool in fleet.spec.pools:
        if not in_cluster:  # nobody says to a local engine how many replicas it should have
            pool = pool.with_replicas_that_stay
        template = engine_template(fleet, pool, model=model, image=image)
        if pool.role != "Aggregated":
            template = replace(template, fleet_revision=common)
        template = replace(template, gated=gated)
        bounds = pool.scaling
        pools.append(
            PoolWant(
                pool.name,
                template,
                revision_of(template),
                pool.replicas,
                *of_all.bounds_of(pool.rollout),
                least=bounds.min_replicas,
                most=MOST_REPLICAS if bounds.max_replicas is None else bounds.max_replicas,
            )
        )
    return FleetWant(fleet.name, tuple(pools), stopping, in_cluster and of_all.paused)


def revision_of(template: Template) -> str:
    """8 hex digits over all that defines the pods."""
    parts: tuple[object, ...] = (
        template.role, template.args, template.env, template.image, template.pod,
    )  # fmt: skip
    if template.beats:  # left out where there are none: revisions are older than this field
        parts = (*parts, template.beats)
    if template.gated:  # as these
        parts = (*parts, "gated")
    return sha256(json.dumps(parts).encode()).hexdigest()[:8]


def fleet_revision_of(fleet: InferenceFleet, *, model: str, image: str = "") -> str:
    """8 hex digits over what defines the pods of every Prefill and Decode pool alike; routers pair
    instances where they are equal (docs/adr/0097).

    They are of a pool that says nothing of its own, without the flags of its role. So all pools of
    a document have the same, and a change that leaves a pool's pods as they are never makes others.
    """
    spec, pool = fleet.spec, Pool(name="pool", role="Prefill")
    template = engine_template(fleet, pool, model=model, image=image)
    args = tuple(arg for arg in template.args if not arg.startswith(_OF_ONE_ROLE))
    if spec.engine.type == "VLLM":  # whose transfer is one flag, with the role in it
        kv = spec.kv_transfer
        known: tuple[object, ...] = (kv.on_failure, kv.lease_seconds)
        if not spec.engine.is_nixl:
            beats_ms = spec.heartbeat.interval_milliseconds
            known += (kv.wait_seconds, kv.encryption, kv.insecure, beats_ms)
        args += tuple(map(str, known))
    return revision_of(replace(template, args=args))


def engine_template(fleet: InferenceFleet, pool: Pool, *, model: str, image: str = "") -> Template:
    """The engine's flags and environment; the document's own args come last and so win."""
    spec = fleet.spec
    env = [(item.name, item.value) for item in spec.engine.env if item.value_from is None]
    env.append(("XPYD_KV_PORT", str(spec.kv_transfer.port)))
    if spec.engine.type == "VLLM":
        return Template(
            pool.role,
            (*serve_args(spec, pool, model=model), *_parallel_args(pool), *spec.engine.args),
            tuple({**dict(env), **variables(spec, pool)}.items()),
            spec.engine.image,
            # Heartbeats beside it come from the operator's own image.
            _engine_pod(
                fleet,
                pool,
                beats_image="" if beats_itself(spec, pool) else image,
                download_image=image if spec.model.by_pods else "",
            ),
            beats_args(spec, pool),
            is_vllm=True,
            tls=_tls(fleet),
        )
    args = [f"--model={model}"]
    if spec.model.revision and not spec.model.is_folder_of(model):
        args.append(f"--revision={spec.model.revision}")
    if served := _served_names(spec.model, model):
        args += ["--served-model-name", *served]
    # Not auto: an engine without a GPU of its own may still see one, and an engine that should have
    # a GPU and sees none must fail.
    device = "cuda" if pool.resources.gpus else "cpu"
    args += [f"--role={pool.role}", f"--device={device}", *_parallel_args(pool)]
    if pool.role != "Aggregated":
        args += _kv_args(spec.kv_transfer, pool.role)
    args += _key_args(spec.kv_transfer)
    args += [
        f"--heartbeat-period-ms={spec.heartbeat.interval_milliseconds}",
        f"--drain-timeout={spec.drain.timeout_seconds}",
    ]
    return Template(
        pool.role,
        (*args, *spec.engine.args),
        tuple(env),
        spec.engine.image or image,
        # Where engines have the same image, that says it.
        _engine_pod(
            fleet,
            pool,
            download_image=image if spec.model.by_pods and spec.engine.image else "",
        ),
        tls=_tls(fleet),
    )


def _tls(fleet: InferenceFleet) -> int:
    """See Template.tls: routers and engines of one document have the same."""
    tls = fleet.spec.engine.tls
    return 0 if tls is None else 2 if tls.router_secret_name else 1


def _served_names(model: Model, given: str) -> tuple[str, ...]:
    """The names that requests may use; a downloaded model's folder has another name than it."""
    if model.served_names or not model.is_folder_of(given):
        return model.served_names
    return (own_name(model.uri),)


def _parallel_args(pool: Pool) -> list[str]:
    """vLLM's flags. Left out at 1, so that an instance of one rank keeps its revision. How many
    replicas there are of those that may come and go, the pod's annotation says (docs/adr/0134)."""
    of = pool.parallelism
    sizes = {TENSOR: of.tensor, PIPELINE: of.pipeline, DATA: 1 if of.max_data else of.data}
    experts = [EXPERT] if of.expert > 1 else []
    elastic = [ELASTIC, f"{DATA_FILE}={REPLICAS_FOLDER}/{REPLICAS_FILE}"] if of.max_data else []
    on_loss = [f"{ON_LOSS}=continue"] if of.on_rank_loss == "Continue" else []
    given = [f"{flag}={size}" for flag, size in sizes.items() if size > 1]
    return [*given, *experts, *elastic, *on_loss]


def layout_of(template: Template) -> str:
    """How an instance of the template splits the model, for people; "" for a router."""
    if template.role == ROUTER:
        return ""
    flags = (TENSOR, PIPELINE, DATA)
    given = dict(arg.split("=", 1) for arg in template.args if arg.split("=")[0] in flags)
    tensor, pipeline, data = (int(given.get(flag, 1)) for flag in flags)
    expert = tensor * data if has_whole_experts(template.args) else 1
    return Parallelism(tensor=tensor, pipeline=pipeline, data=data, expert=expert).layout


def _kv_args(kv: KvTransfer, role: str) -> list[str]:
    args = [
        f"--kv-wait-seconds={kv.wait_seconds}",
        f"--kv-lease-seconds={kv.lease_seconds}",
        f"--kv-on-failure={kv.on_failure.lower()}",
    ]
    if kv.mode != "PutAsync" and role == "Prefill":  # D does what P says
        args.append(f"--kv-mode={kv.mode.lower()}")
    if kv.transport != "Auto":
        args.append(f"--kv-transport={_TRANSPORTS[kv.transport]}")
    if kv.encryption != "None":
        args.append(f"--kv-encryption={kv.encryption.lower()}")
    if kv.keeps_kv(role):
        args.append(f"--kv-buffer-size={kv.buffer_size}")
        if kv.host_pool_size is not None:
            args.append(f"--kv-host-pool-size={kv.host_pool_size}")
    return args


def _key_args(kv: KvTransfer) -> list[str]:
    return [INSECURE_FLAG] if kv.insecure else []


def _policy_args(router: Router) -> list[str]:
    """Left out where they are the router's own default."""
    explicit = _explicit(router, only={"policy", "prefill_policy", "decode_policy"})
    flags = {"policy": "policy", "prefillPolicy": "prefill-policy", "decodePolicy": "decode-policy"}
    return [f"--{flag}={explicit[field]}" for field, flag in flags.items() if field in explicit]


def _serving_args(router: Router) -> list[str]:
    """Only values that differ from the router's own defaults, so that an upgrade restarts no
    router."""
    limits, queue, slo, default = router.limits, router.queue, router.slo, Router()
    flags = {
        "--processes": (router.processes, default.processes),
        "--slo-ttft-ms": (slo.ttft_milliseconds, None),
        "--slo-itl-ms": (slo.itl_milliseconds, None),
        "--local-prefill-tokens": (router.local_prefill_tokens, default.local_prefill_tokens),
        "--on-no-prefill": (router.on_no_prefill, default.on_no_prefill),
        "--on-no-decode": (router.on_no_decode, None),
        "--max-concurrent-requests": (limits.requests, None),
        "--max-concurrent-tokens": (limits.tokens, None),
        "--queue-size": (queue.size, default.queue.size),
        "--queue-bytes": (queue.memory, default.queue.memory),
        "--queue-timeout-seconds": (queue.timeout_seconds, default.queue.timeout_seconds),
    }
    return [f"{flag}={value}" for flag, (value, usual) in flags.items() if value != usual]


def router_template(fleet: InferenceFleet, *, image: str = "") -> Template:
    """The router's flags."""
    spec = fleet.spec
    args = (
        f"--heartbeat-interval-ms={spec.heartbeat.interval_milliseconds}",
        f"--missed-beats={spec.heartbeat.missed_beats}",
        *_policy_args(spec.router),
        *(["--accept-unsigned-beats"] if spec.heartbeat.accept_unsigned else []),
        *_serving_args(spec.router),
        *([] if spec.rollout.pairing == "SameRevision" else [f"--pairing={spec.rollout.pairing}"]),
        *(["--kv-verify=strict"] if spec.kv_transfer.verify == "Strict" else []),
        *_key_args(spec.kv_transfer),
        *spec.router.args,
    )
    pod = _canonical(
        {
            **_shared(fleet),
            "drain": _explicit(spec.drain),
            "auth": _explicit(spec.router.auth),
            "adminKeySecretRef": _explicit(spec.router.admin_key_secret_ref),
            "tls": _explicit(spec.router.tls),
            "engineTls": _explicit(spec.engine.tls),
            "canary": spec.rollout.canary is not None,
            "template": spec.router.template,
        }
    )
    return Template(ROUTER, args, image=image, pod=pod, tls=_tls(fleet))


def _engine_pod(
    fleet: InferenceFleet, pool: Pool, *, beats_image: str = "", download_image: str = ""
) -> str:
    """The parts of an engine's pod that are neither flags nor plain variables."""
    model, env, kv = fleet.spec.model, fleet.spec.engine.env, fleet.spec.kv_transfer
    # The order matters: a variable's value may refer to those before it.
    sources = [_explicit(item) for item in env] if any(item.value_from for item in env) else []
    return _canonical(
        {
            **_shared(fleet),
            "sameHostPath": "" if pool.role == "Aggregated" else kv.socket_folder,
            "resources": _explicit(pool.resources),
            "maxData": pool.parallelism.max_data,
            # Engines mount what a Job writes read-only in any case.
            "cache": _explicit(model.cache, only={"type", "claim_name"} if model.by_job else None),
            # A Job's credentials are in no engine.
            "secretRef": {} if model.by_job else _explicit(model.secret_ref),
            "claim": model.uri if model.uri.startswith("pvc://") else "",
            "env": sources,
            "tls": _explicit(fleet.spec.engine.tls),
            "template": pool.template,
            "beatsImage": beats_image,
            "downloadImage": download_image,
        }
    )


def _shared(fleet: InferenceFleet) -> dict[str, Any]:
    """What the router and the engines share: how they find and trust each other, when they were
    restarted."""
    return {
        "router": _explicit(fleet.spec.router, only={"discovery_port"}),
        "keySecretRef": _explicit(fleet.spec.kv_transfer.key_secret_ref),
        "restartedAt": fleet.spec.rollout.restarted_at,
    }


def _explicit(part: BaseModel | None, *, only: set[str] | None = None) -> dict[str, Any]:
    """The document's values that differ from the defaults; of the fields in `only`, if given."""
    if part is None:
        return {}
    return part.model_dump(mode="json", by_alias=True, exclude_defaults=True, include=only)


def _canonical(parts: dict[str, Any]) -> str:
    """One text for one meaning; "" where all parts are empty."""
    given = {name: part for name, part in parts.items() if part}
    return json.dumps(given, sort_keys=True, separators=(",", ":")) if given else ""

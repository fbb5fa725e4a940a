"""From the document to what is wanted: one template for each pool and one for the router. Pure.

A template holds what the document says and nothing of the machine: addresses, threads and sizes
that the document leaves open are the shell's, so that another place is no new revision.
"""

from __future__ import annotations

import json
from hashlib import sha256

from xpyd_operator.api.fleet import InferenceFleet, KvTransfer, Pool
from xpyd_operator.plan.values import ROUTER, FleetWant, PoolWant, Template


def fleet_want(fleet: InferenceFleet, *, model: str, stopping: bool = False) -> FleetWant:
    """What the document wants. `model`: what its URI means where the fleet runs."""
    router = router_template(fleet)
    pools = [PoolWant(ROUTER, router, revision_of(router), replicas=1, surge=0)]
    for pool in fleet.spec.pools:
        template = engine_template(fleet, pool, model=model)
        pools.append(PoolWant(pool.name, template, revision_of(template), pool.replicas))
    return FleetWant(fleet.name, tuple(pools), stopping)


def revision_of(template: Template) -> str:
    """8 hex digits over what defines the pods."""
    text = json.dumps([template.role, template.args, template.env])
    return sha256(text.encode()).hexdigest()[:8]


def engine_template(fleet: InferenceFleet, pool: Pool, *, model: str) -> Template:
    """The worker's flags and environment; the document's own args come last and so win."""
    spec = fleet.spec
    args = [f"--model={model}"]
    if spec.model.revision:
        args.append(f"--revision={spec.model.revision}")
    if spec.model.served_names:
        args += ["--served-model-name", *spec.model.served_names]
    args.append(f"--role={pool.role}")
    if pool.role != "Aggregated":
        args += _kv_args(spec.kv_transfer, receives=pool.role == "Decode")
    args += [
        f"--heartbeat-period-ms={spec.heartbeat.interval_milliseconds}",
        f"--drain-timeout={spec.drain.timeout_seconds}",
    ]
    env = [(variable.name, variable.value) for variable in spec.engine.env]
    env.append(("XPYD_KV_PORT", str(spec.kv_transfer.port)))
    return Template(pool.role, (*args, *spec.engine.args), tuple(env))


def _kv_args(kv: KvTransfer, *, receives: bool) -> list[str]:
    args = [
        f"--kv-wait-seconds={kv.wait_seconds}",
        f"--kv-lease-seconds={kv.lease_seconds}",
        f"--kv-on-failure={kv.on_failure.lower()}",
    ]
    if receives:
        args.append(f"--kv-buffer-size={kv.buffer_size}")
        if "host_pool_size" in kv.model_fields_set:
            args.append(f"--kv-host-pool-size={kv.host_pool_size}")
    return args


def router_template(fleet: InferenceFleet) -> Template:
    """The router's flags."""
    heartbeat = fleet.spec.heartbeat
    return Template(
        ROUTER,
        (
            f"--heartbeat-interval-ms={heartbeat.interval_milliseconds}",
            f"--missed-beats={heartbeat.missed_beats}",
        ),
    )

"""The command line and the variables of `vllm serve` for one pool, and the heartbeats beside it.

What only the pod knows is a variable that Kubernetes puts in: `$(XPYD_POD_IP)`. See docs/vllm.md,
docs/adr/0050 and docs/adr/0054.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from xpyd_core.checkpoints import own_name
from xpyd_core.pod_env import HTTP_PORT
from xpyd_core.sizes import parse_bytes
from xpyd_operator.document.engine import NIXL_PORT, PLUGIN, PLUGINS
from xpyd_operator.document.engines import Pool
from xpyd_operator.document.fleet import Spec
from xpyd_operator.document.transfer import KvTransfer

POD_IP = "$(XPYD_POD_IP)"
KEY_FILE = "$(XPYD_KV_KEY_FILE)"
SOCKET_VARIABLE = "XPYD_KV_SOCKET_DIR"
SOCKET_DIR = f"$({SOCKET_VARIABLE})"
POOL_BYTES = 4 << 30
"""Of a D whose document does not say hostPoolSize."""
_COUNTS_OUTPUT = (
    *("--generation-config", "--override-generation-config"),
    *("--logits-processors", "--watermark-config"),
)
_MODES = {"PutAsync": "put_async", "Put": "put", "Get": "get"}
_ROLES = {"Prefill": "kv_producer", "Decode": "kv_consumer"}


def serve_args(spec: Spec, pool: Pool, *, model: str) -> list[str]:
    """What follows `vllm serve`, without the document's own args."""
    found = model.removeprefix("hf://")
    # Else vLLM's name of a checkpoint would be its path; a downloaded one's is that of its source.
    is_other = spec.model.is_folder_of(model)
    name = own_name(spec.model.uri if is_other else model)
    args = [found, "--served-model-name", *(spec.model.served_names or (name,))]
    if spec.model.revision and not is_other:
        args.append(f"--revision={spec.model.revision}")
    args += [
        f"--host={POD_IP}",
        f"--port={HTTP_PORT}",
        # 0 ends requests at once, as drain.timeoutSeconds 0 does.
        f"--shutdown-timeout={spec.drain.timeout_seconds}",
    ]
    if pool.role != "Aggregated":
        transfer = _of_nixl(spec, pool) if spec.engine.is_nixl else _of_xpyd(spec, pool)
        config = json.dumps(transfer, separators=(",", ":"))
        args.append(f"--kv-transfer-config={config}")
    return args


def beats_itself(spec: Spec, pool: Pool) -> bool:
    """Whether xpyd's plugin in vLLM's API server sends the heartbeats: it needs the connector."""
    return spec.engine.connector == "Xpyd" and pool.role != "Aggregated"


def variables(spec: Spec, pool: Pool) -> dict[str, str]:
    """What the fleet sets in vLLM's environment; the document's own value of PLUGINS is in it."""
    if pool.role == "Aggregated":
        return {}
    if spec.engine.is_nixl:
        return {NIXL_PORT: str(spec.kv_transfer.port)}
    given = next((item.value for item in spec.engine.env if item.name == PLUGINS), "")
    return {PLUGINS: f"{given},{PLUGIN}" if given else PLUGIN}


def beats_args(spec: Spec, pool: Pool) -> tuple[str, ...]:
    """The flags of `xpyd vllm-beats`; () where it does not run."""
    if beats_itself(spec, pool):
        return ()
    is_nixl = spec.engine.is_nixl and pool.role != "Aggregated"
    return (
        f"--heartbeat-period-ms={spec.heartbeat.interval_milliseconds}",
        f"--drain-timeout={spec.drain.timeout_seconds}",
        *(("--dialect=nixl", f"--compat={_in_common(spec)}") if is_nixl else ()),
        *(("--no-prompt-ids",) if is_nixl and _counts_output(spec.engine.args) else ()),
        *(("--kv-insecure",) if spec.kv_transfer.insecure else ()),
    )


def _in_common(spec: Spec) -> str:
    """16 hex digits over what the document says of the model and of every engine. NixlConnector
    does not compare it, and pods of two documents are up at once while a change is rolled out: of
    different ones KV would mean something else (docs/adr/0073)."""
    parts = [
        part.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        for part in (spec.model, spec.engine)
    ]
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _counts_output(args: Sequence[str]) -> bool:
    """Whether vLLM may have a cap on tokens, penalties or processors of its own by these flags,
    which look at the output alone: docs/adr/0063. vLLM takes flags cut short, too. What the
    checkpoint itself says is not known."""
    names = {arg.partition("=")[0].partition(".")[0].replace("_", "-") for arg in args}
    return any(
        flag.startswith(name)
        for name in names
        if name.startswith("--") and name != "--"
        for flag in _COUNTS_OUTPUT
    )


def _of_nixl(spec: Spec, pool: Pool) -> dict[str, Any]:
    kv = spec.kv_transfer
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        # On a GPU it is vLLM's default.
        **({} if pool.resources.gpus else {"kv_buffer_device": "cpu"}),
        "kv_load_failure_policy": kv.on_failure.lower(),
        "kv_connector_extra_config": {"kv_lease_duration": kv.lease_seconds},
    }


def _transports(kv: KvTransfer, *, on_gpu: bool) -> dict[str, Any]:
    """The connector's options; none: TCP alone. A pod of a cluster has a folder for sockets only
    where the document names one."""
    if kv.transport == "UDS":
        return {"transports": ["uds"], "socket_dir": SOCKET_DIR}
    if kv.transport == "TCP":
        return {}
    # cuda_ipc is tried only in one IPC namespace, which pods share with hostIPC alone.
    names = [
        *(["cuda_ipc"] if on_gpu else []),
        *(["uds"] if kv.socket_folder else []),
        "tcp",
    ]
    folder = {"socket_dir": SOCKET_DIR} if kv.socket_folder else {}
    return {"transports": names, **folder} if len(names) > 1 else {}


def _of_xpyd(spec: Spec, pool: Pool) -> dict[str, Any]:
    kv, role = spec.kv_transfer, pool.role
    extra: dict[str, Any] = {"host": POD_IP}
    extra |= {"insecure": True} if kv.insecure else {"key_file": KEY_FILE}
    extra |= {"wait_s": kv.wait_seconds, "lease_s": kv.lease_seconds}
    extra["heartbeat_period_s"] = spec.heartbeat.interval_milliseconds / 1000
    extra |= _transports(kv, on_gpu=pool.resources.gpus > 0)
    if kv.encryption != "None":
        extra["encryption"] = kv.encryption.lower()
    if kv.mode != "PutAsync" and role == "Prefill":  # D does what P says
        extra["mode"] = _MODES[kv.mode]
    if kv.keeps_kv(role):
        # The operator does not know the size of vLLM's cache: of a percentage there is nothing.
        if not kv.buffer_size.endswith("%"):
            extra["buffer_bytes"] = parse_bytes(kv.buffer_size)
        host_pool = kv.host_pool_size
        extra["pool_bytes"] = POOL_BYTES if host_pool is None else parse_bytes(host_pool)
    policy = "recompute"
    if kv.on_failure == "Fail":
        policy, extra["fail_without_kv"] = "fail", True
    return {
        "kv_connector": "XpydConnector",
        "kv_connector_module_path": "xpyd_kv.vllm.connector",
        "kv_role": _ROLES[role],
        "kv_port": kv.port,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }

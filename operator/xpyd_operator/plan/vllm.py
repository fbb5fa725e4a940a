"""The command line of `vllm serve` for one pool, and that of the heartbeats beside it.

What only the pod knows is a variable that Kubernetes puts in: `$(XPYD_POD_IP)`. See docs/vllm.md
and docs/adr/0050.
"""

from __future__ import annotations

import json
from typing import Any

from xpyd_core.pod_env import HTTP_PORT
from xpyd_core.sizes import parse_bytes
from xpyd_operator.document.engines import Pool
from xpyd_operator.document.fleet import KvTransfer, Spec

POD_IP = "$(XPYD_POD_IP)"
KEY_FILE = "$(XPYD_KV_KEY_FILE)"
_POOL_BYTES = 4 << 30
_MODES = {"PutAsync": "put_async", "Put": "put", "Get": "get"}
_ROLES = {"Prefill": "kv_producer", "Decode": "kv_consumer"}


def serve_args(spec: Spec, pool: Pool, *, model: str) -> list[str]:
    """What follows `vllm serve`, without the document's own args."""
    found = model.removeprefix("hf://")
    # Else vLLM's name of a checkpoint would be its path.
    own_name = found if model.startswith("hf://") else found.rstrip("/").rpartition("/")[2]
    args = [found, "--served-model-name", *(spec.model.served_names or (own_name,))]
    if spec.model.revision:
        args.append(f"--revision={spec.model.revision}")
    args += [
        f"--host={POD_IP}",
        f"--port={HTTP_PORT}",
        # 0 ends requests at once, as drain.timeoutSeconds 0 does.
        f"--shutdown-timeout={spec.drain.timeout_seconds}",
    ]
    if pool.role != "Aggregated":
        config = json.dumps(_transfer(spec.kv_transfer, pool.role), separators=(",", ":"))
        args.append(f"--kv-transfer-config={config}")
    return args


def beats_args(spec: Spec) -> tuple[str, ...]:
    """The flags of `xpyd vllm-beats`."""
    return (
        f"--heartbeat-period-ms={spec.heartbeat.interval_milliseconds}",
        f"--drain-timeout={spec.drain.timeout_seconds}",
        *(("--kv-insecure",) if spec.kv_transfer.insecure else ()),
    )


def _transfer(kv: KvTransfer, role: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"host": POD_IP}
    extra |= {"insecure": True} if kv.insecure else {"key_file": KEY_FILE}
    extra |= {"wait_s": kv.wait_seconds, "lease_s": kv.lease_seconds}
    if kv.mode != "PutAsync" and role == "Prefill":  # D does what P says
        extra["mode"] = _MODES[kv.mode]
    if kv.keeps_kv(role):
        # The operator does not know the size of vLLM's cache: of a percentage there is nothing.
        if not kv.buffer_size.endswith("%"):
            extra["buffer_bytes"] = parse_bytes(kv.buffer_size)
        host_pool = kv.host_pool_size
        extra["pool_bytes"] = _POOL_BYTES if host_pool is None else parse_bytes(host_pool)
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

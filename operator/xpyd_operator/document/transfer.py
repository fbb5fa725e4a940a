"""spec.kvTransfer: how KV moves from P to D, and who may move it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xpyd_core.pod_env import HTTP_PORT, KV_PORT
from xpyd_operator.document.base import (
    ApiModel,
    DnsName,
    HostPath,
    KeyName,
    Size,
    SizeOrPercent,
    other_port,
    rule,
)


class KvKeyRef(ApiModel):
    """A Secret's key that holds the fleet's KV key: 64 hex digits."""

    name: DnsName
    """Name of a Secret in the fleet's namespace."""
    key: KeyName = "key"
    """Key in the Secret."""


class KvTransfer(ApiModel):
    """How KV moves from P to D."""

    mode: Literal["PutAsync", "Put", "Get"] = "PutAsync"
    """When KV leaves P: PutAsync while it computes, Put after each step, which waits, Get when D
    asks."""
    transport: Literal["Auto", "TCP", "UDS", "SharedMemory"] = "Auto"
    """What carries the KV; Auto: the best that both engines of a pair have."""
    encryption: Literal["None", "TLS"] = "None"
    """TLS: what moves between engines is encrypted. It needs transport TCP and a key; each process
    makes its own certificate, which the key vouches for."""
    same_host_path: HostPath = ""
    """Folder on each node, created if needed, where engines of one node find each other: UDS and
    SharedMemory need it in a cluster, TCP does not use it. Pod security 'restricted' forbids
    hostPath."""
    port: Annotated[
        int,
        Field(ge=1024, le=65535),
        other_port(HTTP_PORT, "engines serve HTTP there"),
    ] = KV_PORT
    """The KV port of each engine."""
    buffer_size: SizeOrPercent = "10%"
    """Device buffer of D, in mode Get of P, too: a size, or a percentage of the KV cache, which is
    none for type VLLM. Of an instance: its ranks share it."""
    host_pool_size: Size | None = None
    """Host pool of D, in mode Get of P, too; none: 4Gi in a cluster, a size that fits in local
    mode. Of an instance: its ranks share it."""
    lease_seconds: Annotated[int, Field(ge=5, le=3600)] = 30
    """How long KV is kept that no request asks for."""
    wait_seconds: Annotated[int, Field(ge=1, le=600)] = 10
    """How long a request on D waits for its KV."""
    on_failure: Literal["Recompute", "Fail"] = "Recompute"
    """What happens to a request whose KV does not arrive."""
    verify: Literal["Strict", "Report"] = "Report"
    """Routers probe each pair of a Prefill and a Decode instance. Strict: a pair gets requests only
    while its last probe passed; Report: all pairs do, and what probes find is in the condition
    KVTransferVerified. Strict needs engines that know probes: not vLLM's own connectors."""
    key_secret_ref: KvKeyRef | None = None
    """Secret with the key by which engines know each other; none: the operator creates one,
    and replaces it when asked (annotation xpyd.dev/rotate-key)."""
    insecure: bool = False
    """No key: anyone who reaches an engine's KV port may read and write KV."""

    def keeps_kv(self, role: str) -> bool:
        """Whether engines of this role have a device buffer and a host pool: D for KV that comes
        early, P for KV that is asked for late."""
        return role == "Decode" or (role == "Prefill" and self.mode == "Get")

    @property
    def has_own_key(self) -> bool:
        """Whether the fleet's key is in a Secret that the operator creates."""
        return self.key_secret_ref is None and not self.insecure

    @property
    def socket_folder(self) -> str:
        """The nodes' folder that engines in a cluster use, "" for none."""
        return "" if self.transport == "TCP" else self.same_host_path

    @rule(
        "!has(self.transport) || !(self.transport in ['UDS', 'SharedMemory']) || "
        "has(self.sameHostPath)",
        "in a cluster transport UDS or SharedMemory needs a folder of the nodes",
        field="sameHostPath",
        missing=True,
        in_cluster=True,
    )
    def _has_folder(self) -> bool:
        return self.transport not in ("UDS", "SharedMemory") or bool(self.same_host_path)

    @rule(
        "!has(self.encryption) || self.encryption == 'None' || "
        "(has(self.transport) && self.transport == 'TCP')",
        "TLS encrypts transport TCP alone: the others move KV through memory of the machine or by "
        "the network card; set transport: TCP",
        field="encryption",
    )
    def _is_over_tcp(self) -> bool:
        return self.encryption == "None" or self.transport == "TCP"

    @rule(
        "!has(self.encryption) || self.encryption == 'None' || !has(self.insecure) || "
        "!self.insecure",
        "TLS needs the fleet's key, by which engines know each other's certificates: leave out "
        "insecure",
        field="encryption",
    )
    def _has_key_for_tls(self) -> bool:
        return self.encryption == "None" or not self.insecure

    @rule(
        "!has(self.insecure) || !self.insecure || !has(self.keySecretRef)",
        "insecure is to have no key, keySecretRef names one: leave one out",
        field="insecure",
    )
    def _has_key_or_none(self) -> bool:
        return not self.insecure or self.key_secret_ref is None

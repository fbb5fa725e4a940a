"""The router's configuration: one frozen value, read once by `command`, passed down."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from xpyd_core.messages import HEARTBEAT_PERIOD_S, MISSED_BEATS
from xpyd_core.pod_env import DISCOVERY_PORT, ROUTER_ADMIN_PORT, ROUTER_HTTP_PORT
from xpyd_core.tls import ClientFiles, ServerFiles
from xpyd_router.admission import AdmissionLimits
from xpyd_router.cross_site import CrossSite
from xpyd_router.fleet.health import HealthRules
from xpyd_router.fleet.listed import ListedInstance
from xpyd_router.policy.base import (
    NO_SLO,
    KvVerify,
    OnNoDecode,
    OnNoPrefill,
    Pairing,
    Slo,
    WithoutPair,
)


@dataclass(frozen=True)
class RouterConfig:
    """What `xpyd router` runs with."""

    processes: int = 1
    """Processes that serve HTTP. More than one share the ports; one more owns discovery."""
    host: str = "127.0.0.1"
    """Literal address of the HTTP ports."""
    port: int = ROUTER_HTTP_PORT
    """HTTP port; 0 lets the system choose (tests)."""
    listen_fd: int | None = None
    """Descriptor of a listening socket that this process inherited, in place of `host` and `port`;
    None: it opens its own."""
    admin_port: int = ROUTER_ADMIN_PORT
    """Port on `host` of metrics, instances and the admin API; 0 lets the system choose."""
    admin_listen_fd: int | None = None
    """As `listen_fd`, in place of `host` and `admin_port`."""
    tls: ServerFiles | None = None
    """Certificate of `port`; None: it speaks plain HTTP, as the admin port always does."""
    engine_tls: ClientFiles | None = None
    """Authorities of engines' certificates, and the router's own; None: the system's, and none."""
    engine_server_name: str | None = None
    """A name that every engine's certificate has; None: each has the engine's address."""
    cross_site: CrossSite = field(default_factory=CrossSite)
    """Which web pages may use the router, and by which names."""
    discovery_host: str = "127.0.0.1"
    """Literal address of the discovery port."""
    discovery_port: int = DISCOVERY_PORT
    """Port that engines send heartbeats to; 0 lets the system choose."""
    fleet: str = ""
    """The fleet's name; beats that name another are dropped. Empty: any fleet's are taken."""
    kv_key_file: Path | None = None
    """The fleet's secret, by which engines know that a release comes from their router."""
    kv_insecure: bool = False
    """The fleet has no secret."""
    accept_unsigned_beats: bool = False
    """Take beats without the key's signature, too; a fleet without a secret does so anyway."""
    admin_key_file: Path | None = None
    """Keys that open /admin; None: it is closed."""
    api_key_file: Path | None = None
    """Hashes of the keys that clients need; None, and no `api_keys`: they need none."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Such keys themselves."""
    proxies: tuple[str, ...] = ()
    """Addresses and networks whose X-Forwarded-For says who asks, for the log of refusals."""
    peers: str = ""
    """A DNS name with an address for each router of the fleet, which share the keys' limits; empty:
    this one has them alone."""
    heartbeat_interval_s: float = HEARTBEAT_PERIOD_S
    """Period assumed for engines whose beat does not say one (vLLM)."""
    static_instances: tuple[ListedInstance, ...] = ()
    """Engines that do not beat: the router asks them (vLLM)."""
    missed_beats: int = MISSED_BEATS
    """An instance leaves after this many periods without a beat."""
    policy: str = "LeastLoaded"
    """How instances are picked: a name of the entry-point group `xpyd.router.policies`."""
    prefill_policy: str | None = None
    """Another policy for prefill instances."""
    decode_policy: str | None = None
    """Another policy for decode instances."""
    local_prefill_tokens: int = 0
    """Prompts of which fewer tokens are to be computed stay on D; 0: none."""
    exact_prefixes: bool = False
    """Policies and limits get the engines' own token counts and block hashes, not estimates
    and marks of the text."""
    slo: Slo = NO_SLO
    """Objectives of requests that name none."""
    health: HealthRules = field(default_factory=HealthRules)
    """How instances are probed, and how slowly they start."""
    request_timeout_s: float = 1800.0
    """Deadline of a whole answer, of a stream's first byte, and of each gap in a stream."""
    prefill_timeout_s: float = 300.0
    """Deadline of one call to P: queueing and computing a long prompt on a slow machine."""
    max_tries: int = 3
    """Attempts of a request in all, within its deadline; a refusal (503) is none."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Longest request body: a million tokens as ids are about 7 MB."""
    max_open_body_bytes: int = 1024**3
    """Memory of the bodies of all requests that are read or served, with the copies in the calls to
    engines: ten of the longest."""
    responses_store_bytes: int = 0
    """Memory of the responses that are kept for `previous_response_id`; 0: none is kept. Each
    process would have its own, so that it needs a router of one."""
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    """What runs at once, and what may wait."""
    pair_wait_s: float = AdmissionLimits.queue_timeout_s
    """How long a request waits for a pair; one flag sets this and the queue's deadline."""
    on_no_prefill: OnNoPrefill = "Queue"
    """What a request does that finds no pair."""
    on_no_decode: OnNoDecode | None = None
    """The same where no D is there; None: as `on_no_prefill` has it, without a P that answers."""
    pairing: Pairing = "SameRevision"
    """Whether a P and a D whose beats name different fleet revisions may be a pair."""
    canary_file: Path | None = None
    """Which revision gets which share of new requests; None: all are alike. It may be missing."""
    kv_probe_s: float = 20.0
    """Between two probes of a pair that works; 0: none are made."""
    kv_verify: KvVerify = "report"
    """Whether a pair gets requests before a probe of it has passed."""
    drain_s: float = 5.0
    """How long to accept after SIGTERM: load balancers take notice of /readiness with delay."""
    forward_headers: tuple[str, ...] = ()
    """Names of the client's headers that go to the engines, in addition to W3C trace context."""
    access_log: bool = True
    """Whether each request has a log line."""
    logs_json: bool = False
    """Whether the access log is JSON lines."""

    @property
    def without_pair(self) -> WithoutPair:
        """What a request does that finds no pair."""
        usual: OnNoDecode = "Reject" if self.on_no_prefill == "Reject" else "Queue"
        return WithoutPair(self.on_no_prefill, self.on_no_decode or usual)

    @property
    def needs_keys(self) -> bool:
        """Whether clients need a key."""
        return self.api_key_file is not None or bool(self.api_keys)

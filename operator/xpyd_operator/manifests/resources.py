"""Requests and limits of the fleet's containers, where the document's templates have none.

A namespace whose quota counts processor time or memory refuses a container that does not say what
it takes. Requests are what the memory plan of local fleets gives an engine at least, without
weights, whose size is not known here. Limits are far above what an engine takes: they are there to
be counted, and to end a process that runs away. `up.memory` plans local engines with these sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from xpyd_core.errors import UserError
from xpyd_core.sizes import parse_bytes
from xpyd_operator.document.engines import Pool
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.manifests.names import JsonObject, list_in, map_in
from xpyd_operator.plan.vllm import POOL_BYTES

MIB = 1 << 20
PROCESS_BYTES = 700 * MIB
"""One Python process with torch and transformers loaded, without weights."""
CACHE_MOST_BYTES = 1 << 30
"""Also what an engine on a CPU takes where nothing is said."""
CACHE_LEAST_BYTES = 64 * MIB
POOL_MOST_BYTES = 4 << 30
CACHE_FLAG = "--kv-cache-memory"
BUFFER_FLAG = "--kv-buffer-size"
POOL_FLAG = "--kv-host-pool-size"
_WEIGHTS_BYTES = 64 << 30
"""Room in a limit for weights on a CPU, and for what a GPU's engine reads at its start; of each
replica."""
_MOST_CPUS = "64"
_CPU_OF_AN_ENGINE = "100m"
"""Little: on a small node several engines share the cores, and a template may ask for more."""
_ROUTER_PROCESS_BYTES = (2 << 30) + (768 << 20)
"""Of each process at most, besides what waits: the bodies that are open, and itself."""
INIT_RESOURCES: JsonObject = {
    "requests": {"cpu": "10m", "memory": "16Mi"},
    "limits": {"cpu": "1", "memory": "128Mi"},
}
DOWNLOAD_RESOURCES: JsonObject = {
    "requests": {"cpu": "100m", "memory": "256Mi"},
    "limits": {"cpu": "4", "memory": "2Gi"},
}
"""Eight connections, and the checksums of what they bring; pages of its files are not its own."""
BEATS_RESOURCES: JsonObject = {
    "requests": {"cpu": "10m", "memory": "64Mi"},
    "limits": {"cpu": "1", "memory": "256Mi"},
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a pool's engines as far as they are given; None: to be chosen. `cache` is that of
    each of the `ranks`. `shares`: how often buffer and pool are there: each replica that comes has
    as much as the one that an engine began with (docs/adr/0133)."""

    ranks: int
    cache: int | None
    buffer_text: str
    host_pool: int | None
    shares: int = 1

    def least(self) -> int:
        """Bytes of an engine's KV when everything to be chosen is as small as it may be."""
        cache = self.cache if self.cache is not None else CACHE_LEAST_BYTES
        return self.ranks * cache + self.buffer(cache) + self.pools(self.host_pool or 0)

    def buffer(self, cache_bytes: int) -> int:
        """The engine's, where each rank has a cache of this size."""
        size = parse_bytes(self.buffer_text, of=self.ranks * cache_bytes)
        return size if self.buffer_text.endswith("%") else self.shares * size

    def pools(self, size_bytes: int) -> int:
        """Host pools of this size, of all that have one."""
        return self.shares * size_bytes


VLLM_CACHE = "VLLM_CPU_KVCACHE_SPACE"
"""The variable of a vLLM on a CPU: whole GiB of KV cache, of each rank."""


def vllm_cache_bytes(fleet: InferenceFleet) -> int | None:
    """What the document's environment says of it; None: nothing, or no number above 0."""
    for item in fleet.spec.engine.env:
        if item.name == VLLM_CACHE and item.value_from is None and item.value.isdecimal():
            return int(item.value[:6]) * (1 << 30) or None
    return None


def given_sizes(fleet: InferenceFleet, pool: Pool) -> Sizes:
    """The sizes that engine.args or the document give; UserError for one that is none."""
    args, kv = fleet.spec.engine.args, fleet.spec.kv_transfer
    ranks = pool.parallelism.ranks
    if fleet.spec.engine.type == "VLLM":
        keeps = kv.keeps_kv(pool.role) and not fleet.spec.engine.is_nixl
        buffer = "0" if not keeps or kv.buffer_size.endswith("%") else kv.buffer_size
        pool_size = kv.host_pool_size
        size = POOL_BYTES if pool_size is None else parse_bytes(pool_size)
        return Sizes(ranks, vllm_cache_bytes(fleet), buffer, size if keeps else 0)
    cache = flag_value(args, CACHE_FLAG)
    cache_bytes = None if cache is None else parse_bytes(cache)
    if not kv.keeps_kv(pool.role):
        return Sizes(ranks, cache_bytes, "0", 0)
    host_pool = flag_value(args, POOL_FLAG)
    if host_pool is None and "host_pool_size" in kv.model_fields_set:
        host_pool = kv.host_pool_size
    return Sizes(
        ranks,
        cache_bytes,
        flag_value(args, BUFFER_FLAG) or kv.buffer_size,
        None if host_pool is None else parse_bytes(host_pool),
        pool.parallelism.max_data or 1,
    )


def fixed_bytes(ranks: int, weights_bytes: int) -> int:
    """An engine without its KV: its processes and the weights that they share out."""
    return PROCESS_BYTES * (1 if ranks == 1 else 1 + ranks) + weights_bytes


def flag_value(args: Sequence[str], flag: str) -> str | None:
    """The last value of `--flag value` or `--flag=value` in `args`."""
    value = None
    for index, arg in enumerate(args):
        if arg == flag and index + 1 < len(args):
            value = args[index + 1]
        elif arg.startswith(f"{flag}="):
            value = arg.partition("=")[2]
    return value


def engine_resources(fleet: InferenceFleet, pool: Pool) -> JsonObject:
    """Requests and limits of one pod of an engine, besides its devices."""
    gpus = pool.resources.gpus
    try:
        sizes = given_sizes(fleet, pool)
        # With GPUs the cache and its buffer are theirs.
        least = sizes.pools(sizes.host_pool or 0) if gpus else sizes.least()
    except UserError:
        # A flag that is no size: the engine says so.
        sizes, least = Sizes(pool.parallelism.ranks, None, "0", 0), 0
    most = least
    if sizes.host_pool is None:
        most += sizes.pools(POOL_MOST_BYTES)
    if sizes.cache is None and not gpus:
        most += sizes.ranks * CACHE_MOST_BYTES + sizes.buffer(CACHE_MOST_BYTES)
    # Ranks, and the KV with them, are shared out to the instance's pods.
    pods = sizes.ranks // (gpus or sizes.ranks)
    least, most = least // pods, most // pods + _WEIGHTS_BYTES * pool.parallelism.most
    most += parse_bytes(pool.resources.shared_memory)
    processes = fixed_bytes(sizes.ranks // pods, 0)
    return {
        "requests": {
            "cpu": _CPU_OF_AN_ENGINE,
            "memory": f"{(processes + least) // MIB}Mi",
        },
        "limits": {"cpu": _MOST_CPUS, "memory": f"{(processes + most) // MIB}Mi"},
    }


def router_resources(fleet: InferenceFleet) -> JsonObject:
    """Requests and limits of a router: its processes have a core each."""
    router = fleet.spec.router
    each = _ROUTER_PROCESS_BYTES + parse_bytes(router.queue.memory)
    most = router.processes * each + (1 << 30)
    return {
        "requests": {"cpu": "50m", "memory": "256Mi"},
        "limits": {"cpu": str(max(8, router.processes + 1)), "memory": f"{most // MIB}Mi"},
    }


def without_given(
    ours: JsonObject, template: Mapping[str, object], container: str, *, inits: bool = False
) -> JsonObject:
    """`ours` for the container of that name, without what its template says: a request of the
    template may be above our limit, and a limit below our request."""
    spec = map_in(dict(template), "spec")
    given: set[str] = set()
    for item in list_in(spec, "initContainers" if inits else "containers"):
        row = cast("JsonObject", item) if isinstance(item, dict) else {}
        if row.get("name") == container:
            theirs = map_in(row, "resources")
            given = {*map_in(theirs, "requests"), *map_in(theirs, "limits")}
    found: JsonObject = {}
    for kind, sizes in ours.items():
        left = {name: value for name, value in sizes.items() if name not in given}
        if left:
            found[kind] = left
    return found

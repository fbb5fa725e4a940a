"""The contenders: pairs of `vllm serve` behind our router, and one vLLM alone; and their metrics.

Each vLLM computes with one thread, P on core 0, D and the one alone on core 1. Their other threads,
the routers and the client run where there is room. NixlConnector on a CPU moves the thread that
computes to the machine's last core; it gets back its own, or P and D would share one, and its
polling threads stand behind all others. A pair that is not asked is stopped (SIGSTOP), router and
all: vLLM's loops take processor time also at rest.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engine.contender import ContenderFailed, Recipe, Server, served
from bench.engine.peer import peer_environment
from bench.engine.shape import MAX_MODEL_LEN, Case
from bench.process import free_port, tree
from scripts.vllm_environment import nixl_path, vllm_environment

OURS, NIXL, ALONE = "xpyd", "NixlConnector", "recompute"
CHUNK_TOKENS = 512
_HOST = "127.0.0.1"
# A router takes a KV address from one instance only. The ranks of D listen behind its port.
_KV_PORTS = {"kv_producer": 24301, "kv_consumer": 24311}
_POOL_BYTES = 512 << 20
_CACHE_GIB = "1"
ROUTED_S = 60.0
# Longer than a block of vLLM's on a CPU (128 tokens), so that KV of whole blocks goes, too.
WARM_UP = Case("warm-up", 300, 4, 1, 1)
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
EXTERNAL = "vllm:external_prefix_cache_hits_total"
RECOMPUTED = "xpyd_kv_recomputed_tokens_total"


class Counts:
    """The samples of one `GET /metrics`."""

    def __init__(self, text: str) -> None:
        self._sums: dict[str, float] = {}
        for name, value in re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)$", text, re.M):
            self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def of(self, name: str) -> float:
        """The sum of a metric's samples over all labels; 0 where it has none."""
        return self._sums.get(name, 0.0)

    def since(self, before: Counts, name: str) -> float:
        """What was added between the two."""
        return self.of(name) - before.of(name)

    def mean_since(self, before: Counts, histogram: str) -> float | None:
        """The mean of what a histogram observed between the two; None where that is nothing."""
        count = self.since(before, f"{histogram}_count")
        return self.since(before, f"{histogram}_sum") / count if count else None


def counts(server: Server) -> Counts:
    """vLLM's metrics now."""
    with _DIRECT.open(f"http://{_HOST}:{server.port}/metrics", timeout=60) as answer:
        return Counts(answer.read().decode())


@dataclass(frozen=True)
class Contender:
    """Who answers (`front`), and the vLLMs in which the prompt (`p`) and the answer (`d`) are
    computed; of one vLLM alone all three are the same."""

    name: str
    front: Server
    p: Server
    d: Server

    @property
    def is_pair(self) -> bool:
        """Whether KV moves."""
        return self.p is not self.d

    def _servers(self) -> list[Server]:
        return [self.p, self.d, self.front] if self.is_pair else [self.front]

    def stop(self) -> None:
        """Let it use no processor."""
        for one in self._servers():
            one.stop()

    def go_on(self, seed: int, *, within_s: float = ROUTED_S) -> None:
        """Until here; and until KV moves again, since peers and routers gave one another up.

        ContenderFailed.
        """
        for one in self._servers():
            one.go_on()
        deadline = time.monotonic() + within_s
        while True:
            before = counts(self.d)
            failure = "D loaded no KV"
            try:
                self.front.run(WARM_UP, seed=seed)
            except ContenderFailed as error:
                failure = str(error)
            else:
                loaded = external(before, counts(self.d))
                if not self.is_pair or loaded >= WARM_UP.input_tokens - 1:
                    return
            if time.monotonic() > deadline:
                raise ContenderFailed(
                    f"{self.name} does not go on: {failure}\n{self.front.complaint()}"
                )
            seed += 1_000_000  # another prompt
            time.sleep(0.2)


def external(before: Counts, after: Counts) -> float:
    """Prompt tokens whose KV D took from P. vLLM counts loads that failed as hits, too."""
    return after.since(before, EXTERNAL) - after.since(before, RECOMPUTED)


def start_pair(stack: ExitStack, name: str, model: Path, folder: Path, cores: str) -> Contender:
    """P and D of this connector, and their router; all end with the stack. ContenderFailed."""
    discovery = free_port()
    if name == OURS:
        vllm, path = vllm_environment()
        recipes = our_recipes(vllm, path, model, folder, discovery)
    else:
        recipes = nixl_recipes(peer_environment(), nixl_path(), model)
    p, d = _start(stack, recipes, folder, cores)
    if name == NIXL:
        for core, one in enumerate((p, d)):
            bind(one, core)
    flags = ["--discovery-host", _HOST, "--discovery-port", str(discovery)]
    if name == NIXL:
        for kind, one in (("P", p), ("D", d)):
            flags += ["--static-instance", f"{kind}=http://{_HOST}:{one.port},dialect=nixl"]
    router = router_recipe(name, folder, flags)
    (front,) = _start(stack, [router], folder, cores)
    return Contender(name, front, p, d)


def start_alone(stack: ExitStack, model: Path, folder: Path, cores: str) -> Contender:
    """One vLLM without a connector; it ends with the stack. ContenderFailed."""
    vllm = peer_environment()
    recipe = vllm_recipe(vllm, ALONE, model, 1, None, {"PYTHONPATH": str(vllm / "alias")})
    (one,) = _start(stack, [recipe], folder, cores)
    return Contender(ALONE, one, one, one)


def _start(stack: ExitStack, recipes: Sequence[Recipe], folder: Path, cores: str) -> list[Server]:
    """All at once."""

    def start(recipe: Recipe) -> Server:
        return stack.enter_context(served(recipe, folder / f"{recipe.name}.log", cores))

    with ThreadPoolExecutor(len(recipes)) as pool:
        return list(pool.map(start, recipes))


_BEHIND = 19
"""So much lower a priority has what runs where nothing else wants to."""


def bind(server: Server, core: int) -> None:
    """Have its workers compute on `core`, and their other threads anywhere, when nothing else
    wants to run there: NIXL's polling threads took five times what computing got."""
    everywhere = os.sched_getaffinity(0)
    behind = min(19, os.getpriority(os.PRIO_PROCESS, server.process.pid) + _BEHIND)
    for pid in tree(server.process.pid):
        if "Worker" not in Path(f"/proc/{pid}/comm").read_text():
            continue
        for entry in Path(f"/proc/{pid}/task").iterdir():
            thread = int(entry.name)
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.sched_setaffinity(thread, {core} if thread == pid else everywhere)
                if thread != pid:
                    os.setpriority(os.PRIO_PROCESS, thread, behind)


def router_recipe(name: str, folder: Path, flags: Sequence[str]) -> Recipe:
    """Our router, with the fleet's key."""
    argv = [sys.executable, "-m", "xpyd_core", "router", "--host", _HOST, "--port", "{port}"]
    argv += ["--admin-port", "0", "--kv-key-file", str(key_file(folder))]
    argv += ["--slow-start-seconds", "0", *flags]
    return Recipe(f"{name}-router", argv, {})


def our_recipes(vllm: Path, path: str, model: Path, folder: Path, discovery: int) -> list[Recipe]:
    """P and D with our connector and plugin, which `path` leads to."""
    environment = {"PYTHONPATH": path, "VLLM_PLUGINS": "xpyd"}
    made: list[Recipe] = []
    for core, (role, kv_port) in enumerate(_KV_PORTS.items()):
        extra: dict[str, Any] = {
            "host": _HOST,
            "key_file": str(key_file(folder)),
            "discovery": f"{_HOST}:{discovery}",
            "heartbeat_period_s": 0.5,
            "mode": "put_async",
        }
        if role == "kv_consumer":
            extra["pool_bytes"] = _POOL_BYTES
        transfer = {
            "kv_connector": "XpydConnector",
            "kv_connector_module_path": "xpyd_kv.vllm.connector",
            "kv_role": role,
            "kv_port": kv_port,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        made.append(vllm_recipe(vllm, f"{OURS}-{role}", model, core, transfer, environment))
    return made


def nixl_recipes(vllm: Path, path: str, model: Path) -> list[Recipe]:
    """P and D as vLLM's users run them, with nothing of ours."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
    }
    return [
        vllm_recipe(
            vllm,
            f"{NIXL}-{who}",
            model,
            core,
            transfer,
            {
                "PYTHONPATH": path,
                "VLLM_NIXL_SIDE_CHANNEL_HOST": _HOST,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            },
        )
        for core, who in enumerate("PD")
    ]


def vllm_recipe(
    vllm: Path,
    name: str,
    model: Path,
    core: int,
    transfer: Mapping[str, Any] | None,
    environment: Mapping[str, str],
) -> Recipe:
    """`vllm serve`, computing on one core, with this KV transfer."""
    argv = [str(vllm / "bin/vllm"), "serve", str(model), "--served-model-name", "bench"]
    argv += ["--host", _HOST, "--port", "{port}", "--dtype", "bfloat16", "--enforce-eager"]
    argv += ["--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"]
    argv += ["--max-num-batched-tokens", str(CHUNK_TOKENS), "--shutdown-timeout", "5"]
    if transfer is not None:
        argv += ["--kv-transfer-config", json.dumps(transfer)]
    return Recipe(
        name,
        argv,
        {
            **environment,
            "VLLM_CPU_KVCACHE_SPACE": _CACHE_GIB,
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(vllm / "compiled"),
            "HF_HUB_OFFLINE": "1",
        },
    )


def key_file(folder: Path) -> Path:
    """The fleet's secret, made if it is not there."""
    path = folder / "kv.key"
    if not path.exists():
        path.write_text("a secret of the whole fleet\n")
    return path

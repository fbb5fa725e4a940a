"""`vllm serve` on this machine's CPU, with our connector or vLLM's own, behind our router."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from scripts.vllm_environment import ROOT, nixl_path, vllm_environment

START_S = 400.0
STRICT = ("--kv-verify", "strict")
"""Flags of a router whose pairs get requests only while probes pass."""
MODEL = ROOT / "examples/demo-model"
PAGE = ROOT / "docs/vllm.md"
ROUTER, P, D = "127.0.62.9", "127.0.62.1", "127.0.62.2"
ROUTER_PORT, ADMIN_PORT, DISCOVERY_PORT = 10001, 10002, 30001
PORT, KV_PORT = 23000, 24201
LENGTHS = (
    *(1, 2, 5, 60, 127, 128, 129, 200, 255, 256),
    *(300, 511, 512, 513, 700, 900, 1200, 1500, 1900, 3000),
)
"""Of prompts: around a block (128 tokens), a chunk (512), and several of both."""
CLIENT_ID = re.compile(r" client_id=(\S+)")
FREE_S = 60.0
"""Over the 30 s of a lease."""
Json = Mapping[str, object]
Options = Mapping[str, Any]


class Shown(NamedTuple):
    """A `vllm serve` of docs/vllm.md."""

    environment: dict[str, str]
    model: str
    flags: dict[str, str]
    """But for `transfer`."""
    transfer: dict[str, Any]
    """`--kv-transfer-config`."""


def shown(role: str) -> Shown:
    """The command line that the page shows for a `kv_role`."""
    for code in re.findall(r"^```sh[^\n]*\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
        words = shlex.split(code, comments=True)
        if "serve" not in words or f'"kv_role": "{role}"' not in code:
            continue
        at = words.index("serve")
        assert words[at - 1] == "vllm", code
        environment = dict(word.split("=", 1) for word in words[: at - 1])
        flags = dict(zip(words[at + 2 :: 2], words[at + 3 :: 2], strict=True))
        transfer = json.loads(flags.pop("--kv-transfer-config"))
        return Shown(environment, words[at + 1], flags, transfer)
    raise AssertionError(f"{PAGE} has no `vllm serve` with kv_role {role}")


class Vllm:
    """One `vllm serve`."""

    def __init__(
        self,
        host: str,
        log: Path,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        cores: str = "",
        flags: Sequence[str] = (),
    ) -> None:
        self.host, self.log = host, log
        folder, _ = vllm_environment()
        argv = [str(folder / "bin/vllm"), "serve", str(MODEL), *command]
        argv += ["--max-model-len", "4096", "--dtype", "float32", "--enforce-eager"]
        # The model was made for 2,048: its weights are random, so one length is like another.
        argv += ["--hf-overrides", json.dumps({"max_position_embeddings": 4096})]
        argv += ["--max-num-batched-tokens", "512", *flags]
        whole = {
            **os.environ,
            **environment,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores or cores_of(host),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(folder / "compiled"),
        }
        self._argv, self._environment = argv, whole
        self.start()

    def start(self) -> None:
        """Start it, also again; it goes on in its log."""
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                self._argv, env=self._environment, stdout=file, stderr=file, start_new_session=True
            )

    def signal(self, number: int) -> None:
        """Send it to all its processes."""
        os.killpg(self.process.pid, number)

    @classmethod
    def of_ours(
        cls,
        role: str,
        host: str,
        log: Path,
        *,
        cores: str = "",
        flags: Sequence[str] = (),
        module: str = "",
        **extra: object,
    ) -> Vllm:
        """As docs/vllm.md shows it, with this machine's addresses, and `extra` options of a
        test. The room for KV is the test's own, too: the page's is for larger machines. `module`,
        of this folder, has the connector in place of the product's."""
        page = shown(role)
        given = {
            **page.transfer["kv_connector_extra_config"],
            "host": host,
            "key_file": str(log.parent / "kv.key"),
            "accept_unsigned_pairs": True,
            "discovery": f"{ROUTER}:{DISCOVERY_PORT}",
            "heartbeat_period_s": 0.5,
        }
        given.pop("pool_bytes", None)
        transfer = {
            **page.transfer,
            "kv_port": KV_PORT,
            "kv_connector_extra_config": {**given, **extra},
        }
        path = vllm_environment()[1]
        if module:
            transfer["kv_connector_module_path"] = module
            path = f"{path}:{Path(__file__).parent}"
        changed = {**page.flags, "--host": host, "--port": str(PORT)}
        command = [word for flag in changed.items() for word in flag]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        environment = {**page.environment, "PYTHONPATH": path}
        return cls(host, log, command, environment, cores=cores, flags=flags)

    @classmethod
    def of_nixl(cls, host: str, log: Path) -> Vllm:
        """As vLLM's users run NixlConnector, with nothing of ours."""
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
        }
        command = ["--served-model-name", "demo-model", "--host", host, "--port", str(PORT)]
        command += ["--shutdown-timeout", "20", "--kv-transfer-config", json.dumps(transfer)]
        environment = {
            "PYTHONPATH": nixl_path(),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
        }
        return cls(host, log, command, environment)

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, "vLLM has not started"
            try:
                with urllib.request.urlopen(f"http://{self.host}:{PORT}/health", timeout=5):
                    return
            except OSError:
                time.sleep(1.0)

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                self.signal(number)
                self.process.wait(40.0)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    def complete(self, request_id: str, **body: object) -> dict:
        """POST /v1/completions, greedy."""
        return json.loads(post(self.host, PORT, "/v1/completions", greedy(body), request_id))

    def text(self, path: str = "/v1/completions", **body: object) -> str:
        """What this vLLM answers alone, greedy."""
        return text_of(post(self.host, PORT, path, greedy(body)))

    def metric(self, name: str, label: str = "") -> float:
        """See `metric`."""
        return metric(self.host, PORT, name, label)


def metric(host: str, port: int, name: str, label: str = "") -> float:
    """The sum of a metric's samples; of those with `label`, as `source="x"`."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", text, re.M)
    return sum(float(value) for labels, value in found if label in labels)


def greedy(body: Json) -> Json:
    return {"model": "demo-model", "temperature": 0, "ignore_eos": True, **body}


def text_of(answer: bytes) -> str:
    """The text of a completion's or a chat's one choice, whole or streamed. ValueError for a stream
    that breaks."""
    if not answer.startswith(b"data: "):
        parts = [json.loads(answer)]
    elif answer.endswith(b"data: [DONE]\n\n"):
        parts = [json.loads(one[6:]) for one in answer.split(b"\n\n") if one.startswith(b"data: {")]
    else:
        raise ValueError(f"the stream broke: {answer[-300:]!r}")
    choices = [choice for part in parts for choice in part["choices"]]
    said = [
        one.get("message") or one.get("delta") or {"content": one.get("text")} for one in choices
    ]
    return "".join(one.get("content") or "" for one in said)


def cores_of(host: str) -> str:
    """Cores of its own for each vLLM: two that share them spin for one another, 30 s a request."""
    half = max(1, (os.cpu_count() or 2) // 2)
    return f"0-{half - 1}" if host == P else f"{half}-{2 * half - 1}"


def post(host: str, port: int, path: str, body: object, request_id: str = "") -> bytes:
    """The body of the answer."""
    headers = {"Content-Type": "application/json"}
    if request_id:
        headers["X-Request-Id"] = request_id
    url = f"http://{host}:{port}{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()


@contextmanager
def router(folder: Path, *flags: str) -> Iterator[None]:
    argv = [
        sys.executable,
        "-m",
        "xpyd_core",
        "router",
        "--host",
        ROUTER,
        "--discovery-host",
        ROUTER,
    ]
    argv += ["--port", str(ROUTER_PORT), "--kv-key-file", str(folder / "kv.key")]
    argv += ["--slow-start-seconds", "0", *flags]
    with (folder / "router.log").open("wb") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20.0)


def by_router(path: str = "/v1/completions", request_id: str = "", **body: object) -> bytes:
    """What the router's client gets, greedy."""
    return post(ROUTER, ROUTER_PORT, path, greedy(body), request_id)


def instances() -> dict[str, Any]:
    """The router's registry."""
    with urllib.request.urlopen(f"http://{ROUTER}:{ADMIN_PORT}/instances", timeout=20) as answer:
        return json.loads(answer.read())


def disturbed(log: Path, sent: Sequence[str]) -> list[str]:
    """The router's access lines, in its `log`, of those of the requests `sent` that were tried more
    than once or whose KV did not move. A D on a busy core may be too late to say that it did."""
    deadline = time.monotonic() + 30.0
    while True:
        lines = log.read_text().splitlines()
        found = {match[1]: line for line in lines if (match := CLIENT_ID.search(line))}
        if set(sent) <= set(found):
            good = re.compile(r" tries=1 .* kv=(moved|unreported)$")
            return [found[one] for one in sent if good.search(found[one]) is None]
        assert time.monotonic() < deadline, set(sent) - set(found)
        time.sleep(0.2)


@contextmanager
def fleet(
    folder: Path, of_p: Sequence[Options], of_d: Sequence[Options], *flags: str
) -> Iterator[tuple[list[Vllm], list[Vllm]]]:
    """As many P and D as there are options, behind a router with `flags`."""
    (folder / "kv.key").write_text("a secret of the whole fleet\n")
    with router(folder, *flags):
        every: list[Vllm] = []
        try:
            for role, first, options in (("kv_producer", P, of_p), ("kv_consumer", D, of_d)):
                for at, one in enumerate(options):
                    host = first if at == 0 else f"{first}{at}"
                    log = folder / f"{role}-{at}.log"
                    every.append(Vllm.of_ours(role, host, log, **one))
            for one in every:
                one.wait()
            until_routed()
            yield every[: len(of_p)], every[len(of_p) :]
        finally:
            for one in every:
                one.stop()


@contextmanager
def pair(folder: Path, of_p: Options, of_d: Options, *flags: str) -> Iterator[tuple[Vllm, Vllm]]:
    with fleet(folder, [of_p], [of_d], *flags) as (p, d):
        yield p[0], d[0]


def until_routed() -> None:
    """Until the router has heard of a pair."""
    deadline = time.monotonic() + 30.0
    while True:
        try:
            by_router(prompt=[5, 6, 7], max_tokens=2)
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def until_given(one: Vllm, requests: int) -> None:
    """Until the router has given it so many requests, none of them over."""
    deadline = time.monotonic() + 30.0
    while True:
        here = (
            row for row in instances()["instances"] if row["http_address"] == f"{one.host}:{PORT}"
        )
        if (found := [row["in_flight"] for row in here]) == [requests]:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def until_verified(pairs: int) -> None:
    """Until a probe has got there in each of so many pairs, and the router knows no others."""
    deadline = time.monotonic() + 30.0
    while True:
        by_state = {
            state: metric(ROUTER, ADMIN_PORT, "xpyd_router_kv_pairs", f'state="{state}"')
            for state in ("verified", "unprobed", "failed")
        }
        if by_state == {"verified": pairs, "unprobed": 0, "failed": 0}:
            return
        assert time.monotonic() < deadline, (by_state, instances()["kv_problems"])
        time.sleep(0.2)


def until_free(one: Vllm) -> None:
    """Until it holds no block. It says so in a step, so a small request makes it take one."""
    deadline = time.monotonic() + FREE_S
    while True:
        one.complete(uuid4().hex, prompt=[5, 6, 7], max_tokens=1)
        if one.metric("vllm:kv_cache_usage_perc") == 0:
            return
        assert time.monotonic() < deadline, one.metric("vllm:kv_cache_usage_perc")
        time.sleep(0.5)


def prompt(length: int, seed: int) -> list[int]:
    return [(at * 7 + seed * 131 + 5) % 1500 + 3 for at in range(length)]


def prompts(seed: int) -> list[list[int]]:
    """Of all LENGTHS, and four more that share their first 640 tokens."""
    shared = prompt(640, seed + 99)
    more = ([*shared, *prompt(50 + tail, seed + 60 + tail)] for tail in range(4))
    return [*(prompt(length, seed + at) for at, length in enumerate(LENGTHS)), *more]


def chats() -> list[Json]:
    """The bodies of three chats, short and long."""
    words = ("tell me of rivers " * count for count in (1, 30, 120))
    return [{"messages": [{"role": "user", "content": said}], "max_tokens": 8} for said in words]


class PromptTokens(NamedTuple):
    """Prompt tokens of several vLLM, by vLLM's own metrics. The last token of a prompt is external
    where the whole prompt was: D computes it again."""

    computed: float
    cached: float
    external: float

    @classmethod
    def of(cls, some: Sequence[Vllm]) -> PromptTokens:
        """As of now."""
        names = ("local_compute", "local_cache_hit", "external_kv_transfer")
        of = "vllm:prompt_tokens_by_source_total"
        return cls(*(sum(one.metric(of, f'source="{name}"') for one in some) for name in names))


def assert_d_got(before: PromptTokens, some_d: Sequence[Vllm], asked: Sequence[list[int]]) -> None:
    """Of each prompt that was `asked` D computed one token and got the rest; not again what an
    earlier prompt, or an earlier try of a slow machine, had left in its prefix cache."""
    now = zip(PromptTokens.of(some_d), before, strict=True)
    got = PromptTokens(*(after - then for after, then in now))
    assert got.computed <= len(asked), got
    assert got.external >= 0.8 * sum(map(len, asked)), got

"""The flags of an engine, once: `xpyd worker`, `xpyd bench` and `LLM()` take theirs from this
table, of which parallel_flags.py has what says over how many ranks it goes. `engine_fields` makes
their part of the configuration of it.

A row has a flag, its argparse options (type, default, choices, help) and the programs besides
`xpyd worker` that take it. A default is that of WorkerConfig. The table of docs/engine.md is
generated from this one (`make generate`); a test compares the arguments of LLM() with it. Bounds
that depend on other values are in config_check. This module must not know what a flag does
(docs/adr/0037).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from xpyd_core.cli import json_object
from xpyd_core.pod_env import HTTP_PORT, KV_PORT, ROLES
from xpyd_core.sizes import format_bytes
from xpyd_kv.transport.settings import TRANSPORTS
from xpyd_kv.wire.messages import MODES
from xpyd_worker.config import (
    AUTO_BATCHED_TOKENS,
    AUTO_BATCHED_TOKENS_GPU,
    BLOCK_SIZES,
    CPU_CACHE_BYTES,
    DTYPES,
    GIB,
    MIB,
    WorkerConfig,
)
from xpyd_worker.engine.eplb import read_eplb
from xpyd_worker.engine.request import POLICIES
from xpyd_worker.engine.speculation import read_speculative
from xpyd_worker.engine.step_times import LATENCY_GOALS, STRETCH
from xpyd_worker.flag import BOTH, LLM_ONLY, Flag, Program, count, flag
from xpyd_worker.parallel_flags import PARALLEL_FLAGS


def _tokens_or_auto(text: str) -> int | None:
    try:
        return None if text == "auto" else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected a number of tokens or auto, got {text!r}"
        ) from error


MODEL_FLAGS = (
    flag(
        "--model",
        programs=BOTH,
        required=True,
        metavar="PATH_OR_URI",
        help="a folder, file:///folder (absolute) or hf://org/name",
    ),
    flag(
        "--revision",
        programs=BOTH,
        help="branch, tag or commit of an hf:// model, e.g. main (default: the hub's)",
    ),
    flag(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names that requests may use, up to 64, e.g. chat (default: org/name or the folder's "
        "name)",
    ),
    flag(
        "--device",
        programs=BOTH,
        default=WorkerConfig.device,
        metavar="DEVICE",
        help="cpu, cuda (the first GPU) or cuda:N; auto: a GPU where torch finds one and triton is "
        "installed, else the CPU (default: %(default)s)",
    ),
    flag(
        "--dtype",
        programs=BOTH,
        choices=DTYPES,
        default=WorkerConfig.dtype,
        help="of weights and KV; auto: the checkpoint's, but float32 where the CPU is slow in 16 "
        "bits, and float16 for bfloat16 on a GPU that has none (default: %(default)s)",
    ),
    flag(
        "--max-model-len",
        programs=BOTH,
        type=int,
        metavar="TOKENS",
        help="tokens of prompt and output together, e.g. 4096 (default: the checkpoint's context, "
        "or what the KV cache holds)",
    ),
    count(
        "--seed",
        programs=LLM_ONLY,
        help="0 to 2**64 - 1: base of the seeds drawn for requests without one, so that the same "
        "requests in the same order give the same tokens (default: another at each start)",
    ),
    flag(
        "--generation-config",
        programs=LLM_ONLY,
        default=WorkerConfig.generation_config,
        metavar="SOURCE",
        help="sampling defaults of requests: auto, the checkpoint's generation_config.json; vllm, "
        "OpenAI's alone; else a folder with such a file (default: %(default)s)",
    ),
    flag(
        "--override-generation-config",
        programs=LLM_ONLY,
        type=json_object,
        metavar="JSON",
        help="sampling defaults that win over those, e.g. '{\"temperature\": 0.2}' (default: none)",
    ),
    flag(
        "--chat-template",
        metavar="FILE_OR_TEXT",
        help="a template for chats in place of the checkpoint's: a file, or a text with braces, "
        "e.g. chat.jinja (default: the checkpoint's)",
    ),
    flag(
        "--tool-call-parser",
        default=WorkerConfig.tool_call_parser,
        metavar="NAME",
        help="how the model writes tool calls: hermes, qwen3_coder, glm45, mistral, llama3_json or "
        "one of another package; auto: as the chat template shows; none: requests with tools are "
        "refused. The same on P and D (default: %(default)s)",
    ),
    flag(
        "--reasoning-parser",
        default=WorkerConfig.reasoning_parser,
        metavar="NAME",
        help="how the model marks its reasoning: qwen3, deepseek_r1 or one of another package; "
        "auto: as the chat template shows; none: it is content. The same on P and D "
        "(default: %(default)s)",
    ),
    flag(
        "--enable-auto-tool-choice",
        action="store_true",
        help="do not start where tool calls cannot be told from content; without, requests with "
        "tools are refused then",
    ),
    count(
        "--threads",
        programs=BOTH,
        help="CPU threads of the forward pass, of each rank. Give it where other work shares the "
        "cores: threads that wait for each other make steps many times slower (default: "
        "OMP_NUM_THREADS, else all cores, which ranks share)",
    ),
)

BATCH_FLAGS = (
    count(
        "--max-num-seqs",
        programs=BOTH,
        default=WorkerConfig.max_num_seqs,
        help="sequences that run at once (default: %(default)s)",
    ),
    flag(
        "--max-num-batched-tokens",
        programs=BOTH,
        type=_tokens_or_auto,
        default="auto",
        metavar="TOKENS",
        help="tokens of one forward, at least --max-num-seqs; longer prompts go in chunks, and "
        "running requests wait for one chunk at most between two of their tokens; auto: on a CPU "
        f"{AUTO_BATCHED_TOKENS}, on a GPU {AUTO_BATCHED_TOKENS_GPU}, or --max-num-seqs where that "
        "is more (default: %(default)s)",
    ),
    flag(
        "--long-prefill-token-threshold",
        programs=LLM_ONLY,
        type=int,
        default=WorkerConfig.long_prefill_token_threshold,
        metavar="TOKENS",
        help="tokens of one prompt in one forward, so that others have room, too, e.g. 256; 0: no "
        "bound (default: %(default)s)",
    ),
    flag(
        "--scheduling-policy",
        programs=LLM_ONLY,
        choices=POLICIES,
        default=WorkerConfig.scheduling_policy,
        help="which request goes first; fcfs: the one that came first; priority: the one with the "
        "lower number in its field priority, then the one that came first (default: %(default)s)",
    ),
    flag(
        "--latency-goal",
        choices=LATENCY_GOALS,
        default=WorkerConfig.latency_goal,
        help="which latency matters more where prompts and decodes share steps; itl: a step has so "
        f"much of prompts that it takes at most {STRETCH:g} times what its decodes, and those to "
        "come, take alone, as measured; ttft: prompts have all that is left of "
        "--max-num-batched-tokens (default: %(default)s)",
    ),
    flag(
        "--speculative-config",
        programs=BOTH,
        type=json_object,
        metavar="JSON",
        help="draft tokens that may follow, and verify them together: method, ngram, draft_model, "
        "eagle3 or medusa; num_speculative_tokens, of a draft; for ngram prompt_lookup_max and "
        "prompt_lookup_min (5), how many of the last tokens are looked up in the text so far; for "
        "the others model, where the draft model or the heads are (default: none)",
    ),
    flag(
        "--kv-cache-memory",
        programs=BOTH,
        metavar="SIZE",
        help="bytes of the paged KV cache, of each rank, e.g. 4Gi (default: on a CPU "
        f"{format_bytes(CPU_CACHE_BYTES)}, on a GPU what --gpu-memory-utilization leaves)",
    ),
    flag(
        "--gpu-memory-utilization",
        programs=BOTH,
        type=float,
        default=WorkerConfig.gpu_memory_utilization,
        metavar="SHARE",
        help="above 0, at most 1: of the GPU's whole memory, for weights, the largest step, CUDA "
        "graphs and KV cache together; a step of that size is run at the start, and the KV cache "
        "gets the rest. No effect on a CPU, or on the KV cache where --kv-cache-memory is given "
        "(default: %(default)s)",
    ),
    flag(
        "--enforce-eager",
        programs=BOTH,
        action="store_true",
        help="no CUDA graphs: starts sooner, takes less memory, decodes slower. No effect on a CPU",
    ),
    flag(
        "--block-size",
        programs=BOTH,
        type=int,
        choices=BLOCK_SIZES,
        default=WorkerConfig.block_size,
        help="tokens of a KV block; P's and D's may differ (default: %(default)s)",
    ),
    flag(
        "--enable-prefix-caching",
        programs=LLM_ONLY,
        action=argparse.BooleanOptionalAction,
        default=WorkerConfig.prefix_caching,
        help="keep the KV of prompts and reuse it for the next with the same beginning; without: "
        "compute every prompt whole, e.g. for benchmarks (default: on)",
    ),
)

PLACE_FLAGS = (
    flag(
        "--role",
        choices=ROLES,
        help="what the instance does in its fleet (default: XPYD_ROLE, else Aggregated)",
    ),
    flag(
        "--host",
        metavar="IP",
        help="literal ip to listen on, which heartbeats name; not 0.0.0.0 (default: XPYD_POD_IP, "
        f"else {WorkerConfig.host})",
    ),
    count(
        "--port",
        help=f"HTTP port; 0: any free one (default: XPYD_HTTP_PORT, else {HTTP_PORT})",
    ),
    flag(
        "--discovery",
        metavar="HOST:PORT,...",
        help="routers to send heartbeats to, e.g. 10.0.0.2:30001; a name with several addresses "
        "means all of them (default: XPYD_DISCOVERY, else none)",
    ),
    flag(
        "--heartbeat-period-ms",
        type=int,
        default=round(1000 * WorkerConfig.heartbeat_period_s),
        metavar="MS",
        help="50 to 60000 (default: %(default)s)",
    ),
    flag(
        "--drain-timeout",
        type=float,
        default=WorkerConfig.drain_timeout_s,
        metavar="SECONDS",
        help="how long SIGTERM and POST /drain wait for requests (default: %(default)s)",
    ),
    flag(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="URL of an OTLP/HTTP receiver for spans, e.g. http://collector:4318/v1/traces; needs "
        "the extra otel (default: none, no tracing)",
    ),
)

KV_FLAGS = (
    count(
        "--kv-port",
        help=f"KV port, from 1024 on (default: XPYD_KV_PORT, else {KV_PORT})",
    ),
    flag(
        "--kv-advertise",
        metavar="HOST:PORT",
        help="KV address that others dial, a literal ip and a port, behind NAT or a relay, e.g. "
        "192.0.2.7:21001 (default: host and KV port)",
    ),
    flag(
        "--kv-key-file",
        type=Path,
        metavar="FILE",
        help="the fleet's secret, e.g. /run/kv.key; required for Prefill and Decode without "
        "--kv-insecure (default: XPYD_KV_KEY_FILE)",
    ),
    flag(
        "--kv-insecure",
        action="store_true",
        help="no secret: any host that reaches the KV port may read and write KV, e.g. on one "
        "machine",
    ),
    flag(
        "--accept-unsigned-pairs",
        action="store_true",
        help="take pair ids that the fleet's router did not sign, as vllm-router sends them: any "
        "client that reaches the HTTP port can then make Prefill dial an address and Decode hold "
        "memory",
    ),
    flag(
        "--kv-mode",
        choices=[name.replace("_", "-") for name in MODES],
        default=WorkerConfig.kv_mode.replace("_", "-"),
        help="when a Prefill instance sends; put-async: while it computes; put: after each step, "
        "which waits; get: when Decode asks. Decode does what Prefill says "
        "(default: %(default)s)",
    ),
    flag(
        "--kv-transport",
        choices=("auto", *TRANSPORTS),
        default="auto",
        help="what moves KV, cuda_ipc and nccl only between GPUs; auto: the best that both sides "
        "of a pair have (default: %(default)s)",
    ),
    flag(
        "--kv-encryption",
        choices=("none", "tls"),
        default="none",
        help="tls: KV and tokens that move between instances are encrypted; all of the fleet need "
        "it, with --kv-transport tcp and a key file (default: %(default)s)",
    ),
    flag(
        "--kv-socket-dir",
        type=Path,
        metavar="DIR",
        help="folder of Unix sockets that the instances of this machine share, for uds and shm, "
        "e.g. /run/xpyd/chat (default: none, tcp only)",
    ),
    flag(
        "--kv-direct-free",
        type=float,
        default=WorkerConfig.kv_direct_free,
        metavar="SHARE",
        help="KV lands in D's own blocks while more than this share of them stays free; 1: never "
        "(default: %(default)s)",
    ),
    flag(
        "--kv-buffer-size",
        default=f"{WorkerConfig.kv_buffer_percent}%",
        metavar="SIZE",
        help="device buffer of D, and of P in mode get, for KV that waits: a size, e.g. 8e9, or a "
        "percentage of the KV cache. Of the instance: ranks share it (default: %(default)s)",
    ),
    flag(
        "--kv-host-pool-size",
        default=f"{WorkerConfig.kv_host_pool_bytes // GIB}Gi",
        metavar="SIZE",
        help="host pool of D, and of P in mode get, for what the buffer has no room for. Of the "
        "instance: ranks share it (default: %(default)s)",
    ),
    count(
        "--kv-connections",
        default=WorkerConfig.kv_connections,
        help="TCP connections that KV of a pair of instances goes over, at most 4; from 2 on each "
        "has a thread on both sides (default: %(default)s)",
    ),
    flag(
        "--kv-group-bytes",
        default=f"{WorkerConfig.kv_group_bytes // MIB}Mi",
        metavar="SIZE",
        help="layers are sent in groups of at least this many bytes (default: %(default)s)",
    ),
    flag(
        "--kv-wait-seconds",
        type=float,
        default=WorkerConfig.kv_wait_s,
        metavar="S",
        help="how long a request on D waits for its KV, and in mode put a step of P for D "
        "(default: %(default)s)",
    ),
    flag(
        "--kv-lease-seconds",
        type=float,
        default=WorkerConfig.kv_lease_s,
        metavar="S",
        help="how long KV stays that no request asks for (default: %(default)s)",
    ),
    flag(
        "--kv-on-failure",
        choices=("recompute", "fail"),
        default="recompute" if WorkerConfig.kv_recompute else "fail",
        help="what a request does whose KV does not come (default: %(default)s)",
    ),
)

GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "model": MODEL_FLAGS,
    "ranks and replicas": PARALLEL_FLAGS,
    "batch and KV cache": BATCH_FLAGS,
    "place in the fleet": PLACE_FLAGS,
    "KV transfer (roles Prefill and Decode)": KV_FLAGS,
}
"""The flags, by the heading that `xpyd worker --help` shows."""


def flags_of(program: Program) -> tuple[Flag, ...]:
    """The flags that a program besides the worker takes."""
    return tuple(one for group in GROUPS.values() for one in group if program in one.programs)


def engine_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of WorkerConfig from the flags that LLM() takes, too; `arguments`: its own."""
    found = {one.argument: arguments[one.argument] for one in flags_of("LLM")}
    found["kv_cache_bytes"] = found.pop("kv_cache_memory")
    found["custom_all_reduce"] = not found.pop("disable_custom_all_reduce")
    found["override_generation_config"] = dict(found["override_generation_config"] or {})
    found["prefix_caching"] = found.pop("enable_prefix_caching")
    found["speculative"] = read_speculative(found.pop("speculative_config"))
    found["eplb"] = read_eplb(found.pop("eplb_config"), is_on=found.pop("enable_eplb"))
    return found


def add_flags(parser: argparse.ArgumentParser, title: str, flags: Iterable[Flag]) -> None:
    """Add `flags` to the parser, below one heading."""
    group = parser.add_argument_group(title)
    for one in flags:
        group.add_argument(*one.names, **one.options)

"""`xpyd worker`: its flags. Imports nothing heavy; the server itself is in `main`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import cast

from xpyd_core.blocks import DEFAULT_BLOCK_SIZE
from xpyd_core.cli import Command
from xpyd_core.errors import UserError
from xpyd_core.logs import add_logging_arguments, set_up_logging
from xpyd_core.pod_env import ROLES, PodEnv, parse_discovery, read_pod_env
from xpyd_core.request_id import Address, parse_address
from xpyd_core.sizes import format_bytes, parse_bytes
from xpyd_kv.transport.settings import TRANSPORTS
from xpyd_kv.wire.messages import MODES
from xpyd_worker.config import (
    AUTO_BATCHED_TOKENS,
    AUTO_BATCHED_TOKENS_GPU,
    BLOCK_SIZES,
    CPU_CACHE_BYTES,
    DTYPES,
    Role,
    WorkerConfig,
    check_config,
)
from xpyd_worker.engine.limits import POLICIES
from xpyd_worker.ranks.start.messages import Logs

_EPILOG = """examples:
  xpyd worker --model examples/demo-model
  xpyd worker --model hf://Qwen/Qwen3-0.6B --dtype bfloat16 --max-model-len 4096
  xpyd worker --model /models/chat --role Prefill --host 10.0.0.5 --kv-key-file /run/kv.key \\
      --discovery router:30001
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the worker's flags. Those without default take it from the pod's environment."""
    _add_model(parser)
    _add_batch(parser)
    _add_place(parser)
    _add_kv(parser)
    add_logging_arguments(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add(
        "--model", required=True, metavar="PATH_OR_URI", help="folder, file:///... or hf://org/name"
    )
    add("--revision", help="branch, tag or commit of an hf:// model, e.g. main")
    add(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names that requests may use, e.g. chat (default: the checkpoint's own)",
    )
    add(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="auto, cpu, cuda (the first GPU) or cuda:N (default: auto, a GPU where torch finds "
        "one and triton is installed)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of weights and KV (default: auto, the checkpoint's, but float32 where the CPU is "
        "slow in 16 bits, and float16 for bfloat16 on a GPU that has none)",
    )
    add(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="prompt and output together, e.g. 4096 (default: the checkpoint's context, or what "
        "the KV cache holds)",
    )
    add(
        "--seed",
        type=int,
        metavar="N",
        help="0 to 2**64 - 1: base of the seeds drawn for requests without one, so that the same "
        "requests in the same order give the same tokens (default: another at each start)",
    )
    add(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads of the forward pass, of each rank (default: OMP_NUM_THREADS, else all "
        "cores, which ranks share)",
    )
    add(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share each layer (default: %(default)s)",
    )
    add(
        "--pipeline-parallel-size",
        "-pp",
        type=int,
        default=1,
        metavar="N",
        help="stages that hold the layers one behind the other; how many each: "
        "VLLM_PP_LAYER_PARTITION, e.g. 5,6,6,5 (default: %(default)s)",
    )
    add(
        "--disable-custom-all-reduce",
        action="store_true",
        help="NCCL adds up all that ranks on GPUs share; without, an all-reduce of our own adds up "
        "small tensors where the GPUs reach each other's memory. No effect on a CPU",
    )


def _add_batch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("batch and KV cache").add_argument
    add(
        "--max-num-seqs",
        type=int,
        default=256,
        metavar="N",
        help="sequences that run at once (default: %(default)s)",
    )
    add(
        "--max-num-batched-tokens",
        type=_tokens_or_auto,
        default="auto",
        metavar="TOKENS",
        help="of one forward, at least --max-num-seqs; longer prompts go in chunks, and running "
        "requests wait for one chunk at most between two of their tokens (default: auto, on a CPU "
        f"{AUTO_BATCHED_TOKENS}, on a GPU {AUTO_BATCHED_TOKENS_GPU}, or --max-num-seqs where that "
        "is more)",
    )
    add(
        "--long-prefill-token-threshold",
        type=int,
        default=0,
        metavar="TOKENS",
        help="of one prompt in one forward, so that others have room beside it, e.g. 256 "
        "(default: 0, off)",
    )
    add(
        "--scheduling-policy",
        choices=POLICIES,
        default="fcfs",
        help="fcfs: who came first goes first; priority: who has the lower number in the "
        "request's field priority does, then who came first (default: %(default)s)",
    )
    add(
        "--kv-cache-memory",
        metavar="SIZE",
        help="bytes of the paged KV cache, of each rank, e.g. 4Gi (default: on a CPU "
        f"{format_bytes(CPU_CACHE_BYTES)}, on a GPU what --gpu-memory-utilization leaves)",
    )
    add(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="above 0, at most 1: of the GPU's whole memory, for weights, the largest step, CUDA "
        "graphs and KV cache together; a step of that size is run at the start, and the KV cache "
        "gets the rest. No effect on a CPU, or on the KV cache where --kv-cache-memory is given "
        "(default: %(default)s)",
    )
    add(
        "--enforce-eager",
        action="store_true",
        help="no CUDA graphs: starts sooner, takes less memory, decodes slower. No effect on a CPU",
    )
    add(
        "--block-size",
        type=int,
        choices=BLOCK_SIZES,
        default=DEFAULT_BLOCK_SIZE,
        help="tokens of a KV block; P's and D's may differ (default: %(default)s)",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the KV of prompts and reuse it for the next with the same beginning; without: "
        "compute every prompt whole, e.g. for benchmarks (default: on)",
    )


def _tokens_or_auto(text: str) -> int | None:
    try:
        return None if text == "auto" else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected a number of tokens or auto, got {text!r}"
        ) from error


def _add_place(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("place in the fleet").add_argument
    add("--role", choices=ROLES, help="default: XPYD_ROLE, else Aggregated")
    add("--host", metavar="IP", help="literal ip to listen on (default: XPYD_POD_IP)")
    add("--port", type=int, metavar="N", help="HTTP port, e.g. 20001; 0: any free one")
    add("--discovery", metavar="HOST:PORT,...", help="routers, e.g. 10.0.0.2:30001")
    add("--heartbeat-period-ms", type=int, default=3000, metavar="MS", help="e.g. 3000")
    add("--drain-timeout", type=float, default=300, metavar="SECONDS", help="on SIGTERM, e.g. 300")
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send spans there by OTLP/HTTP, e.g. http://collector:4318/v1/traces (extra otel)",
    )


def _add_kv(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("KV transfer (roles Prefill and Decode)").add_argument
    add("--kv-port", type=int, metavar="N", help="KV port, e.g. 21001")
    add(
        "--kv-advertise",
        metavar="HOST:PORT",
        help="KV address that others dial, where it is not host and port, e.g. 192.0.2.7:21001",
    )
    add("--kv-key-file", type=Path, metavar="FILE", help="the fleet's secret, e.g. /run/kv.key")
    add(
        "--kv-insecure",
        action="store_true",
        help="no secret: whoever reaches the KV port may read and write KV, e.g. on one machine",
    )
    add(
        "--kv-mode",
        choices=[name.replace("_", "-") for name in MODES],
        default="put-async",
        help="when Prefill sends: put-async: while it computes; put: after each step, which waits; "
        "get: when Decode asks, e.g. get. Decode does what Prefill says",
    )
    add(
        "--kv-transport",
        choices=("auto", *TRANSPORTS),
        default="auto",
        help="what moves KV; auto: the best that both sides of a pair have",
    )
    add(
        "--kv-socket-dir",
        type=Path,
        metavar="DIR",
        help="folder that this machine's instances share, for uds and shm, e.g. /run/xpyd/chat",
    )
    add(
        "--kv-direct-free",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="share of blocks that stays free when KV lands directly, e.g. 0.1; 1: never directly",
    )
    add(
        "--kv-buffer-size",
        default="10%",
        metavar="SIZE",
        help="buffer for KV that waits, e.g. 8e9 or 10%% of the KV cache; ranks share it",
    )
    add(
        "--kv-host-pool-size",
        default="4Gi",
        metavar="SIZE",
        help="when it is full, e.g. 4Gi; ranks share it",
    )
    add("--kv-connections", type=int, default=1, metavar="N", help="TCP ones of a pair, e.g. 2")
    add("--kv-group-bytes", default="4Mi", metavar="SIZE", help="least bytes per frame, e.g. 4Mi")
    add("--kv-wait-seconds", type=float, default=10, metavar="S", help="for KV to come, e.g. 10")
    add("--kv-lease-seconds", type=float, default=30, metavar="S", help="of orphaned KV, e.g. 30")
    add(
        "--kv-on-failure",
        choices=("recompute", "fail"),
        default="recompute",
        help="what a request does whose KV does not come",
    )


def read_config(args: argparse.Namespace, env: PodEnv | None = None) -> WorkerConfig:
    """Flags and environment as one checked value; UserError names the flag that is wrong."""
    env = read_pod_env() if env is None else env
    cache = args.kv_cache_memory
    cache_bytes = None if cache is None else _size("--kv-cache-memory", cache)
    buffer_bytes, buffer_percent = _buffer(args.kv_buffer_size)
    config = WorkerConfig(
        model=args.model,
        revision=args.revision,
        served_model_names=tuple(args.served_model_name),
        device=args.device,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        scheduling_policy=args.scheduling_policy,
        kv_cache_bytes=cache_bytes,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enforce_eager=args.enforce_eager,
        block_size=args.block_size,
        prefix_caching=args.enable_prefix_caching,
        seed=args.seed,
        threads=args.threads,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        custom_all_reduce=not args.disable_custom_all_reduce,
        # Of one stage there is nothing to override; the variable is for the pools with more.
        layer_partition=env.layer_partition if args.pipeline_parallel_size > 1 else (),
        role=cast("Role", args.role or env.role),  # both are checked against ROLES
        host=_host(args.host, env),
        port=env.http_port if args.port is None else args.port,
        kv_port=env.kv_port if args.kv_port is None else args.kv_port,
        kv_advertise=_advertised(args.kv_advertise),
        kv_key_file=args.kv_key_file or env.kv_key_file,
        kv_mode=args.kv_mode.replace("-", "_"),
        kv_insecure=args.kv_insecure,
        kv_transports=TRANSPORTS if args.kv_transport == "auto" else (args.kv_transport,),
        kv_socket_dir=args.kv_socket_dir,
        kv_direct_free=args.kv_direct_free,
        kv_buffer_bytes=buffer_bytes,
        kv_buffer_percent=buffer_percent,
        kv_host_pool_bytes=_size("--kv-host-pool-size", args.kv_host_pool_size),
        kv_connections=args.kv_connections,
        kv_group_bytes=_size("--kv-group-bytes", args.kv_group_bytes),
        kv_wait_s=args.kv_wait_seconds,
        kv_lease_s=args.kv_lease_seconds,
        kv_recompute=args.kv_on_failure == "recompute",
        pods=env.group_size,
        pod=env.worker_index,
        leader_address=env.leader_address,
        discovery=env.discovery if args.discovery is None else _discovery(args.discovery),
        heartbeat_period_s=args.heartbeat_period_ms / 1000,
        drain_timeout_s=args.drain_timeout,
        fleet=env.fleet,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        pool=env.pool,
        instance=env.instance,
        pod_revision=env.revision,
    )
    check_config(config)
    return config


def _buffer(text: str) -> tuple[int | None, int]:
    """Bytes, or None and a percentage of a cache whose size may not be known yet."""
    size = _size("--kv-buffer-size", text, of=100)
    return (None, size) if text.endswith("%") else (size, 0)


def _size(flag: str, text: str, *, of: int | None = None) -> int:
    try:
        return parse_bytes(text, of=of)
    except UserError as error:
        raise UserError(f"{flag}: {error}") from error


def _host(given: str | None, env: PodEnv) -> str:
    """The ip to listen on. It must be one that others can dial, for heartbeats name it."""
    host = given or env.pod_ip
    try:
        address = ip_address(host)
    except ValueError as error:
        raise UserError(f"--host: {host!r} is not a literal ip, e.g. 127.0.0.1") from error
    if address.is_unspecified:
        raise UserError(f"--host: {host} is no address that others can dial; give the pod's own ip")
    return host


def _advertised(text: str | None) -> Address | None:
    try:
        return None if text is None else parse_address(text)
    except UserError as error:
        raise UserError(f"--kv-advertise: {error}") from error


def _discovery(text: str) -> tuple[Address, ...]:
    try:
        return parse_discovery(text)
    except UserError as error:
        raise UserError(f"--discovery: {error}") from error


def _run(args: argparse.Namespace) -> int:
    set_up_logging(args.log_level, args.log_format)
    config = read_config(args)
    logs = Logs(args.log_level, args.log_format)
    if config.pod:
        from xpyd_worker.ranks.pods.agent import serve_pod

        status = serve_pod(config)
    else:
        from xpyd_worker.main import run

        status = run(config, logs=logs)
    # Everything is closed; unloading torch module by module would take a second more, in which a
    # drain, a scale-down or a restart waits for nothing.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


command = Command(
    help="run one engine: a checkpoint folder in, OpenAI HTTP out",
    configure=configure,
    run=_run,
    epilog=_EPILOG,
)

"""`xpyd worker`: its flags. Imports nothing heavy; the server itself is in `main`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import cast

from xpyd_core.cli import Command, parse_flag
from xpyd_core.errors import UserError
from xpyd_core.logs import add_logging_arguments, set_up_logging
from xpyd_core.parallel.checks import DATA, HEADLESS, LOCAL, START_RANK
from xpyd_core.pod_env import PodEnv, parse_discovery, read_pod_env
from xpyd_core.request_id import parse_address
from xpyd_core.sizes import parse_bytes
from xpyd_core.tls import ServerFiles, add_server_arguments, read_server_files
from xpyd_kv.transport.settings import TRANSPORTS
from xpyd_worker.config import Role, WorkerConfig
from xpyd_worker.config_check import check_config
from xpyd_worker.flags import GROUPS, add_flags, engine_fields
from xpyd_worker.ranks.start.messages import Logs

_EPILOG = """examples:
  xpyd worker --model examples/demo-model
  xpyd worker --model hf://Qwen/Qwen3-0.6B --dtype bfloat16 --max-model-len 4096
  xpyd worker --model /models/chat --role Prefill --host 10.0.0.5 --kv-key-file /run/kv.key \\
      --discovery router:30001
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the worker's flags. Those without default take it from the pod's environment."""
    for title, flags in GROUPS.items():
        add_flags(parser, title, flags)
    add_server_arguments(parser)
    text = (
        "with --ssl-ca-certs: GET of /health, /live and /metrics is answered also without a "
        "certificate, as kubelet and Prometheus ask"
    )
    parser.add_argument("--ssl-open-probes", action="store_true", help=text)
    add_logging_arguments(parser)


def read_config(args: argparse.Namespace, env: PodEnv | None = None) -> WorkerConfig:
    """Flags and environment as one checked value; UserError names the flag that is wrong."""
    env = read_pod_env() if env is None else env
    cache = args.kv_cache_memory
    cache_bytes = None if cache is None else parse_flag("--kv-cache-memory", parse_bytes, cache)
    buffer_bytes, buffer_percent = _buffer(args.kv_buffer_size)
    pods, pod = _pods(args, env)
    config = WorkerConfig(
        **engine_fields({**vars(args), "kv_cache_memory": cache_bytes}),
        latency_goal=args.latency_goal,
        served_model_names=tuple(args.served_model_name),
        chat_template=_template(args.chat_template),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        enable_auto_tool_choice=args.enable_auto_tool_choice,
        # Of one stage there is nothing to override; the variable is for the pools with more.
        layer_partition=env.layer_partition if args.pipeline_parallel_size > 1 else (),
        data_parallel_size=args.data_parallel_size,
        enable_elastic_ep=args.enable_elastic_ep,
        data_parallel_size_file=args.data_parallel_size_file,
        on_rank_loss=args.on_rank_loss,
        role=cast("Role", args.role or env.role),  # both are checked against ROLES
        host=_host(args.host, env),
        port=env.http_port if args.port is None else args.port,
        tls=_server_files(args),
        has_open_probes=args.ssl_open_probes,
        kv_port=env.kv_port if args.kv_port is None else args.kv_port,
        kv_advertise=None
        if args.kv_advertise is None
        else parse_flag("--kv-advertise", parse_address, args.kv_advertise),
        kv_key_file=args.kv_key_file or env.kv_key_file,
        kv_mode=args.kv_mode.replace("-", "_"),
        kv_insecure=args.kv_insecure,
        accept_unsigned_pairs=args.accept_unsigned_pairs,
        kv_transports=TRANSPORTS if args.kv_transport == "auto" else (args.kv_transport,),
        kv_encrypted=args.kv_encryption == "tls",
        kv_socket_dir=args.kv_socket_dir,
        kv_direct_free=args.kv_direct_free,
        kv_buffer_bytes=buffer_bytes,
        kv_buffer_percent=buffer_percent,
        kv_host_pool_bytes=parse_flag("--kv-host-pool-size", parse_bytes, args.kv_host_pool_size),
        kv_connections=args.kv_connections,
        kv_group_bytes=parse_flag("--kv-group-bytes", parse_bytes, args.kv_group_bytes),
        kv_wait_s=args.kv_wait_seconds,
        kv_lease_s=args.kv_lease_seconds,
        kv_recompute=args.kv_on_failure == "recompute",
        pods=pods,
        pod=pod,
        leader_address=args.data_parallel_address or env.leader_address,
        rpc_port=args.data_parallel_rpc_port,
        discovery=env.discovery
        if args.discovery is None
        else parse_flag("--discovery", parse_discovery, args.discovery),
        heartbeat_period_s=args.heartbeat_period_ms / 1000,
        drain_timeout_s=args.drain_timeout,
        fleet=env.fleet,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        pool=env.pool,
        instance=env.instance,
        pod_revision=env.revision,
        fleet_revision=env.fleet_revision,
    )
    check_config(config)
    return config


def _pods(args: argparse.Namespace, env: PodEnv) -> tuple[int, int]:
    """How many pods the instance has, and which this is: as LeaderWorkerSet says, or by hand. Where
    both do they must say the same. UserError, with the numbers."""
    size, local, start = (
        args.data_parallel_size,
        args.data_parallel_size_local,
        args.data_parallel_start_rank,
    )
    is_group, pods, pod = env.group_size > 1, env.group_size, env.worker_index
    if local is not None:
        if not 1 <= local <= size or size % local:
            raise UserError(f"{LOCAL} {local}: expected a divisor of {DATA} {size}: pods are alike")
        if is_group and local * pods != size:
            raise UserError(f"{LOCAL} {local}: of {DATA} {size}, but LWS_GROUP_SIZE is {pods}")
        pods = size // local
    each = max(1, size // max(1, pods))
    if start is not None:
        if not 0 <= start < size or start % each:
            raise UserError(
                f"{START_RANK} {start}: expected a multiple of {each}, the replicas of a pod "
                f"({LOCAL}), below {DATA} {size}"
            )
        if is_group and start != pod * each:
            raise UserError(f"{START_RANK} {start}: LWS_WORKER_INDEX {pod} begins at {pod * each}")
        pod = start // each
    if args.headless and pod == 0:
        raise UserError(f"{HEADLESS}: the pod of replica 0 serves HTTP; give {START_RANK}, too")
    if pod and not (args.headless or is_group):
        raise UserError(f"{START_RANK} {start}: the pod of replica 0 serves HTTP; give {HEADLESS}")
    return pods, pod


def _buffer(text: str) -> tuple[int | None, int]:
    """Bytes, or None and a percentage of a cache whose size may not be known yet."""
    size = parse_flag("--kv-buffer-size", partial(parse_bytes, of=100), text)
    return (None, size) if text.endswith("%") else (size, 0)


def _template(given: str | None) -> str | None:
    """The template of a file, or `given` itself where it is one, which has braces. UserError for a
    file that cannot be read."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat-template: cannot read {given}: {error}") from error


def _server_files(args: argparse.Namespace) -> ServerFiles | None:
    files = read_server_files(args)
    if not args.ssl_open_probes:
        return files
    if files is None or files.client_certificates != 2:
        raise UserError("--ssl-open-probes: needs --ssl-ca-certs, and no --ssl-cert-reqs 1")
    return replace(files, client_certificates=1)  # who has none gets the probes' answers alone


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

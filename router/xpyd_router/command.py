"""`xpyd router`: its flags. Imports nothing heavy; the server itself is in `router`."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from types import FrameType

from xpyd_core.cli import Command, parse_flag
from xpyd_core.keys import check_keys_given
from xpyd_core.logs import add_logging_arguments, set_up_logging
from xpyd_core.messages import HEARTBEAT_PERIOD_S, MISSED_BEATS
from xpyd_core.pod_env import DISCOVERY_PORT, ROUTER_ADMIN_PORT, ROUTER_HTTP_PORT, read_pod_env
from xpyd_core.sizes import parse_bytes
from xpyd_core.tls import (
    add_engine_arguments,
    add_server_arguments,
    read_engine_files,
    read_server_files,
)
from xpyd_router.admission import AdmissionLimits
from xpyd_router.config import RouterConfig
from xpyd_router.config_check import check_config
from xpyd_router.cross_site import CrossSite, check_cross_site, read_list
from xpyd_router.fleet.health import HealthRules
from xpyd_router.fleet.listed import parse_listed
from xpyd_router.keys.watch import read_proxies
from xpyd_router.policy.base import KV_VERIFY, ON_NO_DECODE, ON_NO_PREFILL, PAIRINGS, Slo
from xpyd_router.request.client_request import check_forwarded_names

_EPILOG = """examples:
  xpyd router --kv-key-file kv.key               on 127.0.0.1:10001, engines beat to port 30001
  xpyd router --host 10.0.1.1 --kv-insecure      a fleet without a secret, or engines of vLLM
  curl http://127.0.0.1:10002/instances          what it knows of the engines"""

_MIB = 1024 * 1024
_DEFAULT = "(default: %(default)s)"


class _Flags:
    """Flags by what their value is."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.add = parser.add_argument

    def number(self, flag: str, value: int | None, text: str, metavar: str | None = "N") -> None:
        self.add(flag, type=int, default=value, metavar=metavar, help=text)

    def seconds(self, flag: str, value: float, text: str) -> None:
        self.add(flag, type=float, default=value, metavar="SECONDS", help=f"{text} {_DEFAULT}")

    def size(self, flag: str, value: int, text: str) -> None:
        shown = f"{value // 2**20}Mi"
        self.add(flag, default=shown, metavar="SIZE", help=f"{text} {_DEFAULT}")


def _configure(parser: argparse.ArgumentParser) -> None:
    flags, default = _Flags(parser), RouterConfig()
    _add_fleet(flags, default)
    add_server_arguments(parser)
    add_engine_arguments(parser)
    _add_cross_site(flags)
    _add_policy(flags, default)
    _add_requests(flags, default)
    _add_limits(flags, default.limits)
    add_logging_arguments(parser)


def _add_fleet(flags: _Flags, default: RouterConfig) -> None:
    add, number = flags.add, flags.number
    add("--host", help="address of the HTTP ports (default: XPYD_POD_IP, else 127.0.0.1)")
    number("--port", ROUTER_HTTP_PORT, f"HTTP port of clients; 0 = any free one {_DEFAULT}", None)
    number(
        "--admin-port",
        ROUTER_ADMIN_PORT,
        f"HTTP port of /metrics, /instances and /admin; 0 = any free one {_DEFAULT}",
        None,
    )
    number("--listen-fd", None, "serve on this inherited socket, not --host and --port", "FD")
    number("--admin-listen-fd", None, "the same in place of --host and --admin-port", "FD")
    text = f"processes that serve HTTP; with more than 1, one more owns discovery {_DEFAULT}"
    number("--processes", default.processes, text)
    add("--discovery-host", help="address that engines beat to (default: --host)")
    number("--discovery-port", DISCOVERY_PORT, f"port that engines beat to {_DEFAULT}", None)
    add("--kv-key-file", type=Path, help="the fleet's secret (default: XPYD_KV_KEY_FILE)")
    add("--kv-insecure", action="store_true", help="the fleet has no secret")
    add(
        "--accept-unsigned-beats",
        action="store_true",
        help="take engines that do not sign with the key, too: older ones, and vLLM's",
    )
    add(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="keys that open /admin, one per line (default: /admin is closed)",
    )
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="keys of clients, as `xpyd key new` makes its lines; read again when it changes "
        "(default: clients need no key)",
    )
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key of clients itself, without limits; may be repeated (default: XPYD_API_KEY)",
    )
    add(
        "--forwarded-allow-ips",
        action="append",
        default=[],
        metavar="LIST",
        help="addresses or networks of proxies, with commas between them, or *: of what they pass "
        "on, X-Forwarded-For says in the log whose key was refused (default: none)",
    )
    add(
        "--peers",
        metavar="NAME",
        help="a DNS name with one address for each router: limits of client keys are divided by "
        "their number (default: this router has them alone)",
    )
    add(
        "--static-instance",
        action="append",
        default=[],
        metavar="TYPE=URL,...",
        help="an engine that sends no heartbeats, P, D or A=http[s]://HOST:PORT; of a P or D its "
        "dialect=nixl, nixl-push or pair-id, for pair-id kv=HOST:PORT, prompt-ids=no where "
        "it counts its output, and for nixl compat=NAME, which those that may pair have in common; "
        "may be repeated",
    )
    number(
        "--heartbeat-interval-ms",
        round(HEARTBEAT_PERIOD_S * 1000),
        f"period of engines that do not say their own {_DEFAULT}",
        None,
    )
    number("--missed-beats", MISSED_BEATS, f"beats missed before removal {_DEFAULT}", None)


def _add_cross_site(flags: _Flags) -> None:
    lists = {
        "--allowed-origins": "origins whose web pages may use the router, or * (default: none)",
        "--allowed-methods": "methods that they may use (default: all)",
        "--allowed-headers": "headers that they may send (default: all)",
    }
    for flag, text in lists.items():
        shown = f"{text}; a JSON list, or repeated"
        flags.add(flag, action="append", default=[], metavar="LIST", help=shown)
    flags.add(
        "--allow-credentials", action="store_true", help="their requests may have cookies, too"
    )
    flags.add(
        "--allowed-hosts",
        action="append",
        default=[],
        metavar="LIST",
        help="names by which clients reach the router, or *.NAME; a JSON list, or repeated "
        "(default: on a loopback address those of the loopback, else any)",
    )


def _cross_site(args: argparse.Namespace) -> CrossSite:
    return check_cross_site(
        CrossSite(
            origins=read_list("--allowed-origins", args.allowed_origins),
            methods=read_list("--allowed-methods", args.allowed_methods) or ("*",),
            headers=read_list("--allowed-headers", args.allowed_headers) or ("*",),
            allows_credentials=args.allow_credentials,
            hosts=read_list("--allowed-hosts", args.allowed_hosts),
        )
    )


def _add_policy(flags: _Flags, default: RouterConfig) -> None:
    add, number, seconds = flags.add, flags.number, flags.seconds
    add(
        "--policy",
        default=default.policy,
        metavar="NAME",
        help="who serves a request: RoundRobin, Random, PowerOfTwo, LeastLoaded, PrefixAware, "
        f"SessionAffinity, SloAware or the name of a policy of another package {_DEFAULT}",
    )
    add("--prefill-policy", metavar="NAME", help="for prefill instances (default: --policy)")
    add("--decode-policy", metavar="NAME", help="for decode instances (default: --policy)")
    number("--slo-ttft-ms", None, "time that a first token may take (default: no objective)")
    number("--slo-itl-ms", None, "mean time between its tokens (default: no objective)")
    number(
        "--local-prefill-tokens",
        default.local_prefill_tokens,
        f"prompts with fewer tokens to compute stay on D; 0 = none {_DEFAULT}",
    )
    add(
        "--pairing",
        choices=PAIRINGS,
        default=default.pairing,
        help="whether P and D of different revisions of a fleet may be a pair, where their KV is "
        f"compatible {_DEFAULT}",
    )
    add(
        "--canary-file",
        type=Path,
        metavar="FILE",
        help="JSON that gives a revision on trial a share of new requests; the operator writes it",
    )
    add(
        "--exact-prefixes",
        action="store_true",
        help="count each prompt's tokens: PrefixAware compares them instead of text, and other "
        "policies and limits have no estimate",
    )
    health = default.health
    seconds("--probe-interval", health.probe_interval_s, "between two GET /health of an instance")
    seconds(
        "--probe-timeout",
        health.probe_timeout_s,
        "for the answer to one; two without an answer and a late beat are a frozen instance",
    )
    seconds(
        "--kv-probe-seconds",
        default.kv_probe_s,
        "between two probes of the way that KV takes from a P to a D; 0: none",
    )
    add(
        "--kv-verify",
        choices=KV_VERIFY,
        default=default.kv_verify,
        help="strict: a P and a D are a pair only while probes get from one to the other; report: "
        f"what probes find is shown {_DEFAULT}",
    )
    seconds(
        "--slow-start-seconds",
        health.slow_start_s,
        "until an instance that joined others, or came back, has its full share of requests; "
        "0 = at once",
    )


def _add_requests(flags: _Flags, default: RouterConfig) -> None:
    add, number, seconds = flags.add, flags.number, flags.seconds
    seconds(
        "--request-timeout",
        default.request_timeout_s,
        "for a whole answer, for the first byte of a stream, and for each gap in it",
    )
    seconds("--prefill-timeout", default.prefill_timeout_s, "for one call to a prefill instance")
    number(
        "--max-tries",
        default.max_tries,
        "of a request that fails, in all; a refusal by an engine that is full or drains is none "
        f"{_DEFAULT}",
    )
    flags.size("--max-body-bytes", default.max_body_bytes, "longest request body")
    flags.size(
        "--max-open-body-bytes",
        default.max_open_body_bytes,
        "memory of all open requests' bodies, of each process, three to five times their length; "
        "above it 503",
    )
    number(
        "--responses-store-mib",
        default.responses_store_bytes // _MIB,
        "MiB of memory for responses of /v1/responses, which previous_response_id names; needs "
        f"--processes 1; 0 = none is kept {_DEFAULT}",
        metavar="MIB",
    )
    seconds(
        "--drain-seconds",
        default.drain_s,
        "how long to go on accepting after SIGTERM, while load balancers take notice",
    )
    add(
        "--forward-header",
        action="append",
        default=[],
        metavar="NAME",
        help="a header of the client that engines get, too; may be repeated (default: only "
        "traceparent and tracestate)",
    )
    add("--no-access-log", action="store_true", help="no log line per request")


def _add_limits(flags: _Flags, limits: AdmissionLimits) -> None:
    number, seconds = flags.number, flags.seconds
    number("--max-concurrent-requests", None, "requests in flight; more wait (default: no limit)")
    number(
        "--max-concurrent-tokens",
        None,
        "tokens of prompts and allowed outputs in flight; more wait (default: no limit)",
    )
    number("--queue-size", limits.queue_entries, f"requests that may wait; more get 429 {_DEFAULT}")
    flags.size("--queue-bytes", limits.queue_bytes, "bodies of requests that may wait")
    seconds(
        "--queue-timeout-seconds",
        limits.queue_timeout_s,
        "how long a request waits for its turn and for a pair; then it gets 503",
    )
    flags.add(
        "--on-no-prefill",
        choices=ON_NO_PREFILL,
        default="Queue",
        help="a request that finds no pair waits, or D computes its prompt, too, or it gets 503 "
        f"{_DEFAULT}",
    )
    flags.add(
        "--on-no-decode",
        choices=ON_NO_DECODE,
        help="without a D it waits, or P makes the whole answer, or it gets 503 (default: Reject "
        "with --on-no-prefill Reject, else Queue)",
    )


def read_config(args: argparse.Namespace) -> RouterConfig:
    """Flags and environment as one value; UserError names the flag that is wrong."""
    env = read_pod_env()
    host = args.host or env.pod_ip
    config = RouterConfig(
        host=host,
        port=args.port,
        listen_fd=args.listen_fd,
        admin_port=args.admin_port,
        admin_listen_fd=args.admin_listen_fd,
        tls=read_server_files(args),
        engine_tls=read_engine_files(args),
        engine_server_name=args.engine_server_name,
        cross_site=_cross_site(args),
        processes=args.processes,
        discovery_host=args.discovery_host or host,
        discovery_port=args.discovery_port,
        fleet=env.fleet,
        kv_key_file=args.kv_key_file or env.kv_key_file,
        kv_insecure=args.kv_insecure,
        accept_unsigned_beats=args.accept_unsigned_beats,
        admin_key_file=args.admin_key_file,
        api_key_file=args.api_key_file,
        api_keys=tuple(args.api_key or ([env.api_key] if env.api_key else [])),
        proxies=tuple(str(one) for one in read_proxies(args.forwarded_allow_ips)),
        peers=args.peers or "",
        static_instances=parse_listed(args.static_instance),
        heartbeat_interval_s=args.heartbeat_interval_ms / 1000,
        missed_beats=args.missed_beats,
        policy=args.policy,
        prefill_policy=args.prefill_policy,
        decode_policy=args.decode_policy,
        local_prefill_tokens=args.local_prefill_tokens,
        slo=Slo(_seconds(args.slo_ttft_ms), _seconds(args.slo_itl_ms)),
        exact_prefixes=args.exact_prefixes,
        health=HealthRules(
            probe_interval_s=args.probe_interval,
            probe_timeout_s=args.probe_timeout,
            slow_start_s=args.slow_start_seconds,
        ),
        request_timeout_s=args.request_timeout,
        prefill_timeout_s=args.prefill_timeout,
        max_tries=args.max_tries,
        max_body_bytes=parse_flag("--max-body-bytes", parse_bytes, args.max_body_bytes),
        max_open_body_bytes=parse_flag(
            "--max-open-body-bytes", parse_bytes, args.max_open_body_bytes
        ),
        limits=AdmissionLimits(
            requests=args.max_concurrent_requests,
            tokens=args.max_concurrent_tokens,
            queue_entries=args.queue_size,
            queue_bytes=parse_flag("--queue-bytes", parse_bytes, args.queue_bytes),
            queue_timeout_s=args.queue_timeout_seconds,
        ),
        pair_wait_s=args.queue_timeout_seconds,
        on_no_prefill=args.on_no_prefill,
        on_no_decode=args.on_no_decode,
        pairing=args.pairing,
        canary_file=args.canary_file,
        kv_probe_s=args.kv_probe_seconds,
        kv_verify=args.kv_verify,
        responses_store_bytes=args.responses_store_mib * _MIB,
        drain_s=args.drain_seconds,
        forward_headers=check_forwarded_names(args.forward_header),
        access_log=not args.no_access_log,
        logs_json=args.log_format == "json",
    )
    check_config(config)
    check_keys_given(config.kv_key_file, insecure=config.kv_insecure, who="a router")
    return config


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)


def _run(args: argparse.Namespace) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        # Nothing has begun that would need an end; `router` takes them over.
        signal.signal(number, _leave)
    set_up_logging(args.log_level, args.log_format)
    config = read_config(args)
    if config.processes > 1:
        from xpyd_router.processes.parent import run_parent

        return run_parent(config)
    from xpyd_router.router import run_router

    return run_router(config)


command = Command(
    help="run the router: OpenAI HTTP in front, engines found by heartbeat",
    configure=_configure,
    run=_run,
    epilog=_EPILOG,
)

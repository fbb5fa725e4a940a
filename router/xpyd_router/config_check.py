"""Which values of the router's configuration cannot be, in the words of its flags."""

from __future__ import annotations

import re

from xpyd_core.errors import UserError
from xpyd_router.config import RouterConfig
from xpyd_router.keys.lines import MAX_KEY_BYTES
from xpyd_router.request.client_request import MAX_SLO_MS

_DAY_S = 86400
"""The longest wait, of any kind: timers do not take any number."""
_DAY = f"at most {_DAY_S}"
_MOST = 2**40
"""The bound on counts of what is in flight: processes share such counts as 64 bits."""
_MIB = 1024 * 1024


def check_config(config: RouterConfig) -> None:
    """UserError names the flag of the first value that cannot be."""
    # A body, what calls take of memory besides, a translation, and with keys what their members add
    # within the part of it that one key may have.
    copies = 6 if config.needs_keys else 4
    checks = {
        f"--api-key: expected 1 to {MAX_KEY_BYTES} printable characters without spaces": all(
            re.fullmatch(rf"[!-~]{{1,{MAX_KEY_BYTES}}}", key) for key in config.api_keys
        ),
        "--forward-header: with client keys, engines do not get authorization and x-api-key": (
            not config.needs_keys
            or not {"authorization", "x-api-key"} & {n.lower() for n in config.forward_headers}
        ),
        "--forwarded-allow-ips: needs client keys, whose refusals are logged": (
            config.needs_keys or not config.proxies
        ),
        "--peers: needs client keys, whose limits routers share": (
            config.needs_keys or not config.peers
        ),
        f"--max-open-body-bytes: expected {copies} times --max-body-bytes at least": (
            config.max_open_body_bytes >= copies * config.max_body_bytes
        ),
        "--kv-verify: strict needs probes: give --kv-probe-seconds more than 0": (
            config.kv_verify == "report" or config.kv_probe_s > 0
        ),
        "--port: expected 0 to 65535": 0 <= config.port < 65536,
        "--admin-port: expected 0 to 65535": 0 <= config.admin_port < 65536,
        "--admin-port: expected another port than --port": (
            config.port != config.admin_port or not config.port or config.listen_fd is not None
        ),
        "--listen-fd: expected 3 or more": _is_descriptor(config.listen_fd),
        "--admin-listen-fd: expected 3 or more": _is_descriptor(config.admin_listen_fd),
        "--processes: expected 1 to 64": 1 <= config.processes <= 64,
        "--discovery-port: expected 0 to 65535": 0 <= config.discovery_port < 65536,
        "--heartbeat-interval-ms: expected 50 to 60000": 0.05 <= config.heartbeat_interval_s <= 60,
        "--missed-beats: expected 1 to 100": 1 <= config.missed_beats <= 100,
        "--probe-interval: expected 0.1 to 60": 0.1 <= config.health.probe_interval_s <= 60,
        "--probe-timeout: expected 0.1 to 60": 0.1 <= config.health.probe_timeout_s <= 60,
        "--slow-start-seconds: expected 0 to 600": 0 <= config.health.slow_start_s <= 600,
        "--local-prefill-tokens: expected 0 or more": config.local_prefill_tokens >= 0,
        f"--slo-ttft-ms: expected 1 to {MAX_SLO_MS}": _is_slo(config.slo.ttft_s),
        f"--slo-itl-ms: expected 1 to {MAX_SLO_MS}": _is_slo(config.slo.itl_s),
        f"--request-timeout: expected more than 0, {_DAY}": _is_wait(config.request_timeout_s),
        f"--prefill-timeout: expected more than 0, {_DAY}": _is_wait(config.prefill_timeout_s),
        "--max-tries: expected 1 to 100": 1 <= config.max_tries <= 100,
        "--max-body-bytes: expected at least 1Ki": config.max_body_bytes >= 1024,
        f"--max-concurrent-requests: expected 1 to {_MOST}": _is_limit(config.limits.requests),
        f"--max-concurrent-tokens: expected 1 to {_MOST}": _is_limit(config.limits.tokens),
        "--queue-size: expected 0 to 1000000": 0 <= config.limits.queue_entries <= 1_000_000,
        f"--queue-timeout-seconds: expected 0 or more, {_DAY}": (
            0 <= config.limits.queue_timeout_s <= _DAY_S
        ),
        "--responses-store-mib: expected 0 to 1048576": (
            0 <= config.responses_store_bytes <= 2**20 * _MIB
        ),
        "--responses-store-mib: needs --processes 1: each process would keep responses of its "
        "own": config.processes == 1 or not config.responses_store_bytes,
        f"--drain-seconds: expected 0 or more, {_DAY}": 0 <= config.drain_s <= _DAY_S,
    }
    for complaint, holds in checks.items():
        if not holds:
            raise UserError(complaint)


def _is_descriptor(value: int | None) -> bool:
    return value is None or value > 2


def _is_slo(value_s: float | None) -> bool:
    return value_s is None or 1 <= value_s * 1000 <= MAX_SLO_MS


def _is_wait(value_s: float) -> bool:
    return 0 < value_s <= _DAY_S


def _is_limit(value: int | None) -> bool:
    return value is None or 1 <= value <= _MOST

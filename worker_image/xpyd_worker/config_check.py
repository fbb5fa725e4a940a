"""What of a worker's configuration cannot work, said before anything starts, with the flag."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from xpyd_core.errors import UserError
from xpyd_core.keys import check_keys_given
from xpyd_core.parallel.checks import (
    DATA,
    DATA_FILE,
    ELASTIC,
    EPLB,
    EXPERT,
    ON_LOSS,
    PIPELINE,
    RPC_PORT,
    TENSOR,
)
from xpyd_core.parallel.ranks import kv_ports
from xpyd_core.request_id import is_dialable
from xpyd_kv.transport.settings import MAX_LINKS, check_encrypted
from xpyd_kv.wire.handshake import OVER_TCP
from xpyd_worker.config import BLOCK_SIZES, DTYPES, WorkerConfig
from xpyd_worker.engine.request import POLICIES

MAX_PARALLEL = 64
"""The most ranks of each axis."""


@dataclass(frozen=True)
class Bounds:
    """What a flag's number may be. `value` is in the flag's unit; None: not given."""

    value: Callable[[WorkerConfig], float | None]
    least: float
    most: float | None
    expected: str


@dataclass(frozen=True)
class Pattern:
    """What a flag's text may be: a regular expression for all of it. None: not given."""

    value: Callable[[WorkerConfig], str | None]
    pattern: str
    expected: str


BOUNDS: Mapping[str, Bounds] = {
    "--gpu-memory-utilization": Bounds(
        lambda config: config.gpu_memory_utilization,
        math.ulp(0.0),
        1,
        "above 0 and at most 1, e.g. 0.9",
    ),
    "--max-model-len": Bounds(lambda config: config.max_model_len, 2, 2**40, "at least 2"),
    "--max-num-seqs": Bounds(lambda config: config.max_num_seqs, 1, None, "at least 1"),
    "--max-num-batched-tokens": Bounds(
        lambda config: config.max_num_batched_tokens, 1, 2**40, "at least 1"
    ),
    "--long-prefill-token-threshold": Bounds(
        lambda config: config.long_prefill_token_threshold, 0, None, "0 (off) or more"
    ),
    "--seed": Bounds(lambda config: config.seed, 0, 2**64 - 1, "0 to 2**64 - 1"),
    "--threads": Bounds(lambda config: config.threads, 1, 1024, "1 to 1024"),
    "--port": Bounds(lambda config: config.port, 0, 65535, "0 to 65535"),
    # A request id is dialled only from 1024 on, so a lower KV port could never be reached.
    "--kv-port": Bounds(lambda config: config.kv_port, 1024, 65535, "1024 to 65535"),
    RPC_PORT: Bounds(lambda config: config.rpc_port, 1024, 65535, "1024 to 65535"),
    "--kv-direct-free": Bounds(lambda config: config.kv_direct_free, 0, 1, "0 to 1"),
    "--kv-connections": Bounds(
        lambda config: config.kv_connections, 1, MAX_LINKS, f"1 to {MAX_LINKS}"
    ),
    "--kv-group-bytes": Bounds(lambda config: config.kv_group_bytes, 1, None, "at least 1"),
    "--kv-wait-seconds": Bounds(lambda config: config.kv_wait_s, 0, 600, "0 to 600"),
    "--kv-lease-seconds": Bounds(lambda config: config.kv_lease_s, 1, 3600, "1 to 3600"),
    "--heartbeat-period-ms": Bounds(
        lambda config: config.heartbeat_period_s * 1000, 50, 60000, "50 to 60000"
    ),
    "--drain-timeout": Bounds(
        lambda config: config.drain_timeout_s, 0, 86400, "0 to 86400 seconds"
    ),
}
"""Of each flag whose number has bounds of its own. The operator checks engine.args by them, too
(`make generate`)."""
PATTERNS: Mapping[str, Pattern] = {
    "--device": Pattern(
        lambda config: config.device,
        "auto|cpu|cuda(:(0|[1-9][0-9]?))?",
        "auto, cpu, cuda or cuda:N",
    ),
    "--otlp-traces-endpoint": Pattern(
        lambda config: config.otlp_traces_endpoint,
        "https?://.*",
        "an OTLP/HTTP URL, e.g. http://collector:4318/v1/traces (not gRPC)",
    ),
}
"""Of each flag whose text has a form, in the same way."""


def check_config(config: WorkerConfig) -> None:
    """Raise UserError for the first value that cannot work; it names the flag and the fix."""
    for complaint, holds in _checks(config):
        if not holds:
            raise UserError(complaint)
    if config.moves_kv or config.kv_insecure or config.pods > 1:
        who = f"role {config.role} moves KV and"
        if config.pods > 1:
            who = f"an instance of {config.pods} pods"
        check_keys_given(config.kv_key_file, insecure=config.kv_insecure, who=who)
    if config.kv_encrypted:
        check_encrypted(
            config.kv_transports, connections=config.kv_connections, insecure=config.kv_insecure
        )
    if config.kv_advertise is not None and not is_dialable(config.kv_advertise):
        raise UserError(
            f"--kv-advertise: {config.kv_advertise} must be a literal ip and a port from 1024 on"
        )


def _parallel_checks(config: WorkerConfig) -> list[tuple[str, bool]]:
    ranks = config.data_parallel_size * config.sizes.replica
    ports = kv_ports(
        config.kv_port,
        config.data_parallel_size,
        config.sizes.replica,
        is_elastic=config.enable_elastic_ep,
    )
    advertised = config.kv_advertise.port if config.kv_advertise else 0
    return [
        *(
            (f"{flag}: {size}; expected 1 to {MAX_PARALLEL}", 1 <= size <= MAX_PARALLEL)
            for flag, size in (
                (TENSOR, config.tensor_parallel_size),
                (PIPELINE, config.pipeline_parallel_size),
                (DATA, config.data_parallel_size),
            )
        ),
        *_pod_checks(config),
        (
            f"--device {config.device}: with several ranks each takes the GPU of its own number; "
            "give cuda",
            not config.has_ranks or ":" not in config.device,
        ),
        (
            f"{ELASTIC}: replicas come and go only without stages, not with {PIPELINE} "
            f"{config.pipeline_parallel_size}",
            not config.enable_elastic_ep or config.pipeline_parallel_size == 1,
        ),
        (
            f"{ELASTIC}: experts of replicas that come and go do not move; leave out {EPLB}",
            not (config.enable_elastic_ep and config.eplb is not None),
        ),
        *_loss_checks(config),
        (
            f"{DATA_FILE}: replicas stay as they are without {ELASTIC}; give it, too",
            config.data_parallel_size_file is None or config.enable_elastic_ep,
        ),
        (
            f"--kv-port {config.kv_port}: the KV of {ranks} ranks takes {len(ports)} ports from "
            "it on, up to 65535",
            ports.stop <= 65536,
        ),
        (
            f"--kv-advertise: the KV of {ranks} ranks takes {len(ports)} ports from {advertised} "
            "on, up to 65535",
            advertised + len(ports) <= 65536,
        ),
        (
            f"--port {config.port}: the KV ports of all ranks are {ports.start} to "
            f"{ports.stop - 1}; give another one, or another --kv-port",
            not config.has_ranks or config.role != "Decode" or config.port not in ports,
        ),
    ]


def _loss_checks(config: WorkerConfig) -> list[tuple[str, bool]]:
    if config.on_rank_loss != "continue":
        return []
    asked = f"{ON_LOSS} continue"
    return [
        (
            f"{asked}: replicas that share experts go on without another; give {DATA} from 2 on "
            f"and {EXPERT}",
            config.in_lock_step,
        ),
        (
            f"{asked}: only without stages, not with {PIPELINE} {config.pipeline_parallel_size}",
            config.pipeline_parallel_size == 1,
        ),
        (
            f"{asked}: give --role Aggregated or Decode, not Prefill: a step that is made again "
            "would send its KV twice",
            config.role != "Prefill",
        ),
        (f"{asked}: experts do not move then; leave out {EPLB}", config.eplb is None),
        (f"{asked}: replicas of one pod go on, not of {config.pods}", config.pods == 1),
    ]


def _pod_checks(config: WorkerConfig) -> list[tuple[str, bool]]:
    """By hand --data-parallel-size-local and --data-parallel-start-rank say what LeaderWorkerSet's
    variables do (command.py)."""
    pods, data, stages = config.pods, config.data_parallel_size, config.pipeline_parallel_size
    what = f"{data} replicas" if data > 1 else f"{stages} stages"
    return [
        (
            f"LWS_GROUP_SIZE: {pods} pods for {what}; each pod holds as many whole ones",
            pods >= 1 and (data if data > 1 else stages) % pods == 0,
        ),
        (
            f"LWS_WORKER_INDEX: {config.pod} of {pods} pods; they count from 0",
            0 <= config.pod < pods,
        ),
        (
            "LWS_LEADER_ADDRESS or --data-parallel-address: expected the address of the instance's "
            "first pod",
            pods == 1 or bool(config.leader_address),
        ),
        (
            f"{ELASTIC}: replicas come and go in one pod, not in {pods}",
            pods == 1 or not config.enable_elastic_ep,
        ),
    ]


def _value_checks(config: WorkerConfig) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    for flag, bounds in BOUNDS.items():
        value = bounds.value(config)
        most = math.inf if bounds.most is None else bounds.most
        holds = value is None or bounds.least <= value <= most
        found.append((f"{flag}: expected {bounds.expected}", holds))
    for flag, form in PATTERNS.items():
        text = form.value(config)
        holds = text is None or re.fullmatch(form.pattern, text) is not None
        found.append((f"{flag}: expected {form.expected}, got {text!r}", holds))
    return found


def _checks(config: WorkerConfig) -> list[tuple[str, bool]]:
    names, batched = config.served_model_names, config.max_num_batched_tokens
    return [
        ("--model: expected a folder or URI, e.g. examples/demo-model", bool(config.model)),
        (
            "--served-model-name: at most 64 names of 1 to 512 characters",
            len(names) <= 64 and all(0 < len(name) <= 512 for name in names),
        ),
        (f"--dtype: expected one of {', '.join(DTYPES)}", config.dtype in DTYPES),
        (
            f"--block-size: expected one of {', '.join(map(str, BLOCK_SIZES))}",
            config.block_size in BLOCK_SIZES,
        ),
        *_value_checks(config),
        (
            "--max-num-batched-tokens: expected at least --max-num-seqs "
            f"({config.max_num_seqs}): each running sequence takes one token of a step",
            batched is None or batched >= config.max_num_seqs,
        ),
        (
            f"--scheduling-policy: expected one of {', '.join(POLICIES)}",
            config.scheduling_policy in POLICIES,
        ),
        *_parallel_checks(config),
        (
            f"--kv-transport {config.kv_transports[0]}: needs --kv-socket-dir, a folder that the "
            "instances of this machine share",
            bool({*OVER_TCP} & {*config.kv_transports}) or config.kv_socket_dir is not None,
        ),
    ]

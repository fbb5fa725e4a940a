"""The flags of an engine that say over how many ranks, replicas and pods it goes; see flags.py."""

from __future__ import annotations

from pathlib import Path

from xpyd_core.cli import json_object
from xpyd_core.parallel.checks import (
    ADDRESS,
    DATA,
    DATA_FILE,
    ELASTIC,
    EXPERT,
    HEADLESS,
    LOCAL,
    ON_LOSS,
    PIPELINE,
    RPC_PORT,
    SHORT_NAMES,
    START_RANK,
    TENSOR,
)
from xpyd_worker.config import WorkerConfig
from xpyd_worker.flag import BOTH, count, flag

PARALLEL_FLAGS = (
    count(
        TENSOR,
        SHORT_NAMES[TENSOR],
        programs=BOTH,
        default=WorkerConfig.tensor_parallel_size,
        help="ranks that share each layer (default: %(default)s)",
    ),
    count(
        PIPELINE,
        SHORT_NAMES[PIPELINE],
        programs=BOTH,
        default=WorkerConfig.pipeline_parallel_size,
        help="stages that hold the layers one behind the other; how many each: "
        "VLLM_PP_LAYER_PARTITION, e.g. 5,6,6,5 (default: %(default)s)",
    ),
    flag(
        EXPERT,
        programs=BOTH,
        action="store_true",
        help="each rank that shares a layer has some experts whole, not a slice of each",
    ),
    flag(
        "--enable-eplb",
        programs=BOTH,
        action="store_true",
        help="whole experts move between ranks, and may have copies, as their load asks for",
    ),
    flag(
        "--eplb-config",
        programs=BOTH,
        type=json_object,
        metavar="JSON",
        help="of that: num_redundant_experts (0), slots for copies; window_size (1000), steps that "
        "count; step_interval (3000), steps between two placements (default: {})",
    ),
    count(
        *(DATA, SHORT_NAMES[DATA]),
        default=1,
        help="replicas, each a whole engine with KV ports of its own (default: %(default)s)",
    ),
    count(
        *(LOCAL, "-dpl"),
        help="replicas in this pod, e.g. 2 of 4; the other pods have as many (default: all, or "
        "as LWS_GROUP_SIZE says)",
    ),
    count(
        *(START_RANK, "-dpr"),
        help="the first replica of this pod, a multiple of its replicas, e.g. 2; with --headless "
        "(default: 0, or as LWS_WORKER_INDEX says)",
    ),
    flag(
        HEADLESS,
        action="store_true",
        help="this pod has ranks only: no HTTP; the pod of replica 0 serves",
    ),
    flag(
        *(ADDRESS, "-dpa"),
        metavar="HOST",
        help="the first pod of several, a literal ip or a name, e.g. 10.0.0.5 (default: "
        "LWS_LEADER_ADDRESS)",
    ),
    count(
        *(RPC_PORT, "-dpp"),
        help="where the first pod awaits the others, the same on all, e.g. 13345 (default: the "
        "port before the KV port)",
    ),
    flag(ELASTIC, action="store_true", help="replicas may come and go: POST /scale_elastic_ep"),
    flag(
        DATA_FILE,
        type=Path,
        metavar="PATH",
        help="with that: have as many replicas as this file says, now and whenever it changes; "
        "while it is absent or empty they stay as they are",
    ),
    flag(
        ON_LOSS,
        choices=("end", "continue"),
        default=WorkerConfig.on_rank_loss,
        help="where replicas share experts and a rank of one is lost: end ends the instance, "
        "continue lets the others go on until it has come again (default: %(default)s)",
    ),
    flag(
        "--disable-custom-all-reduce",
        programs=BOTH,
        action="store_true",
        help="NCCL adds up all that ranks on GPUs share; else small tensors go over an all-reduce "
        "of our own where the GPUs reach each other's memory. No effect on a CPU",
    ),
)

"""`xpyd advise`: its flags, and what it prints. Imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import re
import sys

from xpyd_core.cli import Command
from xpyd_core.errors import UserError
from xpyd_core.json_fields import Json
from xpyd_core.sizes import parse_bytes
from xpyd_tools.advise.arithmetic import BETWEEN, WITHIN
from xpyd_tools.advise.checkpoint import describe
from xpyd_tools.advise.facts import DTYPE_BYTES, QUANTIZATIONS, ModelFacts, Overrides, read_facts
from xpyd_tools.advise.fit import Hardware
from xpyd_tools.advise.layout import Wishes, advise
from xpyd_tools.advise.report import json_of, text_of
from xpyd_worker.config import AUTO_BATCHED_TOKENS_GPU
from xpyd_worker.model.registry import parse_config

ROLES = ("Aggregated", "Prefill", "Decode")
USUAL_CONTEXT = 8192
USUAL_NODE_GPUS = 8
MAX_GPUS = 1024
MAX_NODE_GPUS = 16
"""Of a pod in a fleet document."""
_GPU_MEMORY = "80G"
_GPUS = re.compile(r"([1-9][0-9]{0,3})(?:x(.+))?")
_EPILOG = """examples:
  xpyd advise hf://Qwen/Qwen3-8B --gpus 4
  xpyd advise ./config.json --gpus 16x80G --context 8192 --utilization 0.92
  xpyd advise hf://Qwen/Qwen3-32B --gpus 8 --gpu-memory 24G --within pcie --quantization fp8
  xpyd advise hf://Qwen/Qwen3-8B --gpus 4 --role Decode --peers 2 --throughput --output json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "model", metavar="MODEL", help="folder, config.json, file:///... or hf://org/name"
    )
    _add_model(parser)
    _add_devices(parser)
    _add_wishes(parser)
    parser.add_argument(
        "--output", choices=("text", "json"), default="text", help="json: one object"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model, where its files do not say it").add_argument
    add("--revision", help="branch, tag or commit of an hf:// model")
    add("--params", type=float, metavar="N", help="parameters in all, e.g. 671e9")
    add("--dtype", choices=tuple(DTYPE_BYTES), help="of weights and KV (default: the model's)")
    add(
        "--quantization",
        choices=("none", *QUANTIZATIONS),
        help="of the weights in layers (default: the model's)",
    )


def _add_devices(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("devices").add_argument
    add(
        "--gpus",
        required=True,
        metavar="N[xMEMORY]",
        help="devices in all, perhaps with the memory of each: 8, 16x80G, 8x141G",
    )
    add("--gpu-memory", metavar="SIZE", help=f"memory of each (default: {_GPU_MEMORY})")
    add("--gpus-per-node", type=int, metavar="N", help="default: 8, or all where there are fewer")
    add("--nodes", type=int, metavar="N", help="another way to say --gpus-per-node")
    add("--within", choices=WITHIN, default=WITHIN[0], help="link of the devices of a node")
    add("--between", choices=BETWEEN, default=BETWEEN[0], help="link of nodes, and of P with D")


def _add_wishes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what it is for").add_argument
    add("--context", type=int, metavar="TOKENS", help="longest request (default: 8192 at most)")
    add(
        "--concurrency",
        type=int,
        default=16,
        metavar="N",
        help="requests of that length whose KV one instance must hold at once",
    )
    add(
        "--utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of a device's memory, for all (default: %(default)s)",
    )
    add(
        "--reserve",
        default="2G",
        metavar="SIZE",
        help="of it, for activations, graphs and NCCL (default: %(default)s)",
    )
    add(
        "--prefill-tokens",
        type=int,
        default=AUTO_BATCHED_TOKENS_GPU,
        metavar="N",
        help="of a step that computes prompts",
    )
    add("--high-availability", action="store_true", help="more than one copy, on several nodes")
    add("--throughput", action="store_true", help="small copies, as many as there is room for")
    add("--role", choices=ROLES, default=ROLES[0], help="of the pool that the layout is for")
    add(
        "--peers",
        type=int,
        default=1,
        metavar="N",
        help="instances of the other role, for NCCL's memory",
    )


def run(args: argparse.Namespace) -> int:
    """Print the advice."""
    found = describe(args.model, args.revision)
    facts = read_facts(found.config, files_bytes=found.files_bytes, overrides=_overrides(args))
    advice = advise(facts, _hardware(args), _wishes(args, facts))
    reason = _not_served(found.config, args.quantization)
    if args.output == "json":
        text = json.dumps(json_of(found.name, advice, not_served=reason), indent=2) + "\n"
    else:
        text = text_of(found.name, advice, not_served=reason)
    sys.stdout.write(text)
    return 0


def _overrides(args: argparse.Namespace) -> Overrides:
    if args.params is not None and not 1 <= args.params < 1e15:
        raise UserError(f"--params: {args.params:g}; expected a number such as 70e9")
    return Overrides(dtype=args.dtype, quantization=args.quantization, params=args.params)


def _hardware(args: argparse.Namespace) -> Hardware:
    match = _GPUS.fullmatch(args.gpus)
    if match is None or int(match[1]) > MAX_GPUS:
        raise UserError(f"--gpus: {args.gpus!r}; expected 1 to {MAX_GPUS}, e.g. 8 or 16x80G")
    gpus = int(match[1])
    each = _gpus_per_node(gpus, args)
    if each > MAX_NODE_GPUS:
        raise UserError(f"--gpus-per-node: {each}; a pod of a fleet has at most {MAX_NODE_GPUS}")
    if gpus % each:
        raise UserError(f"--gpus: {gpus} are not whole nodes of {each}; see --gpus-per-node")
    return Hardware(
        nodes=gpus // each,
        gpus_per_node=each,
        memory_bytes=_memory(match[2], args.gpu_memory),
        within=args.within,
        between=args.between,
    )


def _memory(in_gpus: str | None, gpu_memory: str | None) -> int:
    """Of each device, in bytes: as --gpus says, or else --gpu-memory."""
    if in_gpus and gpu_memory:
        raise UserError(f"--gpu-memory: --gpus says {in_gpus} of each already; leave one out")
    flag, text = ("--gpus", in_gpus) if in_gpus else ("--gpu-memory", gpu_memory or _GPU_MEMORY)
    size = _size(flag, text)
    if not size:
        raise UserError(f"{flag}: {text!r}; expected a memory above 0 bytes")
    return size


def _size(flag: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except UserError as error:
        raise UserError(f"{flag}: {error}") from error


def _gpus_per_node(gpus: int, args: argparse.Namespace) -> int:
    _positive(args, "gpus_per_node", "nodes")
    if args.nodes is None:
        return args.gpus_per_node or min(gpus, USUAL_NODE_GPUS)
    if gpus % args.nodes or args.gpus_per_node not in (None, gpus // args.nodes):
        raise UserError(f"--nodes: {gpus} devices do not fill {args.nodes} nodes alike")
    return gpus // args.nodes


def _wishes(args: argparse.Namespace, facts: ModelFacts) -> Wishes:
    _positive(args, "context", "concurrency", "prefill_tokens", "peers")
    if not 0 < args.utilization <= 1:
        raise UserError(f"--utilization: {args.utilization:g}; expected a share of 1")
    context = args.context or min(USUAL_CONTEXT, facts.max_positions)
    if context > facts.max_positions:
        raise UserError(f"--context: {context}; the model takes at most {facts.max_positions}")
    return Wishes(
        role=args.role,
        context=context,
        concurrency=args.concurrency,
        utilization=args.utilization,
        reserve_bytes=_size("--reserve", args.reserve),
        prefill_tokens=args.prefill_tokens,
        peers=args.peers,
        high_availability=args.high_availability,
        throughput=args.throughput,
    )


def _positive(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and not 1 <= value < 1 << 31:
            raise UserError(f"--{name.replace('_', '-')}: {value}; expected a number above 0")


def _not_served(config: Json, quantization: str | None) -> str | None:
    """Why the engine does not serve the model so; None: it does."""
    if quantization not in (None, "none"):
        return f"--quantization {quantization}: it takes unquantized checkpoints"
    try:
        parse_config(config, {})
    except UserError as error:
        return str(error)
    return None


command = Command(
    "suggest how to divide a model over GPUs, with the numbers", configure, run, _EPILOG
)

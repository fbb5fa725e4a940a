"""`xpyd advise`: its flags, the files of the model that it reads, and what it prints.

It reads config.json and how much the files of the weights hold; no weights are read or downloaded.
The only module of `advise` that touches files and the hub. Imports nothing heavy at the start.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from xpyd_core.cli import Command, parse_flag
from xpyd_core.errors import UserError
from xpyd_core.json_fields import Json
from xpyd_core.sizes import parse_bytes
from xpyd_tools.advise.arithmetic import BETWEEN, WITHIN
from xpyd_tools.advise.engines import CONNECTORS, OWN, TYPES, VLLM, Engine, unmoved
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
"""Devices of a pod in a fleet document."""
_GPU_MEMORY = "80G"
_CPU_PODS = re.compile(r"([1-9][0-9]{0,3})x(.+)")
_IMAGE = re.compile(r"[^ \x00-\x1f]{1,512}")
_GPUS = re.compile(r"([1-9][0-9]{0,3})(?:x(.+))?")
_EPILOG = """examples:
  xpyd advise hf://Qwen/Qwen3-8B --gpus 4
  xpyd advise ./config.json --gpus 16x80G --context 8192 --utilization 0.92
  xpyd advise hf://Qwen/Qwen3-32B --gpus 8 --gpu-memory 24G --within pcie --quantization fp8
  xpyd advise hf://Qwen/Qwen3-8B --gpus 4 --role Decode --peers 2 --throughput --output json
  xpyd advise ./chat --gpus 4 --role Decode --engine VLLM --image registry.example/vllm-xpyd:0.32.0
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "model", metavar="MODEL", help="folder, config.json, file:///... or hf://org/name"
    )
    _add_model(parser)
    _add_devices(parser)
    _add_wishes(parser)
    _add_engine(parser)
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
    group = parser.add_argument_group("devices")
    add, what = group.add_argument, group.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--gpus",
        metavar="N[xMEMORY]",
        help="devices in all, perhaps with the memory of each: 8, 16x80G, 8x141G",
    )
    what.add_argument(
        "--cpu-pods",
        metavar="NxMEMORY",
        help="instead, for vLLM: pods on CPUs, with the memory of each: 4x32G",
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


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what serves it").add_argument
    add("--engine", choices=TYPES, default=OWN, help="xpyd's own engine, or vLLM")
    add(
        "--connector",
        choices=CONNECTORS,
        help="what moves KV between vLLMs (default: Xpyd for --role Prefill and Decode)",
    )
    add("--image", metavar="IMAGE", help="of the engines; vLLM needs one, e.g. vllm-xpyd:0.32.0")


def run(args: argparse.Namespace) -> int:
    """Print the advice."""
    engine = _engine(args)
    found = describe(args.model, args.revision)
    reason = unmoved(found.config) if engine.has_our_connector else None
    if reason:
        raise UserError(
            f"--connector Xpyd: config.json: {reason}; that connector moves KV of full attention "
            "in all layers. Try --connector Nixl"
        )
    facts = read_facts(found.config, files_bytes=found.files_bytes, overrides=_overrides(args))
    advice = advise(facts, _hardware(args), _wishes(args, facts, engine))
    reason = None if engine.is_vllm else _not_served(found.config, args.quantization)
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


def _cpu_pods(args: argparse.Namespace) -> Hardware:
    if args.engine != VLLM:
        raise UserError(
            "--cpu-pods: for --engine VLLM; xpyd's own engine on a CPU takes what "
            "--kv-cache-memory says"
        )
    if args.gpu_memory or args.gpus_per_node or args.nodes:
        raise UserError("--cpu-pods: leave --gpu-memory, --gpus-per-node and --nodes out")
    match = _CPU_PODS.fullmatch(args.cpu_pods)
    if match is None or int(match[1]) > MAX_GPUS:
        raise UserError(f"--cpu-pods: {args.cpu_pods!r}; expected 1 to {MAX_GPUS}, e.g. 4x32G")
    size = parse_flag("--cpu-pods", parse_bytes, match[2])
    if not size:
        raise UserError(f"--cpu-pods: {match[2]!r}; expected a memory above 0 bytes")
    return Hardware(
        nodes=int(match[1]),
        gpus_per_node=1,
        memory_bytes=size,
        between=args.between,
        on_cpus=True,
    )


def _hardware(args: argparse.Namespace) -> Hardware:
    if args.cpu_pods is not None:
        return _cpu_pods(args)
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
    """Memory of each device in bytes: as --gpus says, or else --gpu-memory."""
    if in_gpus and gpu_memory:
        raise UserError(f"--gpu-memory: --gpus says {in_gpus} of each already; leave one out")
    flag, text = ("--gpus", in_gpus) if in_gpus else ("--gpu-memory", gpu_memory or _GPU_MEMORY)
    size = parse_flag(flag, parse_bytes, text)
    if not size:
        raise UserError(f"{flag}: {text!r}; expected a memory above 0 bytes")
    return size


def _gpus_per_node(gpus: int, args: argparse.Namespace) -> int:
    _positive(args, "gpus_per_node", "nodes")
    if args.nodes is None:
        return args.gpus_per_node or min(gpus, USUAL_NODE_GPUS)
    if gpus % args.nodes or args.gpus_per_node not in (None, gpus // args.nodes):
        raise UserError(f"--nodes: {gpus} devices do not fill {args.nodes} nodes alike")
    return gpus // args.nodes


def _engine(args: argparse.Namespace) -> Engine:
    if args.image is not None and not _IMAGE.fullmatch(args.image):
        raise UserError(f"--image: {args.image!r}; expected one such as registry.example/vllm:1.0")
    if args.engine == OWN:
        if args.connector is not None:
            raise UserError("--connector: xpyd's own engine has none; say --engine VLLM")
        return Engine(image=args.image or "")
    if args.image is None:
        raise UserError("--engine VLLM: say which --image has vLLM")
    moves = args.role != ROLES[0]
    return Engine(VLLM, args.connector or (CONNECTORS[0] if moves else None), args.image)


def _wishes(args: argparse.Namespace, facts: ModelFacts, engine: Engine) -> Wishes:
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
        reserve_bytes=parse_flag("--reserve", parse_bytes, args.reserve),
        prefill_tokens=args.prefill_tokens,
        peers=args.peers,
        high_availability=args.high_availability,
        throughput=args.throughput,
        engine=engine,
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


_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_MAX_CONFIG_BYTES = 4 << 20
_MAX_INDEX_BYTES = 64 << 20
"""The bound on an index with names of some 100,000 tensors."""


@dataclass(frozen=True)
class Description:
    """A model's name for people, config.json's content, and the bytes of its weights' files where
    that can be known without them."""

    name: str
    config: Json
    files_bytes: int | None = None


def describe(uri: str, revision: str | None = None) -> Description:
    """What `uri` says: a folder, a config.json, file:///... or hf://organisation/name. UserError
    naming `model`."""
    if uri.startswith("hf://"):
        return _from_hub(uri.removeprefix("hf://"), revision)
    if revision is not None:
        raise UserError("--revision: only hf:// models have revisions")
    if "://" in uri and not uri.startswith("file:///"):
        raise UserError(
            f"model: {uri}: supported are a folder, a config.json, file:///... and hf://org/name"
        )
    path = Path(unquote(uri.removeprefix("file://")) if uri.startswith("file://") else uri)
    if path.is_dir():
        name = path.resolve().name
        return Description(name, _read(path / _CONFIG, _MAX_CONFIG_BYTES), _size_of(path))
    return Description(path.resolve().parent.name, _read(path, _MAX_CONFIG_BYTES))


def _size_of(folder: Path) -> int | None:
    """What the weights hold, by the index where there is one. None: there are none here."""
    if (folder / _INDEX).is_file():
        return _total_size(_read(folder / _INDEX, _MAX_INDEX_BYTES))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


def _total_size(index: Json) -> int | None:
    metadata = index.get("metadata")
    size: object = cast("Json", metadata).get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(size, int | float) or isinstance(size, bool) or not 0 < size < 1e18:
        return None
    return int(size)


def _from_hub(name: str, revision: str | None) -> Description:
    if name.count("/") != 1 or not all(name.split("/")):
        raise UserError(f"model: hf://{name}: the form is hf://organisation/name")
    import huggingface_hub
    from huggingface_hub import errors

    hub: Any = huggingface_hub  # its signature is only partly typed
    library: Any = errors  # its HTTPError is that of requests or httpx, by its version
    failures = (OSError, ValueError, library.HTTPError, errors.EntryNotFoundError)
    try:
        config = Path(hub.hf_hub_download(name, _CONFIG, revision=revision))
    except failures as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"model: cannot get the config.json of hf://{name}: {reason}. Without a network name a "
            "config.json"
        ) from error
    size = None
    try:
        index = Path(hub.hf_hub_download(name, _INDEX, revision=revision))
        size = _total_size(_read(index, _MAX_INDEX_BYTES))
    except failures:
        # One file of weights has no index; the parameters are counted.
        size = None
    return Description(name.split("/")[1], _read(config, _MAX_CONFIG_BYTES), size)


def _read(path: Path, most_bytes: int) -> Json:
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise UserError(
            f"model: cannot read {path}: {error.strerror}; name a checkpoint's folder or a "
            "config.json"
        ) from error
    if len(content) > most_bytes:
        raise UserError(f"model: {path}: more than {most_bytes} bytes")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"model: {path}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"model: {path} must hold a JSON object")
    return cast("Json", value)


command = Command(
    "suggest how to divide a model over GPUs, with the numbers", configure, run, _EPILOG
)

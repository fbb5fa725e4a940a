"""What a document asks that this machine cannot do, found before anything starts.

The document is the same in a cluster and here. What local mode cannot honour is refused; fields
that have no meaning here (images, volumes, Services) are named and ignored. Of the checkpoint only
names, sizes and config.json are read: whether it exists, how large its weights are, and whether its
model can be divided as the pools say.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from xpyd_core.checkpoints import cache_root, checkpoint_folder
from xpyd_core.errors import UserError
from xpyd_core.parallel.checks import EXPERT, PIPELINE, TENSOR, Shape, check_parallel, shape_of
from xpyd_core.parallel.partition import PARTITION_VARIABLE, parse_override
from xpyd_core.parallel.ranks import Sizes
from xpyd_operator.document.engine import has_whole_experts
from xpyd_operator.document.engines import Model, Pool
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.manifests.refusals import (
    engine_args_problems,
    router_args_problems,
    template_problems,
)
from xpyd_operator.manifests.resources import VLLM_CACHE, flag_value, vllm_cache_bytes

CLUSTER_ONLY = frozenset(
    {
        "spec.model.secretRef",
        "spec.model.cache",
        "spec.engine.image",
        "spec.engine.tls",
        "spec.engine.env[].valueFrom",
        "spec.pools[].parallelism.maxData",
        "spec.pools[].resources.sharedMemory",
        "spec.pools[].template",
        "spec.kvTransfer.sameHostPath",
        "spec.kvTransfer.keySecretRef",
        "spec.router.replicas",
        "spec.router.discoveryPort",
        "spec.router.service",
        "spec.router.auth",
        "spec.router.ingress",
        "spec.router.httpRoute",
        "spec.router.adminKeySecretRef",
        "spec.router.tls",
        "spec.router.template",
        "spec.rollout.progressDeadlineSeconds",
        "spec.rollout.paused",
        "spec.rollout.historyLimit",
        "spec.rollout.canary",
        "spec.networkPolicy",
    }
)
"""Fields without effect in local mode; paths without list indexes."""


VLLM = "vllm"
"""vLLM's command where none is named."""


def check_local(fleet: InferenceFleet, *, source: str, vllm: str = VLLM) -> None:
    """UserError with all that local mode cannot run; `source` names the document, `vllm` is the
    command of vLLM."""
    lines = [
        line for index, pool in enumerate(fleet.spec.pools) for line in _with_gpus(index, pool)
    ]
    if fleet.spec.engine.type == "VLLM":
        lines += _for_vllm(fleet, vllm)
    if fleet.spec.model.uri.startswith("pvc://"):
        lines.append(
            "spec.model.uri: pvc:// names a claim of a cluster: local mode has none; write "
            "file://FOLDER"
        )
    lines += [*template_problems(fleet), *router_args_problems(fleet)]
    lines += engine_args_problems(fleet)
    if lines:
        count = f"{len(lines)} mistakes" if len(lines) > 1 else "1 mistake"
        raise UserError("\n  ".join([f"{source}: {count}", *lines]))


def _with_gpus(index: int, pool: Pool) -> Iterator[str]:
    if gpus := pool.resources.gpus:
        given = "" if "gpus" in pool.resources.model_fields_set else " (the default)"
        yield (
            f"spec.pools[{index}].resources.gpus: {gpus}{given}: local mode runs CPU instances "
            "only; write `resources: {gpus: 0}`"
        )


def _for_vllm(fleet: InferenceFleet, vllm: str) -> Iterator[str]:
    """vLLM is the user's own, and takes memory as its environment says, not as we choose."""
    if shutil.which(vllm) is None:
        more = {"Nixl": " and NIXL", "Xpyd": " and xpyd[vllm]"}
        yield (
            f"spec.engine.type: VLLM: no command {vllm}: install vLLM"
            f"{more.get(fleet.spec.engine.connector or '', '')} in an environment of its own, "
            "and name its command with `xpyd up --vllm FOLDER/bin/vllm`"
        )
    if vllm_cache_bytes(fleet) is None:
        yield (
            "spec.engine.env: local mode chooses no memory for vLLM: add "
            f'{{name: {VLLM_CACHE}, value: "1"}}, whole GiB for the KV cache of each rank'
        )
    kv = fleet.spec.kv_transfer
    keeps = not fleet.spec.engine.is_nixl and any(kv.keeps_kv(p.role) for p in fleet.spec.pools)
    if keeps and "host_pool_size" not in kv.model_fields_set:
        yield (
            "spec.kvTransfer.hostPoolSize: local mode chooses no memory for vLLM: write a size "
            "such as 256Mi"
        )


def cluster_only(fleet: InferenceFleet) -> str:
    """One line that names the document's fields without effect here; "" where there are none."""
    given = [path for path, general in _given(fleet, "", "") if general in CLUSTER_ONLY]
    return f"only in a cluster: {', '.join(given)}" if given else ""


def _given(model: BaseModel, path: str, general: str) -> Iterator[tuple[str, str]]:
    """Path and path without indexes of every field that the document has."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if name not in model.model_fields_set or value is None:
            continue
        here, above = (f"{p}.{field.alias}".removeprefix(".") for p in (path, general))
        yield here, above
        if isinstance(value, BaseModel):
            yield from _given(value, here, above)
        elif isinstance(value, tuple):
            for index, item in enumerate(cast("tuple[object, ...]", value)):
                if isinstance(item, BaseModel):
                    yield from _given(item, f"{here}[{index}]", f"{above}[]")


def check_layouts(
    fleet: InferenceFleet, model: str, environ: Mapping[str, str] | None = None
) -> None:
    """UserError with all that keeps `model`, as locate_model() gives it, from being divided so."""
    shape = shape_of(read_config(model))
    if shape is None:
        return
    variables = {item.name: item.value for item in fleet.spec.engine.env if not item.value_from}
    inherited = (os.environ if environ is None else environ).get(PARTITION_VARIABLE, "")
    override = variables.get(PARTITION_VARIABLE, inherited)
    by_args = has_whole_experts(fleet.spec.engine.args)
    lines = [
        line
        for index, pool in enumerate(fleet.spec.pools)
        for line in _mistakes(
            f"spec.pools[{index}].parallelism",
            replace(
                pool.with_replicas_that_stay.parallelism.sizes,
                has_whole_experts=by_args or pool.parallelism.expert > 1,
            ),
            shape,
            override,
            by_args=by_args and pool.parallelism.expert == 1,
        )
    ]
    lines = list(dict.fromkeys(lines))  # a variable that is no list is one mistake for all pools
    if lines:
        count = f"{len(lines)} mistakes" if len(lines) > 1 else "1 mistake"
        raise UserError("\n  ".join([f"{model}/config.json: {count}", *lines]))


def _mistakes(
    path: str, sizes: Sizes, shape: Shape, override: str, *, by_args: bool
) -> Iterator[str]:
    """The worker's own words, with the document's fields in place of its flags. `by_args`: experts
    are whole by engine.args, which are of all pools."""
    try:
        check_parallel(shape, sizes, parse_override(override))
    except UserError as error:
        for line in str(error).splitlines():
            words = line.replace(TENSOR, f"{path}.tensor").replace(PIPELINE, f"{path}.pipeline")
            if words.startswith(EXPERT) and by_args:
                data = f", data: {sizes.data}" if sizes.data > 1 else ""
                yield f"spec.engine.args: {words} ({path}.tensor: {sizes.tensor}{data})"
            elif words.startswith((path, EXPERT)):
                ranks = sizes.tensor * sizes.data
                given = f"{path}.expert" if words.startswith(EXPERT) else f"expert: {ranks}"
                yield words.replace(EXPERT, given)
            else:
                yield f"spec.engine.env: {words}"


_MAX_CONFIG_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file: the format's own bound."""
_HALF = ("float16", "bfloat16")


_MANIFEST = ".xpyd-model.json"
"""In a folder that a download made whole: xpyd_worker.download.plan."""


def downloaded_folder(model: Model) -> Path:
    """Where `xpyd up` keeps a downloaded model."""
    return cache_root() / checkpoint_folder(model.uri, model.revision, model.endpoint_url)


def needs_download(model: Model) -> bool:
    """Whether the model has to come before engines start. One that is in the cache of the hub's own
    library is used from there."""
    if not model.is_downloaded or (downloaded_folder(model) / _MANIFEST).is_file():
        return False
    name = model.uri.removeprefix("hf://").replace("/", "--")
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return not (model.uri.startswith("hf://") and (hub / f"models--{name}" / "snapshots").is_dir())


def locate_model(model: Model, folder: Path) -> str:
    """What the worker's --model gets: a folder's absolute path, or the URI of a model that its
    engine finds itself.

    A relative file:// path starts at `folder`, where the document lies. UserError when it is not a
    checkpoint.
    """
    uri = model.uri
    scheme, _, path = uri.partition("://")
    if model.is_downloaded and (downloaded_folder(model) / _MANIFEST).is_file():
        return str(downloaded_folder(model))
    if scheme != "file":
        return uri
    found = (folder / path).resolve()
    if not (found / "config.json").is_file():
        where = "no such folder" if not found.is_dir() else "no config.json in it"
        raise UserError(
            f"spec.model.uri: {uri} is {found}: {where}; expected a folder in Hugging Face format "
            "(a relative path starts at the document's folder)"
        )
    return str(found)


def weights_bytes(model: str, args: Sequence[str]) -> int:
    """Bytes of the weights in an engine's memory; 0 for what is not on this machine yet.

    On a CPU a 16-bit checkpoint may be computed in float32, which doubles it, unless --dtype says
    that it is not; and an embedding that is the head, too, is there as rows and packed.
    """
    if "://" in model:
        return 0
    on_disk = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    widened = _stored_dtype(model) in _HALF and flag_value(args, "--dtype") not in _HALF
    return (on_disk + _tied_bytes(model)) * (2 if widened else 1)


def _tied_bytes(model: str) -> int:
    """Of a checkpoint's embedding where it is the head, too."""
    if read_config(model).get("tie_word_embeddings") is not True:
        return 0
    return sum(size for name, size in _sizes(model) if name == "model.embed_tokens.weight")


def draft_bytes(args: Sequence[str]) -> int:
    """Bytes of the weights that draft, of --speculative-config; 0 where none do."""
    try:
        given: object = json.loads(flag_value(args, "--speculative-config") or "{}")
    except (ValueError, RecursionError):
        return 0  # the engine refuses it
    model = cast("dict[str, Any]", given).get("model") if isinstance(given, dict) else None
    return weights_bytes(model.removeprefix("file://"), args) if isinstance(model, str) else 0


def expert_bytes(model: str, args: Sequence[str]) -> int:
    """How many of `weights_bytes` are of experts, by the names of the tensors in the files."""
    whole = weights_bytes(model, args)
    if not whole:
        return 0
    sizes = _sizes(model)
    of_experts = sum(size for name, size in sizes if ".experts." in name)
    every = sum(size for _, size in sizes) + _tied_bytes(model)
    return whole * of_experts // max(1, every)


def _sizes(model: str) -> list[tuple[str, int]]:
    """Name and bytes of each tensor of a checkpoint."""
    return [size for file in Path(model).glob("*.safetensors") for size in _tensor_sizes(file)]


def _tensor_sizes(file: Path) -> Iterator[tuple[str, int]]:
    """Name and bytes of each tensor of a safetensors file; none of what is no such file."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: object = json.loads(stream.read(min(length, _MAX_HEADER_BYTES)))
        for name, tensor in cast("dict[str, Any]", header).items():
            if name != "__metadata__":
                first, end = tensor["data_offsets"]
                yield name, end - first
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return


def read_config(model: str) -> dict[str, Any]:
    """The checkpoint's config.json; empty for what is not on this machine or is no such file."""
    if "://" in model:
        return {}
    try:
        with (Path(model) / "config.json").open("rb") as file:
            read: object = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", read) if isinstance(read, dict) else {}


def _stored_dtype(model: str) -> str:
    config = read_config(model)
    return str(config.get("dtype") or config.get("torch_dtype") or "")

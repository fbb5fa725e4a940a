"""The way from a checkpoint's address to what it is: its folder, its family, its configuration.

An address is a folder, `file:///absolute/path`, `hf://organisation/name` or `s3://bucket/folder`.
The hub's library is imported only when the address asks for it. All this comes before torch is
imported: what is wrong with a checkpoint is said at once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from xpyd_core.checkpoints import cache_root, checkpoint_folder
from xpyd_core.checkpoints import own_name as name_of_uri
from xpyd_core.errors import UserError
from xpyd_core.json_fields import Fields, Json, read_object
from xpyd_worker.config import WorkerConfig
from xpyd_worker.download.sources import hub_failures
from xpyd_worker.download.transfer import Want, download
from xpyd_worker.model.config import ModelConfig, token_ids
from xpyd_worker.model.families import FAMILIES, Family
from xpyd_worker.model.generation import FILE, SamplingDefaults, defaults_of, read_generation

# What serving reads: weights, configuration, tokenizer, chat template.
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")


def resolve_checkpoint(uri: str, revision: str | None = None) -> Path:
    """The local folder of the checkpoint; an `hf://` or `s3://` one is downloaded (or found in the
    cache).

    `revision` is a branch, tag or commit of the hub, or names a content of a bucket's folder.
    Raises UserError naming `model`.
    """
    if uri.startswith("hf://"):
        return _from_hub(uri.removeprefix("hf://"), revision)
    if uri.startswith("s3://"):
        # The store's address comes from AWS_ENDPOINT_URL here, as for AWS's own tools.
        folder = cache_root() / checkpoint_folder(uri, revision or "")
        return download(Want(uri, folder, revision or "")).folder
    if revision is not None:
        raise UserError("--revision: only hf:// and s3:// models have revisions")
    if uri.startswith("file://"):
        path = unquote(uri.removeprefix("file://"))
        if not path.startswith("/"):
            raise UserError(f"model: {uri}: a file URI needs an absolute path (file:///...)")
    elif "://" in uri:
        raise UserError(
            f"model: {uri}: supported are a folder, file:///..., hf://org/name and s3://bucket/folder"
        )
    else:
        path = uri
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"model: {folder} is not a folder; name a checkpoint folder")
    return folder


def _from_hub(name: str, revision: str | None) -> Path:
    if name.count("/") != 1 or not all(name.split("/")):
        raise UserError(f"model: hf://{name}: the form is hf://organisation/name")
    import huggingface_hub

    hub: Any = huggingface_hub  # its signature is only partly typed
    try:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=list(_PATTERNS)))
    except hub_failures() as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"model: cannot get hf://{name}: {reason}. Without a network name a local folder"
        ) from error


def own_name(model: str, folder: Path) -> str:
    """The checkpoint's name where none is given: that of its address, else the folder's."""
    return name_of_uri(model) if model.startswith(("hf://", "s3://")) else folder.resolve().name


class Checkpoint(NamedTuple):
    """What an engine has of its checkpoint before the weights are loaded."""

    folder: Path
    model: ModelConfig
    defaults: SamplingDefaults


def read_checkpoint(config: WorkerConfig) -> Checkpoint:
    """The checkpoint that `config` names; each of its files is read once. UserError names the file
    or the flag, and the field."""
    folder = resolve_checkpoint(config.model, config.revision)
    found = read_generation(folder)
    model = parse_config(read_object(folder / "config.json", "model"), found)
    source, override = config.generation_config, config.override_generation_config
    return Checkpoint(folder, model, defaults_of(folder, found, source, override))


def load_config(folder: Path) -> ModelConfig:
    """The configuration of the checkpoint in `folder`. Raises UserError naming file and field."""
    return parse_config(read_object(folder / "config.json", "model"), read_generation(folder))


def parse_config(config: Json, generation: Json) -> ModelConfig:
    """The configuration from the contents of config.json and generation_config.json.

    Raises UserError naming the field for what is missing, malformed or not supported.
    """
    fields, more = Fields(config), Fields(generation, file=FILE)
    family = _family(fields)
    model = family.read_config(fields)
    if "eos_token_id" not in fields and "eos_token_id" not in more:
        return replace(model, eos_token_ids=family.default_eos_ids)
    ids = (*model.eos_token_ids, *token_ids(more, "eos_token_id"))
    return replace(model, eos_token_ids=tuple(dict.fromkeys(ids)))


def _family(fields: Fields) -> Family:
    for family in FAMILIES:
        if fields.get("architectures") == [family.architecture]:
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise fields.refusal("architectures", f"one of {known}")

"""The files of a model that say what it is: config.json and how much its weights' files hold.

No weights are read or downloaded. The only module of `advise` that touches files and the hub.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from xpyd_core.errors import UserError
from xpyd_core.json_fields import Json

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_MAX_CONFIG_BYTES = 4 << 20
_MAX_INDEX_BYTES = 64 << 20
"""Of a name for each of some 100,000 tensors."""


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
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    hub: Any = huggingface_hub  # its signature is only partly typed
    try:
        config = Path(hub.hf_hub_download(name, _CONFIG, revision=revision))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"model: cannot get the config.json of hf://{name}: {reason}. Without a network name a "
            "config.json"
        ) from error
    size = None
    try:
        index = Path(hub.hf_hub_download(name, _INDEX, revision=revision))
        size = _total_size(_read(index, _MAX_INDEX_BYTES))
    except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError):
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

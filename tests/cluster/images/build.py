"""The images that the test cluster runs, built from the tree's Dockerfile by scripts/images.sh.

`ensure_images` gives an archive for each, for `Cluster.load_image`. Operator and router are built
as a user builds them, on another base (store.py). The worker's image is built so too, but for its
dependencies, which are 5 GB: in their place it looks for the libraries of the machine's virtual
environment, and `worker_test_template` is what a pool needs to mount them. Everything is cached
by content; a change of the code costs the seconds of a wheel and three archives. So is an image of
vLLM with xpyd[vllm], by `ensure_vllm_image`, whose libraries are those of
scripts/vllm_environment.py.

    python -m tests.cluster.images.build         # build them and say where they are
"""

from __future__ import annotations

import ctypes.util
import fcntl
import hashlib
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.images.store import (
    BASE_IMAGE,
    PYTHON,
    ImagesUnavailable,
    Store,
    base_key,
    ca_bundle,
    open_store,
    run_logged,
    say,
)

ROOT = Path(__file__).parents[3]
REGISTRY = "localhost"
TAG = "test"
IMAGES = {
    "operator": f"{REGISTRY}/xpyd-operator:{TAG}",
    "router": f"{REGISTRY}/xpyd-router:{TAG}",
    "worker": f"{REGISTRY}/xpyd-worker:{TAG}",
    # For pods that play a client: it has Python, aiohttp and `xpyd chat`.
    "client": f"{REGISTRY}/xpyd-operator:{TAG}",
}
VLLM_IMAGE = f"{REGISTRY}/xpyd-test-vllm:{TAG}"
"""What a pod asks for, by the names of `ensure_images`."""

ENVIRONMENT_PATH = "/opt/xpyd-env"
"""Where the worker's test image looks for its libraries."""
MODEL_PATH = "/models/demo-model"
"""Where the worker's image has its checkpoint."""

_ENVIRONMENT = Path(__file__).with_name("environment.Dockerfile")
_VLLM = Path(__file__).with_name("vllm.Dockerfile")
VLLM_PATH = "/opt/vllm-env"
"""Where vLLM's test image looks for vLLM."""
_CODE_IMAGE = f"{REGISTRY}/xpyd-test-code:{TAG}"
_ENVIRONMENT_IMAGE = f"{REGISTRY}/xpyd-test-environment:{TAG}"
TARGETS = ("operator", "router", "worker")
"""Of the Dockerfile: one image each."""
_FOLDERS = (
    "core",
    "kv_transfer",
    "operator",
    "router",
    "tools",
    "worker_image",
    "examples/demo-model",
)
FILES = (
    ".dockerignore",
    "Dockerfile",
    "LICENSE",
    "README.md",
    "constraints.txt",
    "hatch_build.py",
    "pyproject.toml",
)
_BUILD_TIMEOUT_S = 600.0


def ensure_images(cache: Path) -> dict[str, Path]:
    """Archives (docker-archive) of the images in IMAGES, by name, built now where sources changed.

    Raises ImagesUnavailable where this machine cannot, ImagesFailed with the builder's words.
    """
    _check_python()
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "lock"):
        archives = {name: cache / f"{name}-{image_key(name)}.tar" for name in TARGETS}
        missing = [name for name, archive in archives.items() if not archive.is_file()]
        if missing:
            store = open_store(cache)
            for name in missing:
                _build(store, name, archives[name])
    return {**archives, "client": archives["operator"]}


def default_cache() -> Path:
    """Where the images are kept between runs, outside the tree."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xpyd" / "images"


def worker_test_template(model: Path | None = None) -> dict[str, Any]:
    """A pool's `template` for the worker's test image: mounts this environment's libraries and, in
    place of the image's checkpoint, a folder of the node with another.

    Its hostPath volumes are refused in namespaces of pod security "restricted" and "baseline".
    """
    found = _mounting(sysconfig.get_path("purelib"), ENVIRONMENT_PATH)
    if model is not None:
        [engine] = found["spec"]["containers"]
        mount = {"name": "model", "mountPath": MODEL_PATH, "readOnly": True}
        engine["volumeMounts"].append(mount)
        found["spec"]["volumes"].append({"name": "model", "hostPath": {"path": str(model)}})
    return found


def ensure_vllm_image(cache: Path) -> Path:
    """The archive of VLLM_IMAGE, built now where sources changed; raises as `ensure_images`."""
    _check_python()
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "lock"):
        archive = cache / f"vllm-{image_key('vllm')}.tar"
        if not archive.is_file():
            store = open_store(cache)
            _build_vllm(store)
            _keep(store, VLLM_IMAGE, archive)
    return archive


def vllm_test_template(environment: Path, **engine: Any) -> dict[str, Any]:
    """A pool's `template` for VLLM_IMAGE: mounts the machine's vLLM. `engine`: more of the
    container."""
    return _mounting(str(environment), VLLM_PATH, **engine)


def _mounting(path: str, where: str, **engine: Any) -> dict[str, Any]:
    volume = "machine-environment"
    mount = {"name": volume, "mountPath": where, "readOnly": True}
    return {
        "spec": {
            "containers": [{"name": "engine", "volumeMounts": [mount], **engine}],
            "volumes": [{"name": volume, "hostPath": {"path": path, "type": "Directory"}}],
        }
    }


def image_key(name: str, root: Path = ROOT) -> str:
    """Names all that goes into the image, but for the labels with version and revision."""
    digest = hashlib.sha256(base_key().encode())
    for path in _sources(name, root):
        digest.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _check_python() -> None:
    """Libraries with C parts fit one minor version of Python only."""
    if sys.version_info[:2] != PYTHON:
        have, base = (".".join(map(str, version)) for version in (sys.version_info[:2], PYTHON))
        raise ImagesUnavailable(
            f"this environment has Python {have}, the test images' base {base}: pods cannot use "
            f"its libraries; PYTHON=/path/to/python{base} make setup"
        )


def _sources(name: str, root: Path) -> list[Path]:
    found = [root / "scripts/images.sh", *(root / f for f in FILES)]
    own = {"worker": _ENVIRONMENT, "vllm": _VLLM}.get(name)
    if own is not None:
        found.append(root / own.relative_to(ROOT))
    for folder in _FOLDERS:
        found += [
            path
            for path in sorted((root / folder).rglob("*"))
            if path.suffix not in (".pyc", ".so") and path.is_file()
        ]
    return found


def _build(store: Store, name: str, archive: Path) -> None:
    started = time.monotonic()
    say(f"building {IMAGES[name]}")
    settings = {
        "BUILDER": "buildah",
        "ONLY": name,
        "TAG": TAG,
        "REGISTRY": REGISTRY,
        "BASE": BASE_IMAGE,
        "CA_BUNDLE": ca_bundle() or "",
        "BUILD_OPTIONS": _use_machines_libraries(store) if name == "worker" else "",
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    log = archive.parent / f"{name}.log"
    script = [ROOT / "scripts/images.sh", "build", *words]
    run_logged(script, log, store.environment(), _BUILD_TIMEOUT_S)
    _keep(store, IMAGES[name], archive)
    say(f"{name}: {archive.stat().st_size / 1e6:.0f} MB in {time.monotonic() - started:.0f} s")


def _keep(store: Store, image: str, archive: Path) -> None:
    """Write the image's archive, and remove all of its old ones but one."""
    made = archive.with_suffix(".new")
    made.unlink(missing_ok=True)  # of a run that was killed
    store.run(["buildah", "push", "--quiet", image, f"docker-archive:{made}:{image}"])
    name = archive.name.rpartition("-")[0]
    # The newest of the old ones stays: another run may be loading it.
    old = sorted(archive.parent.glob(f"{name}-*.tar"), key=lambda path: path.stat().st_mtime)
    for path in old[:-1]:
        path.unlink()
    made.rename(archive)


def _build_vllm(store: Store) -> None:
    """The tree's code as a wheel, by the Dockerfile's own stage, and the image around it."""
    numa = ctypes.util.find_library("numa")
    found = Path("/lib", f"{platform.machine()}-linux-gnu", numa or "libnuma.so.1")
    if not found.is_file():
        raise ImagesUnavailable(f"{found} is not there, which vLLM needs; apt-get install libnuma1")
    bundle = ca_bundle()
    command: list[str | Path] = [
        "buildah",
        "build",
        "--layers",
        "--build-arg",
        f"BASE={BASE_IMAGE}",
    ]
    if bundle is not None:
        command += ["--secret", f"id=ca,src={bundle}"]
    code = [*command, "--file", ROOT / "Dockerfile", "--target", "code", "--tag", _CODE_IMAGE, ROOT]
    store.run(code, timeout_s=_BUILD_TIMEOUT_S)
    with tempfile.TemporaryDirectory() as context:
        shutil.copy(found, Path(context, "libnuma.so.1"))
        command += ["--build-arg", f"CODE={_CODE_IMAGE}", "--file", _VLLM, "--tag", VLLM_IMAGE]
        store.run([*command, context], timeout_s=_BUILD_TIMEOUT_S)


def _use_machines_libraries(store: Store) -> str:
    """Build options that put the environment without libraries in the dependencies' place."""
    command = ["buildah", "build", "--layers", "--build-arg", f"BASE={BASE_IMAGE}"]
    store.run([*command, "--file", _ENVIRONMENT, "--tag", _ENVIRONMENT_IMAGE, _ENVIRONMENT.parent])
    # Debian's packages may be out of reach here.
    without_compiler = "--build-arg COMPILER="
    environment = f"worker-dependencies=container-image://{_ENVIRONMENT_IMAGE}"
    return f"--build-context {environment} {without_compiler}"


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """One run builds, others wait for it; the lock goes with its process."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    for image, file in ensure_images(default_cache()).items():
        sys.stdout.write(f"{image:<10} {IMAGES[image]:<32} {file}\n")

"""What only the real buildah and uv can show: a push to a registry, the index of another torch."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cluster.harness.images import write_image
from tests.cluster.harness.packages import install
from tests.cluster.images.build import default_cache
from tests.cluster.images.store import NEEDS, Store, make_store
from tests.cluster.needs import skip_for
from tests.images.dockerfile import read
from tests.images.registry import serve

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
TORCH = re.findall(r"^torch==(\S+)", CONSTRAINTS, re.M)[0]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    skip_for(install(NEEDS))
    return make_store(tmp_path / "store")


def test_pushed_images_arrive_in_the_registry(store: Store, tmp_path: Path) -> None:
    tar = write_image(tmp_path / "i.tar", "localhost/some:1", {"/f": b"f"}, entrypoint=["/f"])
    store.run(["buildah", "pull", "--quiet", f"docker-archive:{tar}"])
    with serve() as registry:
        address = registry.address
        values = ["BUILDER=buildah", "ONLY=operator,router", f"REGISTRY={address}/llm", "TAG=7"]
        for name in ("operator", "router"):
            store.run(["buildah", "tag", "localhost/some:1", f"{address}/llm/xpyd-{name}:7"])
        script = [ROOT / "scripts/images.sh", "push", *values]
        table = store.run([*script, "PUSH_OPTIONS=--tls-verify=false"])
    assert set(registry.manifests) == {"llm/xpyd-operator:7", "llm/xpyd-router:7"}
    for manifest in registry.manifests.values():
        layers = json.loads(manifest)["layers"]
        assert {layer["digest"] for layer in layers} <= set(registry.blobs)
    assert f"{address}/llm/xpyd-router:7" in table


def _commands_of_the_dependencies(environment: Path, index: Path) -> list[list[str]]:
    """The two `uv pip install` of the worker's dependencies, for a machine instead of an image."""
    stages = read((ROOT / "Dockerfile").read_text())[1]
    (stage,) = (stage for stage in stages if stage.name == "worker-dependencies")
    commands = re.findall(r"uv pip install [^;&]*", stage.of("RUN")[0])
    replaced = [
        c.replace("/opt/xpyd/bin/python", str(environment / "bin/python"))
        .replace('"${TORCH_INDEX}"', index.as_uri())
        .replace("--quiet", "")
        .split()
        for c in commands
    ]
    return [[_uv(), *words[1:]] for words in replaced]


def _uv() -> str:
    """uv as `make setup` finds it: on the PATH or in xpyd's cache."""
    return shutil.which("uv") or str(default_cache().parent / "uv/bin/uv")


def _put_torch(index: Path, version: str) -> None:
    """A wheel of this version and nothing in it, in a folder laid out as an index."""
    name = f"torch-{version}-py3-none-any.whl"
    (index / "torch").mkdir(parents=True)
    (index / "torch/index.html").write_text(f'<a href="{name}">{name}</a>')
    with zipfile.ZipFile(index / "torch" / name, "w") as wheel:
        info = f"torch-{version}.dist-info"
        wheel.writestr("torch/__init__.py", "")
        # As in the real index, not all that it asks for is there in the version that is pinned.
        needs = "Requires-Dist: filelock\n"
        metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n{needs}"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_torch_of_another_index_stays_and_brings_no_cuda(tmp_path: Path) -> None:
    _put_torch(tmp_path / "index", f"{TORCH}+cpu")
    environment = tmp_path / "environment"
    subprocess.run([_uv(), "venv", "-q", "-p", sys.executable, environment], check=True, timeout=60)
    first, second = _commands_of_the_dependencies(environment, tmp_path / "index")
    said = [
        subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
        ).stderr
        for words in (first, [*second, "--dry-run"])
    ]
    assert f"+ torch=={TORCH}+cpu" in said[0]
    would = re.findall(r"^ ([+-]) (\S+)==", said[1], re.M)
    assert ("+", "transformers") in would
    assert not [name for _, name in would if re.match(r"torch|triton|nvidia|cuda", name)]


def test_a_file_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    _put_torch(tmp_path / "index", TORCH)
    environment = tmp_path / "environment"
    subprocess.run([_uv(), "venv", "-q", "-p", sys.executable, environment], check=True, timeout=60)
    first, _ = _commands_of_the_dependencies(environment, tmp_path / "index")
    checked = [word for word in first if word != "--no-verify-hashes"]
    done = subprocess.run(
        checked, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert f"Hash mismatch for `torch=={TORCH}`" in done.stderr

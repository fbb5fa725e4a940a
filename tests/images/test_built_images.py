"""The images as they are built for the test cluster, run as a pod of a fleet runs them."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
import urllib.request
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.cluster.images.build import (
    ENVIRONMENT_PATH,
    TARGETS,
    default_cache,
    ensure_images,
    worker_test_template,
)
from tests.cluster.images.store import ImagesUnavailable
from tests.cluster.needs import skip_for
from tests.images.rootfs import Image, unpack

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
LIBRARIES = {sysconfig.get_path("purelib"): ENVIRONMENT_PATH}
HOST = "127.0.0.1"
UNCHECKED = b"\x01\x00\x00\x00"
"""The flags of bytecode that is used without a look at its source."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[str, Image]]:
    try:
        archives = ensure_images(default_cache())
    except ImagesUnavailable as error:
        skip_for(str(error))
        raise
    folder = tmp_path_factory.mktemp("images")
    yield {name: unpack(archives[name], folder / name) for name in TARGETS}
    shutil.rmtree(folder)  # 700 MB, which pytest would keep for three runs


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("name", TARGETS)
def test_an_image_says_who_runs_what(images: dict[str, Image], name: str) -> None:
    config = images[name].config
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["/opt/xpyd/bin/xpyd"]
    assert "Cmd" not in config
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == f"xpyd-{name}"
    shown = _run(images[name].argv("version"))
    assert shown.stdout == f"xpyd {labels['org.opencontainers.image.version']}\n", shown.stderr


@pytest.mark.parametrize("name", TARGETS)
def test_an_image_runs_its_program_on_a_read_only_root(images: dict[str, Image], name: str) -> None:
    mounts = LIBRARIES if name == "worker" else {}
    done = _run(images[name].argv(name, "--help", mounts=mounts))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: xpyd {name} ")
    assert not done.stderr
    code = "import os; print(os.getuid(), os.getgid(), os.access('/', os.W_OK))"
    python = images[name].argv_of(["/opt/xpyd/bin/python", "-c", code], {})
    assert _run(python).stdout == "10001 10001 False\n"


@pytest.mark.parametrize("name", TARGETS)
def test_an_image_holds_no_build_tools_and_no_trace_of_the_build(
    images: dict[str, Image], name: str
) -> None:
    root = images[name].root
    for path in ("opt/tools", "src", "wheel", "root/.cache", "run/secrets", "opt/code"):
        assert not (root / path).exists(), path
    packages = next((root / "opt/xpyd/lib").glob("python3.*/site-packages"))
    for tool in ("pip", "uv", "hatchling", "pytest", "ruff"):
        assert not (packages / tool).exists(), tool
    assert not list(packages.glob("*editable*"))
    installed = json.loads((packages / "xpyd-0.1.0.dist-info/direct_url.json").read_text())
    assert installed["url"].startswith("file:///wheel/")


@pytest.mark.parametrize("name", TARGETS)
def test_all_modules_of_xpyd_come_with_bytecode(images: dict[str, Image], name: str) -> None:
    # On a read-only root nothing could be compiled once for all starts.
    packages = next((images[name].root / "opt/xpyd/lib").glob("python3.*/site-packages"))
    sources = [path for path in packages.glob("xpyd_*/**/*.py") if path.stat().st_size]
    assert sources
    for source in sources:
        (compiled,) = (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc")
        assert compiled.read_bytes()[4:8] == UNCHECKED, source


def test_the_image_of_the_operator_serves_as_a_client(images: dict[str, Image]) -> None:
    done = _run(images["operator"].argv("chat", "--help"))
    assert done.returncode == 0, done.stderr
    python = ["/opt/xpyd/bin/python", "-c", "import aiohttp"]
    assert _run(images["operator"].argv_of(python, {})).returncode == 0


def test_the_router_reads_tokenizers_without_the_hubs_library(images: dict[str, Image]) -> None:
    packages = next((images["router"].root / "opt/xpyd/lib").glob("python3.*/site-packages"))
    assert not (packages / "huggingface_hub").exists()
    text = (ROOT / "examples/demo-model/tokenizer.json").read_text()
    code = (
        "import sys, tokenizers, xpyd_router.tokens.child;"
        "t = tokenizers.Tokenizer.from_str(sys.stdin.read()); print(len(t.encode('Hello').ids))"
    )
    argv = images["router"].argv_of(["/opt/xpyd/bin/python", "-c", code], {})
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_without_the_machines_libraries_the_worker_says_what_is_missing(
    images: dict[str, Image],
) -> None:
    done = _run(images["worker"].argv("worker", "--model", "/models/demo-model"))
    assert done.returncode == 2
    assert "`xpyd worker` needs an extra that is not installed" in done.stderr


def test_the_pools_template_mounts_what_the_image_looks_for() -> None:
    spec = worker_test_template()["spec"]
    (container,), (volume,) = spec["containers"], spec["volumes"]
    (mount,) = container["volumeMounts"]
    assert container["name"] == "engine"
    assert mount["name"] == volume["name"]
    assert {volume["hostPath"]["path"]: mount["mountPath"]} == LIBRARIES
    assert (Path(volume["hostPath"]["path"]) / "torch").is_dir()


def test_the_worker_serves_the_model_it_carries_and_ends_at_sigterm(
    images: dict[str, Image], tmp_path: Path
) -> None:
    with _worker(images["worker"], tmp_path / "log") as (process, url):
        body = {"model": "demo-model", "prompt": "The sky is", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            said = json.load(answer)
        assert said["usage"]["completion_tokens"] == 8
        assert said["choices"][0]["text"].strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (tmp_path / "log").read_text()


@contextlib.contextmanager
def _worker(image: Image, log: Path) -> Generator[tuple[subprocess.Popen[bytes], str]]:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    flags = ["--dtype=float32", "--max-model-len=512", "--kv-cache-memory=64Mi"]
    place = [f"--host={HOST}", f"--port={port}"]
    argv = image.argv("worker", "--model=/models/demo-model", *flags, *place, mounts=LIBRARIES)
    with log.open("w") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT)
    try:
        _wait_for_health(process, port, log)
        yield process, f"http://{HOST}:{port}"
    finally:
        process.kill()
        process.wait()


def _wait_for_health(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5).close()
            return
        time.sleep(0.2)
    raise AssertionError(log.read_text())

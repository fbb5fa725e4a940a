"""Make the environment in which vLLM runs on this machine's CPU, and print its PYTHONPATH; with
`sources`, the Python files of a vLLM that does not run here (0.33 exists for CUDA only).

5.9 GB, in the cache outside the tree; the second call finds it there. `make bench-engine` uses the
same one. xxhash, which our KV transfer needs and vLLM does not bring, is in a folder beside it, so
that the environment itself stays as vLLM's wheel wants it.
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from bench.engine.peer import peer_environment  # noqa: E402
from bench.environments import cache, environment, run, uv  # noqa: E402

_INSTALL_S = 120.0
NIXL = "1.5.1"
_DOWNLOAD_S = 900.0
READ_ONLY_VERSION = "0.33.0"
"""The vLLM whose sources are compared with what our connector expects."""


def vllm_environment() -> tuple[Path, str]:
    """The environment's folder, and the PYTHONPATH with which its vLLM finds our connector."""
    folder = peer_environment()
    beside = folder / "beside"
    if not (beside / "xxhash").exists():
        python = str(folder / "bin/python")
        install = [uv(), "pip", "install", "--quiet", "--python", python]
        run([*install, "--target", str(beside), "xxhash>=3.4"], _INSTALL_S)
    # By this vLLM finds the plugin: the source tree is no installation.
    about = beside / "xpyd-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: xpyd\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "[vllm.endpoint_plugins]\nxpyd = xpyd_kv.vllm.api_server:XpydPlugin\n"
    )
    paths = (folder / "alias", beside, ROOT / "core", ROOT / "kv_transfer")
    return folder, ":".join(map(str, paths))


def nixl_path() -> str:
    """The PYTHONPATH with which that vLLM, and nothing of ours, finds NIXL."""
    folder = peer_environment()
    nixl = folder / "nixl"
    if not (nixl / "nixl").exists():
        python = str(folder / "bin/python")
        names = ("nixl", "nixl-cu12", "nixl-cu13")
        install = [uv(), "pip", "install", "--quiet", "--python", python, "--no-deps"]
        wanted = [f"{name}=={NIXL}" for name in names]
        run([*install, "--target", str(nixl), *wanted], _INSTALL_S)
    return f"{folder / 'alias'}:{nixl}"


def sources_folder() -> Path:
    """Where `vllm_sources` puts the package `vllm`."""
    return cache() / "vllm-sources" / READ_ONLY_VERSION


def vllm_sources() -> Path:
    """`sources_folder`, filled: 340 MB are downloaded, 60 MB of Python files kept. NotHere."""
    folder = sources_folder()
    ready = folder / "ready"
    if ready.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    # uv downloads no wheel without unpacking all of it.
    python = environment(folder / "pip", "pip", timeout_s=_INSTALL_S) / "bin/python"
    wanted = ["--no-deps", "--only-binary", ":all:", f"vllm=={READ_ONLY_VERSION}"]
    run([str(python), "-m", "pip", "download", "-d", str(folder), *wanted], _DOWNLOAD_S)
    (wheel,) = folder.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [n for n in archive.namelist() if n.endswith(".py")])
    wheel.unlink()
    shutil.rmtree(folder / "pip")
    ready.touch()
    return folder


if __name__ == "__main__":
    print(vllm_sources() if sys.argv[1:] == ["sources"] else vllm_environment()[1])

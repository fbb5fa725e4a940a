"""make bench-gpu: the measurements, a line of JSON, and the same in two files; without a GPU in
files that are named only.

Exit status: 0 measured, 1 a kernel and torch differ, 2 no GPU. How fast anything was is no failure.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

KEPT = Path(__file__).parents[2] / "docs/benchmarks/gpu.json"
MODULES = ("elementwise", "sampling", "kernels")


def main(argv: list[str], gpu: Any = None) -> int:
    """Run it. `gpu`: the package's modules, where they are not those of this machine."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu")
    parser.add_argument(
        "--output", type=Path, help="JSON, and a page beside it; docs/benchmarks but for --smoke"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes, in Triton's interpreter, on the CPU"
    )
    options = parser.parse_args(argv)
    output = options.output or (None if options.smoke else KEPT)
    if options.smoke and gpu is None:
        # Read when Triton is first imported, which is below.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from bench.gpu.cases import SMOKE, Sizes
    from bench.gpu.measuring import measure
    from bench.gpu.page import with_measured
    from bench.gpu.steps import EIGHT_B, SMOKE_STEPS

    if not options.smoke and not torch.cuda.is_available():
        sys.stderr.write("no CUDA device; --smoke needs none\n")
        return 2
    package = gpu or SimpleNamespace(
        **{name: importlib.import_module(f"xpyd_worker.kernels.gpu.{name}") for name in MODULES}
    )
    device = torch.device("cpu" if options.smoke else "cuda")
    sizes, dtype = (SMOKE, torch.float32) if options.smoke else (Sizes(), torch.bfloat16)
    with torch.inference_mode():
        steps = SMOKE_STEPS if options.smoke else EIGHT_B
        made = measure(package, sizes, steps, device, dtype)
    if output is not None:
        output.write_text(json.dumps(made, indent=1) + "\n")
        page = output.with_suffix(".md")
        if page.exists():
            page.write_text(with_measured(page.read_text(), made))
    sys.stdout.write(json.dumps(made) + "\n")
    return 1 if made["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Times of the cases, and the numbers that are kept."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch
import triton
from torch import Tensor

from bench.gpu.cases import Case, Sizes, cases
from bench.gpu.steps import StepSizes, step_rows

ROUNDS = 30
# Written between two calls, so that no cache of the device has what is measured.
_FLUSH_BYTES = 512 << 20
# Of a number and of its row's scale: sums of thousands of products, rounded to 16 bits.
_TOLERANCE = 5e-2


def measure(
    gpu: Any, sizes: Sizes, steps: StepSizes, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """The JSON that a run ends with."""
    timer = Timer(device)
    limit = _copy_speed(sizes.copy_bytes, timer, device)
    rows = [_row(case, timer, limit) for case in cases(gpu, sizes, device, dtype)]
    is_gpu = device.type == "cuda"
    return {
        "benchmark": "gpu",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu, interpreted",
        "dtype": str(dtype).removeprefix("torch."),
        "copyGbPerS": round(limit / 1e9, 1),
        "cases": rows,
        "steps": list(step_rows(gpu, steps, device, dtype, limit)),
        "wrong": [f"{row['kernel']} {row['size']}" for row in rows if not row["isRight"]],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
    }


class Timer:
    """Medians of single calls, each with cold caches; on a GPU by its own clock."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._flush = torch.empty(
            _FLUSH_BYTES if self._is_gpu else 1, device=device, dtype=torch.int8
        )
        self._rounds = ROUNDS if self._is_gpu else 1

    def seconds(self, call: Callable[[], Tensor]) -> float:
        """Of one call; the first ones, which compile, do not count."""
        for _ in range(3 if self._is_gpu else 0):
            call()
        return median(self._once(call) for _ in range(self._rounds))

    def _once(self, call: Callable[[], Tensor]) -> float:
        self._flush.zero_()
        if not self._is_gpu:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def _copy_speed(size: int, timer: Timer, device: torch.device) -> float:
    """Bytes a second, read and written."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timer.seconds(lambda: target.copy_(source))


def _row(case: Case, timer: Timer, limit: float) -> dict[str, Any]:
    ours = timer.seconds(case.ours)
    torchs = None if case.torchs is None else timer.seconds(case.torchs)
    return {
        "kernel": case.kernel,
        "size": case.size,
        "us": round(ours * 1e6, 1),
        "torchUs": None if torchs is None else round(torchs * 1e6, 1),
        "timesTorch": None if torchs is None else round(torchs / ours, 2),
        "ofCopySpeed": round(case.moved_bytes / ours / limit, 3),
        "isRight": case.torchs is None or agree(case.ours(), case.torchs()),
    }


def agree(found: Tensor, wanted: Tensor) -> bool:
    """Whether a kernel's result is torch's: integers are equal, other numbers differ by no more
    than a part of themselves and of their row's root mean square. Attention over a long context
    gives small rows: a fixed bound would let zeros pass for them."""
    if found.shape != wanted.shape:
        return False
    if not wanted.dtype.is_floating_point:
        return bool((found == wanted).all())
    wide = wanted.double()
    scale = wide.square().mean(-1, keepdim=True).sqrt()
    # Nothing is within bounds of a NaN.
    return bool(((found.double() - wide).abs() <= _TOLERANCE * (scale + wide.abs())).all())

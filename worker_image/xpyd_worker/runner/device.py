"""What differs between a CPU and a GPU while steps run, behind one seam; and what `--device`
and `--dtype` mean.

A step is enqueued; `mark` says where it ends in the device's work, and `reach` waits for that with
a deadline. On a CPU an operator is over when it returns, so there is nothing to wait for. What a
GPU needs besides, to be loaded, is in `CudaDevice`. It must not know models or requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from xpyd_core.errors import UserError
from xpyd_worker.runner.gpu_memory import CudaCounters
from xpyd_worker.runner.graphs import CudaGraphDevice
from xpyd_worker.system import cpu_flags

if TYPE_CHECKING:
    from xpyd_worker.kernels.gpu.kernels import TritonKernels

_log = logging.getLogger(__name__)
CPU = torch.device("cpu")
# Between two looks at a mark; what the system makes of it is some 70 us, and meanwhile other
# threads have the interpreter.
_POLL_S = 20e-6


class DeviceLostError(Exception):
    """The device does not answer. No XpydError: it fails in every later step, too, so the engine
    ends, and the supervisor of the process starts another."""


class Mark(Protocol):
    """A point in the device's work."""

    def is_reached(self) -> bool:
        """Whether all before it is done. Raises RuntimeError where the device has failed."""
        ...


class Device(Protocol):
    """Where steps run."""

    @property
    def torch_device(self) -> torch.device:
        """The device that tensors are on."""
        ...

    @property
    def depth(self) -> int:
        """See Executor.depth."""
        ...

    @property
    def is_lost_by_an_error(self) -> bool:
        """Whether nothing works any more after an operator has failed, but for want of memory."""
        ...

    def use(self) -> AbstractContextManager[object]:
        """A block in which this thread's operators go to this device."""
        ...

    def mark(self) -> Mark:
        """The point behind all that this thread has enqueued."""
        ...


class _Reached:
    def is_reached(self) -> bool:
        return True


class HostDevice:
    """The CPU: a step is over when it is launched."""

    torch_device = CPU
    depth = 1
    is_lost_by_an_error = False

    def use(self) -> AbstractContextManager[object]:
        """A block without effect: there is one CPU."""
        return nullcontext()

    def mark(self) -> Mark:
        """Reached."""
        return _Reached()


class CudaDevice:
    """One CUDA device; steps run on the stream that is the default of it."""

    depth = 2
    is_lost_by_an_error = True

    def __init__(self, torch_device: torch.device) -> None:
        """`torch_device` has an index."""
        self.torch_device = torch_device

    def use(self) -> AbstractContextManager[object]:
        """Triton launches on the thread's current device."""
        return torch.cuda.device(self.torch_device)

    def mark(self) -> Mark:
        """An event of CUDA."""
        event: Any = torch.cuda.Event()
        event.record()
        return _CudaMark(event)

    def kernels(self) -> TritonKernels:
        """Triton's; imported here only, so that an engine on a CPU starts without."""
        from xpyd_worker.kernels.gpu.kernels import TritonKernels

        return TritonKernels(self.torch_device)

    def counters(self) -> CudaCounters:
        """The driver's, and those of torch's allocator."""
        return CudaCounters(self.torch_device)

    def graph_device(self) -> CudaGraphDevice:
        """CUDA graphs."""
        return CudaGraphDevice()


class _CudaMark:
    def __init__(self, event: Any) -> None:  # noqa: ANN401 - untyped in torch
        self._event = event

    def is_reached(self) -> bool:
        return bool(self._event.query())


def reach(
    mark: Mark,
    *,
    within_s: float,
    what: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for `mark`. Raises DeviceLostError, naming `what`, when it is not reached in time."""
    end = clock() + within_s
    while not mark.is_reached():
        if clock() >= end:
            raise DeviceLostError(f"{what} was not done by the device within {within_s:g} s")
        sleep(_POLL_S)


def empty_cache() -> None:
    """Give back to CUDA what no tensor of this process uses any more."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def choose_device(
    asked: str,
    *,
    cuda_devices: Callable[[], int] | None = None,
    has_triton: Callable[[], bool] | None = None,
) -> torch.device:
    """The device for `--device asked`: auto, cpu, cuda (the first) or cuda:N. UserError where a GPU
    is asked for and cannot be had."""
    if asked == "cpu":
        return CPU
    count = (cuda_devices or _cuda_devices)()
    is_usable = (has_triton or _has_triton)()
    if asked == "auto" and not (count and is_usable):
        return CPU
    if not count:
        raise UserError(
            f"--device {asked}: torch {torch.__version__} finds no CUDA device here; look at "
            "nvidia-smi and at whether this torch was built with CUDA, or use --device cpu"
        )
    if not is_usable:
        raise UserError(f"--device {asked}: triton is not installed; pip install triton")
    index = int(asked.partition(":")[2] or 0)
    if index >= count:
        raise UserError(f"--device {asked}: there are {count} CUDA devices, the first is cuda:0")
    return torch.device("cuda", index)


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _has_triton() -> bool:
    return find_spec("triton") is not None


def compute_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return cast("tuple[int, int]", cast("Any", torch.cuda).get_device_capability(device))


# --- dtypes

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Ampere's.
_LEAST_CAPABILITY_BFLOAT16 = (8, 0)
# The processor multiplies floats of this kind itself; without that float32 is several times faster
# for a prompt (float16 where only avx512_bf16 is there: 3.6 times).
_FAST_FLAGS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "amx_tile", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}


def resolve_dtype(requested: str, stored: str, *, is_fast: bool) -> torch.dtype:
    """The dtype for `--dtype requested`; `auto` is the checkpoint's, `stored`, widened to float32
    where the processor is not `is_fast` in it. Raises UserError for an unknown name."""
    if requested == "auto":
        return _DTYPES[stored] if is_fast else torch.float32
    if requested not in _DTYPES:
        raise UserError(f"--dtype: {requested!r}; one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[requested]


def resolve_gpu_dtype(requested: str, stored: str, *, capability: tuple[int, int]) -> torch.dtype:
    """The dtype on a GPU of this compute capability, where `auto` is the checkpoint's. Below 8.0
    there is no bfloat16: `auto` takes float16 instead, as vLLM does, and asking for it is
    refused."""
    found = resolve_dtype(requested, stored, is_fast=True)
    if found != torch.bfloat16 or capability >= _LEAST_CAPABILITY_BFLOAT16:
        return found
    have = ".".join(map(str, capability))
    if requested != "auto":
        raise UserError(
            f"--dtype bfloat16: a GPU of compute capability {have} has none (8.0 and newer do); "
            "use float16 or float32"
        )
    _log.warning(
        "the checkpoint is in bfloat16, which a GPU of compute capability %s has not: float16", have
    )
    return torch.float16


def cpu_is_fast_in(dtype: str, cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor multiplies `dtype` natively (false for 16 bits where the system does
    not say)."""
    if dtype not in _FAST_FLAGS:
        return True
    return not cpu_flags(cpu_info).isdisjoint(_FAST_FLAGS[dtype])


def cpu_dtype(requested: str, stored: str) -> torch.dtype:
    """The dtype of weights and KV on this CPU, for `--dtype requested`."""
    return resolve_dtype(requested, stored, is_fast=cpu_is_fast_in(stored))


def gpu_dtype(requested: str, stored: str, device: torch.device) -> torch.dtype:
    """The dtype of weights and KV on this GPU, for `--dtype requested`. The GPU is logged."""
    capability = compute_capability(device)
    _log.info(
        "device %s: %s, compute capability %d.%d",
        device,
        torch.cuda.get_device_name(device),
        *capability,
    )
    return resolve_gpu_dtype(requested, stored, capability=capability)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in checkpoints."""
    return str(dtype).removeprefix("torch.")

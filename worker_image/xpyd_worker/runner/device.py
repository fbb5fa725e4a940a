"""What differs between a CPU and a GPU while steps run, behind one seam; and what `--device` means.

A step is enqueued; `mark` says where it ends in the device's work, and `reach` waits for that with
a deadline. On a CPU an operator is over when it returns, so there is nothing to wait for. What a
GPU needs besides, to be loaded, is in `CudaDevice`. It must not know models or requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from xpyd_core.errors import UserError
from xpyd_worker.runner.gpu_memory import CudaCounters
from xpyd_worker.runner.graphs import CudaGraphDevice

if TYPE_CHECKING:
    from xpyd_worker.kernels.gpu.kernels import TritonKernels

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
        """Within it this thread's operators go to this device."""
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
        """Nothing to choose."""
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
    """Of a CUDA device."""
    return cast("tuple[int, int]", cast("Any", torch.cuda).get_device_capability(device))

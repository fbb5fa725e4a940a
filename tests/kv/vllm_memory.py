"""Where a fake vLLM has its KV cache, and the stream that its "model" runs on: in ordinary memory,
on a fake GPU, on a real one.

On a GPU the model runs on a stream of its own, which is the current one in the thread of vLLM's
worker and nowhere else, as in vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from tests.kv.device_fake import FakeDevice, FakeStream, Machine
from tests.kv.nccl_fake import FakeNccl, World
from xpyd_kv.memory.device import DeviceView
from xpyd_kv.spans import Span
from xpyd_kv.vllm.gpu import Gpu, open_gpu

PATIENCE_S = 30.0


class CacheMemory(Protocol):
    """The memory of one rank."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Flat zeros, uint8."""
        ...

    def open_gpu(self, tensor: torch.Tensor) -> Gpu | None: ...

    def model(self) -> Any:
        """A context in which the thread is vLLM's, with the model's stream."""
        ...

    def run(
        self, call: Callable[[], None], *, reads: Sequence[Any] = (), writes: Sequence[Any] = ()
    ) -> None:
        """The model does this now, or when its stream comes to it, with these pieces of tensors."""
        ...

    def finish(self) -> None:
        """Wait for what the model has enqueued."""
        ...

    def close(self) -> None: ...


class HostMemory:
    """Ordinary memory: the model's calls have returned when it has written."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def open_gpu(self, tensor: torch.Tensor) -> Gpu | None:
        return open_gpu(tensor)

    @contextmanager
    def model(self) -> Iterator[None]:
        yield

    def run(self, call: Any, *, reads: Any = (), writes: Any = ()) -> None:
        call()

    def finish(self) -> None: ...

    def close(self) -> None: ...


class OwnStreamDevice(FakeDevice):
    """A fake GPU whose model runs on a stream that is current in the thread that made it alone."""

    def __init__(self, machine: Machine, process: str) -> None:
        super().__init__(machine, process, "GPU-0", 0)
        self._thread = threading.get_ident()
        self._default = FakeStream(self, is_compute=True)

    def compute_stream(self) -> FakeStream:
        is_model_s = threading.get_ident() == self._thread
        return self._compute if is_model_s else self._default


class FakeGpuMemory:
    """A fake GPU: nothing runs before somebody asks for an event behind it."""

    def __init__(self, machine: Machine, process: str, *, world: World | None = None) -> None:
        self.device = OwnStreamDevice(machine, process)
        self.others_bytes = 0
        """What else is in the driver's allocation."""
        self._world = world or World(machine)
        self._region: DeviceView | None = None
        self._flat = torch.empty(0)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        self._region = self.device.allocate(size_bytes + self.others_bytes)
        data = self.device.bytes_of(self.device.place_of(self._region))
        self._flat = torch.frombuffer(data, dtype=torch.uint8)
        return self._flat[:size_bytes]

    def open_gpu(self, tensor: torch.Tensor) -> Gpu:
        whole = self._region
        assert whole is not None
        return Gpu(
            self.device,
            "cpu",
            view_of=self._view,
            allocation_of=lambda _: whole,
            load_nccl=lambda: FakeNccl(self._world, self.device),
        )

    @contextmanager
    def model(self) -> Iterator[None]:
        yield

    def run(self, call: Any, *, reads: Any = (), writes: Any = ()) -> None:
        spans = [[self._span(one) for one in some] for some in (reads, writes)]
        self.device.compute_stream().enqueue("the model", *spans, call)

    def finish(self) -> None:
        assert self.device.compute_stream().record().wait(PATIENCE_S)

    def close(self) -> None:
        self.finish()
        if self._region is not None:
            self.device.free(self._region)

    def _view(self, tensor: torch.Tensor) -> DeviceView:
        assert self._region is not None
        start = tensor.data_ptr() - self._flat.data_ptr()
        return self._region[start : start + tensor.nbytes]

    def _span(self, tensor: torch.Tensor) -> Span:
        view = self._view(tensor)
        return Span(view.address, view.length)


class RealGpuMemory:
    """A GPU of this machine. Not run on one yet. `process`: one for P and D, which are in one."""

    def __init__(self, process: Any, index: int = 0) -> None:
        self._process = process
        self._stream = torch.cuda.Stream(torch.device("cuda", index))

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self._stream.device)

    def open_gpu(self, tensor: torch.Tensor) -> Gpu | None:
        return open_gpu(tensor, self._process)

    @contextmanager
    def model(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def run(self, call: Any, *, reads: Any = (), writes: Any = ()) -> None:
        with torch.cuda.stream(self._stream):
            # Long enough that what does not wait for this reads other bytes.
            torch.cuda._sleep(20_000_000)
            call()

    def finish(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.finish()

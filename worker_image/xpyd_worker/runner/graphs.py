"""Decoding steps as CUDA graphs: one for each of a few batch sizes, captured once, then replayed.

A step of a small batch launches hundreds of kernels that each take microseconds, so launching is
what it waits for; a replay is one launch. A graph reads and writes fixed addresses: a step's inputs
are copied into buffers that live as long as the graph, and the batch is padded to the next size
that was captured. It must not know requests or sampling.

The forward's Python does not run in a replay, so no layer reports that its keys and values are
stored. The caller runs steps that need these reports without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xpyd_worker.kernels.api import Plan, Span

if TYPE_CHECKING:
    # Triton is not everywhere where torch is.
    from xpyd_worker.kernels.gpu.plan import StaticPlan

Forward = Callable[[Tensor, Tensor, Plan], Tensor]
"""Token ids and positions [rows] int64 and a plan -> hidden states [rows, hidden]."""
Fill = Callable[[Tensor], None]
"""Puts those token ids in place that the host does not know."""
# Runs before a capture: in them kernels are compiled and cuBLAS's workspaces made.
_WARM_UPS = 2


class CudaGraphDevice:
    """torch.cuda's graphs, all with one pool of memory: only one of them may be on its way at a
    time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Tensor]) -> CudaGraph:
        """Capture what `run` launches. It has run before, so that nothing is compiled or set up in
        it now."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may ask CUDA for anything meanwhile, as those that move KV do.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
            output = run()
        return CudaGraph(graph, output)


@dataclass(frozen=True)
class CudaGraph:
    """A run that can be had again. `output`: what the run returned; each replay writes to it."""

    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self) -> None:
        """Start it once more on the current stream, without waiting for it."""
        self.graph.replay()


@dataclass(frozen=True)
class _Step:
    """What is captured for one batch size. `inputs` [2, size]: token ids and positions."""

    inputs: Tensor
    plan: StaticPlan
    captured: CudaGraph


class DecodeGraphs:
    """The graphs of one model."""

    def __init__(
        self,
        device: CudaGraphDevice,
        forward: Forward,
        plan_buffer: Callable[[int], StaticPlan],
        *,
        sizes: Sequence[int],
        on: torch.device,
    ) -> None:
        """Capture `forward` for batches of each of `sizes`; plan_buffer(n) has room for n."""
        self._steps: dict[int, _Step] = {}
        self._on = on
        # The largest first: the memory that it needs is enough for the others.
        for size in sorted(set(sizes), reverse=True):
            self._steps[size] = self._capture(device, forward, plan_buffer(size), size)

    @property
    def most(self) -> int:
        """The largest batch that there is a graph for."""
        return max(self._steps, default=0)

    def run(
        self, token_ids: Sequence[int], spans: Sequence[Span], fill: Fill = lambda _: None
    ) -> Tensor:
        """Hidden states [len(spans), hidden] of a step in which each sequence has one new token.
        They are overwritten by the next call. Raises ValueError for more than `most` of them."""
        count = len(spans)
        size = next((size for size in sorted(self._steps) if size >= count), None)
        if size is None or count == 0 or len(token_ids) != count:
            raise ValueError(f"{len(token_ids)} tokens of {count} sequences; 1 to {self.most} fit")
        step = self._steps[size]
        padding = [0] * (size - count)
        rows = [[*token_ids, *padding], [*(span.start for span in spans), *padding]]
        host = torch.tensor(rows, pin_memory=self._on.type == "cuda")
        step.inputs.copy_(host, non_blocking=True)
        fill(step.inputs[0])
        step.plan.copy_(spans)
        step.captured.replay()
        return step.captured.output[:count]

    def _capture(
        self, device: CudaGraphDevice, forward: Forward, plan: StaticPlan, size: int
    ) -> _Step:
        inputs = torch.zeros(2, size, dtype=torch.int64, device=self._on)

        def run() -> Tensor:
            return forward(inputs[0], inputs[1], plan.plan)

        for _ in range(_WARM_UPS):
            run()
        return _Step(inputs, plan, device.capture(run))


def padded_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes to capture for up to `most` sequences: powers of two, then `most` itself."""
    powers = [1 << bit for bit in range(most.bit_length()) if 1 << bit <= most]
    return (*powers,) if not powers or powers[-1] == most else (*powers, most)

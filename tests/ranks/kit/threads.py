"""All ranks of one model in one process: a thread each, tensors that change hands in memory.

`Ranks` stands where a ModelRunner does: it launches each step on all of them and gives what the
output rank says, once the other ranks of the last stage have said the same. What the real groups
promise is checked strictly: hidden states are copied late and into buffers that are used again, so
that whoever writes to them too early is found out. Every wait has a deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch
from torch import Tensor

from tests.worker.runner_driver import BLOCK_SIZE
from xpyd_core.parallel.partition import partition
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.engine.executor import StepInput, StepOutput
from xpyd_worker.kernels.api import KvShape
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.registry import load_config
from xpyd_worker.parallel.api import GroupError, Hidden, Part
from xpyd_worker.runner.load import CpuFit, fit_on_cpu
from xpyd_worker.runner.load_draft import DraftSource
from xpyd_worker.runner.runner import ModelRunner

DEADLINE_S = 60.0
MOST_ROWS = 512


class Meeting:
    """Where the ranks of a tensor group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[Tensor | None] = [None] * size
        self.parts: list[tuple[Tensor, ...]] = [()] * size

    def wait(self) -> None:
        """Wait until all are here. GroupError."""
        try:
            self.barrier.wait(DEADLINE_S)
        except threading.BrokenBarrierError as error:
            raise GroupError("another rank has gone") from error


class MemoryGroup:
    """A TensorGroup over threads. `calls`: what was asked for, and of how many bytes."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, len(meeting.slots)
        self.calls: list[tuple[str, int]] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        with self._all("all_reduce", x) as tensors:
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                total += tensor
        # It is given away: nobody may count on what is in it.
        x.fill_(float("nan"))
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        with self._all("all_gather", x) as tensors:
            return torch.cat(tensors, dim=1)

    @contextmanager
    def _all(self, what: str, x: Tensor) -> Iterator[list[Tensor]]:
        meeting = self._meeting
        self.calls.append((what, x.numel() * x.itemsize))
        meeting.slots[self.rank] = x
        meeting.wait()
        tensors = [tensor for tensor in meeting.slots if tensor is not None]
        assert len({tensor.shape for tensor in tensors}) == 1, "ranks are in different places"
        yield tensors
        meeting.wait()


class MemoryExperts:
    """An ExpertGroup over threads. `calls`: bytes that each call sent to other ranks."""

    def __init__(self, meeting: Meeting, rank: int, replicas: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, len(meeting.slots)
        self.replicas = replicas
        self.calls: list[int] = []

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        assert len(send) == len(receive) == self.size
        assert sum(send) == x.shape[0], "each row is for somebody"
        others = x.shape[0] - send[self.rank]
        self.calls.append(others * x[:1].numel() * x.itemsize)
        meeting = self.meeting
        meeting.parts[self.rank] = x.split(list(send))
        meeting.wait()
        mine = [parts[self.rank] for parts in meeting.parts]
        assert [len(part) for part in mine] == list(receive), "not as many as was said"
        found = torch.cat(mine)
        meeting.wait()
        return found


def expert_groups(size: int, replicas: int) -> list[MemoryExperts]:
    """All ranks' ends of one group."""
    meeting = Meeting(size)
    return [MemoryExperts(meeting, rank, replicas) for rank in range(size)]


def together(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each gives; each in a thread of its own, at the same time."""
    with ThreadPoolExecutor(len(works)) as threads:
        return [one.result(DEADLINE_S) for one in [threads.submit(work) for work in works]]


@dataclass
class Letter:
    """Hidden states on their way; `has_left` when the sender may use their memory again."""

    hidden: Hidden
    has_left: threading.Event = field(default_factory=threading.Event)


class Way:
    """From one rank to the same share of the next stage."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, features: int = 0) -> None:
        self.letters: Queue[Letter] = Queue(maxsize=16)
        self.is_broken = threading.Event()
        # The receiver's, used for each step.
        self.buffers = torch.empty(2 + features, MOST_ROWS, hidden_size, dtype=dtype)

    def take(self) -> Letter:
        """The next one."""
        for _ in range(int(DEADLINE_S / 0.1)):
            try:
                return self.letters.get(timeout=0.1)
            except Empty:
                if self.is_broken.is_set():
                    break
        raise GroupError("the stage before has gone")


class MemoryBoundary:
    """A Boundary over queues. `events`: what was called, in order."""

    def __init__(self, before: Way | None, behind: Way | None) -> None:
        self._before, self._behind = before, behind
        self._sent: list[Letter] = []
        self.events: list[str] = []

    def begin_step(self) -> None:
        self.events.append("begin_step")
        for letter in self._sent:
            assert self._behind is not None
            while not letter.has_left.wait(0.1):
                if self._behind.is_broken.is_set():
                    raise GroupError("the next stage has gone")
        self._sent.clear()

    def receive(self, rows: int) -> MemoryIncoming:
        assert self._before is not None, "there is no stage before"
        self.events.append(f"receive {rows}")
        return MemoryIncoming(self._before, rows, self.events)

    def send(self, hidden: Hidden) -> None:
        assert self._behind is not None, "there is no next stage"
        assert not self._sent, "begin_step was not called"
        self.events.append("send")
        self._sent.append(Letter(hidden))
        self._behind.letters.put(self._sent[0], timeout=DEADLINE_S)


class MemoryIncoming:
    """Copied when it is asked for, into memory that the next step uses again."""

    def __init__(self, way: Way, rows: int, events: list[str]) -> None:
        self._way, self._rows, self._events = way, rows, events

    def get(self) -> Hidden:
        self._events.append("get")
        letter = self._way.take()
        x, residual, features = letter.hidden
        for buffer, tensor in zip(self._way.buffers, (x, residual, *features), strict=True):
            assert tensor.shape[0] == self._rows, "stages see different batches"
            buffer[: self._rows].copy_(tensor)
        letter.has_left.set()
        x, residual, *features = self._way.buffers[:, : self._rows]
        return Hidden(x, residual, tuple(features))


@dataclass(frozen=True)
class MemoryParallel:
    """A rank's Parallel. What is drawn is told by whoever drives the ranks."""

    part: Part
    tensor: MemoryGroup
    boundary: MemoryBoundary
    experts: MemoryExperts | None = None
    feedback: Any = None


def connect(
    config: ModelConfig,
    sizes: Sizes,
    *,
    override: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    feature_layers: Sequence[int] = (),
) -> list[MemoryParallel]:
    """What each rank has of the others."""
    layers = partition(config.num_layers, sizes.pipeline, override)
    meetings = [Meeting(sizes.tensor) for _ in sizes.tensor_groups]
    ways = [
        [
            Way(config.hidden_size, dtype, sum(one < stage.start for one in {*feature_layers}))
            for stage in layers[1:]
        ]
        for _ in sizes.pipeline_groups
    ]
    experts: dict[int, MemoryExperts] = {}
    for ranks in sizes.expert_groups if sizes.expert > 1 else ():
        experts |= zip(ranks, expert_groups(len(ranks), sizes.data), strict=True)
    found: list[MemoryParallel] = []
    for rank in range(sizes.world):
        _, data, stage, _, tensor = sizes.coordinates(rank)
        part = Part(
            layers=layers[stage],
            stage=stage,
            stages=sizes.pipeline,
            tensor_rank=tensor,
            tensor_size=sizes.tensor,
            replicas=sizes.data if sizes.has_whole_experts else 1,
            redundant_experts=sizes.redundant_experts,
        )
        own = ways[data * sizes.tensor + tensor]
        before = own[stage - 1] if stage else None
        behind = own[stage] if not part.is_last else None
        group = MemoryGroup(meetings[data * sizes.pipeline + stage], tensor)
        boundary = MemoryBoundary(before, behind)
        found.append(MemoryParallel(part, group, boundary, experts.get(rank)))
    return found


class Ranks:
    """An Executor over all ranks of one model."""

    def __init__(
        self,
        folder: Path,
        sizes: Sizes,
        *,
        blocks: int = 64,
        override: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        draft: DraftSource | None = None,
    ) -> None:
        config = load_config(folder)
        features = () if draft is None else draft.feature_layers
        self.sizes = sizes
        self.parallel = connect(
            config, sizes, override=override, dtype=dtype, feature_layers=features
        )
        self.fits = [fit(folder, config, one, blocks, dtype, draft) for one in self.parallel]
        self.num_blocks = min(found.num_blocks for found in self.fits)
        self.runners = [found.make_runner(self.num_blocks) for found in self.fits]
        # Each thread is a rank: one after the other it runs what is launched.
        self._threads = [ThreadPoolExecutor(1) for _ in self.runners]
        self.layers_done: list[list[int]] = [[] for _ in self.runners]
        for layer in (layer for runner in self.runners for layer in runner.kv_cache.layers):
            # Whoever reads a slot that nobody wrote shows it.
            layer.fill_(float("nan"))

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> Running:
        """On all ranks of the one replica."""
        return self.replica(0).launch(step, layer_done)

    def replica(self, data: int) -> Replica:
        """An Executor over the ranks of one replica, whose experts wait for the others' steps."""
        return Replica(self, range(data * self.sizes.replica, (data + 1) * self.sizes.replica))

    def _run(self, rank: int, step: StepInput) -> StepOutput:
        runner: ModelRunner = self.runners[rank]
        try:
            return runner.launch(step, self.layers_done[rank].append).wait()
        except BaseException:
            self._gone(rank)
            raise

    def _gone(self, rank: int) -> None:
        """The rank's process would have ended: its neighbours see that."""
        parallel = self.parallel[rank]
        parallel.tensor._meeting.barrier.abort()
        if parallel.experts is not None:
            parallel.experts.meeting.barrier.abort()
        for way in (parallel.boundary._before, parallel.boundary._behind):
            if way is not None:
                way.is_broken.set()

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.shutdown()


@dataclass(frozen=True)
class Replica:
    """Where a ModelRunner stands for one replica."""

    ranks: Ranks
    members: range

    @property
    def num_blocks(self) -> int:
        return self.ranks.num_blocks

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> Running:
        """On all of its ranks."""
        ranks = self.ranks
        return Running(
            ranks, [ranks._threads[one].submit(ranks._run, one, step) for one in self.members]
        )


@dataclass(frozen=True)
class Running:
    """A step on all ranks."""

    ranks: Ranks
    futures: list[Future[StepOutput]]

    def outcomes(self) -> list[StepOutput | BaseException]:
        """What each rank gave or raised."""
        return [
            future.exception(DEADLINE_S) or future.result(DEADLINE_S) for future in self.futures
        ]

    def wait(self) -> StepOutput:
        """The output rank's, which all ranks of its stage have too."""
        outputs: list[StepOutput] = []
        for outcome in self.outcomes():
            if isinstance(outcome, BaseException):
                raise outcome
            outputs.append(outcome)
        first = self.ranks.sizes.output_rank
        assert all(
            output == replace(outputs[first], proposals={}) for output in outputs[first + 1 :]
        ), "one rank drafts, and all draw"
        assert not any(output.samples or output.prompt_logprobs for output in outputs[:first])
        return outputs[first]


def fit(
    folder: Path,
    config: ModelConfig,
    parallel: MemoryParallel,
    blocks: int,
    dtype: torch.dtype,
    draft: DraftSource | None = None,
) -> CpuFit:
    """A rank's part, loaded, with room for `blocks`; with a draft model it may be for fewer."""
    kv_heads = max(1, config.num_kv_heads // parallel.part.tensor_size)
    shape = KvShape(kv_heads, config.head_dim, BLOCK_SIZE, dtype)
    return fit_on_cpu(
        folder,
        config,
        dtype=dtype,
        kv_cache_bytes=blocks * shape.block_bytes * len(parallel.part.layers),
        parallel=parallel,
        draft=draft,
    )

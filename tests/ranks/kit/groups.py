"""Ranks as processes of their own, forked from one that has imported torch: a test of four ranks
takes as long as what it does.

`run_ranks(work, world)` calls `work(Seat)` in each; what it returns comes back, by rank. `work` is
a function of a module.
"""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest  # noqa: F401 - so that it is there before the fork
import torch

from xpyd_core.parallel.partition import partition
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.parallel.distributed import Rendezvous
from xpyd_worker.parallel.stages import HiddenSize
from xpyd_worker.parallel.state import ParallelState, open_parallel

PATIENCE_S = 60.0
ANSWER_S = 120.0  # the first use of some operators imports for a minute on a busy machine
HOST = "127.0.0.1"
_context = multiprocessing.get_context("forkserver")
# triton: what a rank on a GPU computes with takes a second to import.
_context.set_forkserver_preload([__name__, "triton.language"])


@dataclass(frozen=True)
class Seat:
    """What a rank is told."""

    rank: int
    world: int
    port: int
    listener: socket.socket | None
    address: str = HOST

    def at(self, **changes: Any) -> Rendezvous:
        """Where it meets the others."""
        made = Rendezvous(
            host=self.address,
            port=self.port,
            address=self.address,
            listener=self.listener,
            connect_s=PATIENCE_S,
            step_s=PATIENCE_S,
        )
        return replace(made, **changes)

    def open(
        self,
        sizes: Sizes,
        *,
        layers: int = 12,
        hidden: HiddenSize = HiddenSize(most_rows=16, width=8, dtype=torch.float32),  # noqa: B008
        meeting: int = 0,
        **changes: Any,
    ) -> ParallelState:
        """Its part of an engine on the CPU. `changes` of the rendezvous."""
        return open_parallel(
            sizes,
            rank=self.rank,
            local_rank=self.rank,
            at=self.at(**changes),
            device=torch.device("cpu"),
            layers=partition(layers, sizes.pipeline),
            hidden=hidden,
            meeting=meeting,
        )


Work = Callable[..., Any]


@dataclass(frozen=True)
class Rank:
    """A rank's process, and where its answer comes from."""

    process: ForkServerProcess
    answers: Connection

    def answer(self) -> Any:
        """What `work` returned. AssertionError with what it raised."""
        if not self.answers.poll(ANSWER_S):
            raise AssertionError(f"{self.process.name} does not answer")
        try:
            is_done, value = self.answers.recv()
        except EOFError:
            self.process.join(PATIENCE_S)
            raise AssertionError(
                f"{self.process.name} ended with {self.process.exitcode}"
            ) from None
        assert is_done, f"{self.process.name}:\n{value}"
        return value


@contextmanager
def ranks(
    work: Work, world: int, *more: Any, without: Sequence[int] = (), address: str = HOST
) -> Generator[dict[int, Rank]]:
    """`work(seat, *more)` in each of `world` processes but `without`; none is left behind."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    found: dict[int, Rank] = {}
    try:
        with listener:
            for rank in range(world):
                if rank not in without:
                    seat = Seat(rank, world, port, None if rank else listener, address)
                    found[rank] = _start(work, seat, more)
            # A process takes a copy of the listener when it comes up.
            for rank in found.values():
                rank.answer()
        yield found
    finally:
        for rank in found.values():
            rank.process.kill()
            rank.process.join(PATIENCE_S)
            rank.process.close()
            rank.answers.close()


def run_ranks(work: Work, world: int, *more: Any, address: str = HOST) -> list[Any]:
    """What each rank's `work(seat, *more)` returns."""
    with ranks(work, world, *more, address=address) as found:
        return [rank.answer() for rank in found.values()]


def _start(work: Work, seat: Seat, more: tuple[Any, ...]) -> Rank:
    answers, its = _context.Pipe(duplex=False)
    with its:
        process = _context.Process(
            target=_main, args=(work, seat, more, its), name=f"rank {seat.rank}", daemon=True
        )
        process.start()
    return Rank(process, answers)


def _main(work: Work, seat: Seat, more: tuple[Any, ...], answers: Connection) -> None:
    torch.set_num_threads(1)
    answers.send((True, "up"))
    try:
        answer = True, work(seat, *more)
    except BaseException:
        answer = False, traceback.format_exc()
    answers.send(answer)

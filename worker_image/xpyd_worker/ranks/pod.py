"""The ranks that run on this machine: their processes, and the memory and sockets they share.

`spawn` must be called by a thread that lives as long as they shall: the kernel kills them when it
ends, so nothing outlives the engine's process, however that goes.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.preflight import prepare_files
from xpyd_worker.ranks.beats import Beat, BeatPage
from xpyd_worker.ranks.frames import Frame, Kind
from xpyd_worker.ranks.links import Link, Links
from xpyd_worker.ranks.messages import Start, ToRank, encode
from xpyd_worker.ranks.responses import RESPONSE_RING_BYTES
from xpyd_worker.ranks.ring import RingFds, RingWriter, make_ring

COMMAND = (sys.executable, "-P", "-m", "xpyd_worker.ranks.process")
_REAP_S = 5.0
MakeStart = Callable[[int, RingFds, RingFds, int], Start]
"""Rank, its ring, its responses, the beats' descriptor -> what it is told first."""


class Pod:
    """The processes of `ranks`, a run of the instance's. `spawn` before anything else."""

    def __init__(
        self,
        ranks: range,
        sizes: Sizes,
        links: Links,
        take: Callable[[Frame], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """What the ranks send goes to `take`, on the links' thread."""
        self.ranks = ranks
        self._sizes = sizes
        self._links = links
        self._take = take
        self._command = command
        self._ring = make_ring(len(ranks))
        self._writer = RingWriter(self._ring)
        self.responses = [make_ring(1, RESPONSE_RING_BYTES) for _ in ranks]
        self._page = BeatPage(len(ranks))
        self._posts: dict[int, Link] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.ends = select.poll()
        """Readable when a process has ended; the caller may add to it."""
        self._pidfds: dict[int, int] = {}

    def spawn(self, make_start: MakeStart) -> None:
        """Start the processes. OSError when the system does not let us; `kill` then."""
        prepare_files(len(self.ranks))
        for index, rank in enumerate(self.ranks):
            start = make_start(
                rank, self._ring.of_reader(index), self.responses[index], self._page.descriptor
            )
            ours, theirs = socket.socketpair()
            # What a rank's end means is said by how its process ends.
            self._posts[rank] = self._links.add(ours, self._take, lambda _: None)
            with theirs:
                shared = (*start.ring.all(), *start.responses.all(), start.beats)
                own = () if start.listener is None else (start.listener,)
                process = subprocess.Popen(
                    self._command_of(rank, theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), *shared, *own),
                )
            self._processes[rank] = process
            pidfd = os.pidfd_open(process.pid)
            self._pidfds[pidfd] = rank
            self.ends.register(pidfd, select.POLLIN)
            self.tell(rank, start)

    def _command_of(self, rank: int, link: int) -> list[str]:
        place, sizes = self._sizes.place(rank), self._sizes
        where = f"stage {place.stage} of {sizes.pipeline}, share {place.tensor} of {sizes.tensor}"
        numbers = ("--link", str(link), "--parent", str(os.getpid()))
        return [*self._command, "--rank", str(rank), "--place", where, *numbers]

    def pid(self, rank: int) -> int:
        """0 before it is there."""
        process = self._processes.get(rank)
        return 0 if process is None else process.pid

    def tell(self, rank: int, message: ToRank) -> None:
        """Start-up."""
        self.post(Frame(Kind.CONTROL, rank, encode(message)))

    def post(self, frame: Frame) -> None:
        """To the rank that it names."""
        self._posts[frame.rank].post(frame)

    def publish(self, message: bytes, *, within_s: float, unless: int | None = None) -> None:
        """To all of them, through the ring. See RingWriter.write."""
        self._writer.write(message, within_s=within_s, unless=unless)

    def look(self) -> list[Beat]:
        """What each shows of itself."""
        return [self._page.look(index) for index in range(len(self.ranks))]

    def take_ended(self) -> list[tuple[int, int]]:
        """Ranks that have ended since the last call, with Popen's returncode."""
        found: list[tuple[int, int]] = []
        for pidfd, rank in list(self._pidfds.items()):
            returncode = self._processes[rank].poll()
            if returncode is not None:
                self.ends.unregister(pidfd)
                os.close(pidfd)
                del self._pidfds[pidfd]
                found.append((rank, returncode))
        return found

    def end(self, within_s: float) -> None:
        """Have them leave each other in order; those that have not after `within_s` are killed."""
        end_s = time.monotonic() + within_s
        self.publish(b"", within_s=within_s)
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end_s - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """All that are left, and reap them."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        for process in self._processes.values():
            # The kernel may take its time to free a process' memory; it is init's to reap then.
            with suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_S)
        self.take_ended()

    def close(self) -> None:
        """Give the memory back. When all have ended, and nobody publishes or reads any more."""
        self._writer.close()
        for fds in (self._ring, *self.responses):
            fds.close()
        self._page.close()

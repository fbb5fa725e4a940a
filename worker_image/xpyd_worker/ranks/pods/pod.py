"""The ranks that run on this machine: their processes, and the memory and sockets they share.

`spawn` must be called by a thread that lives as long as they shall (start.processes).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from xpyd_worker.config import WorkerConfig
from xpyd_worker.ranks.link.frames import Frame, Kind
from xpyd_worker.ranks.link.links import Link, Links
from xpyd_worker.ranks.link.responses import RESPONSE_RING_BYTES
from xpyd_worker.ranks.link.ring import RingWriter, make_ring
from xpyd_worker.ranks.pods.messages import Load
from xpyd_worker.ranks.start.messages import Start, ToRank, encode
from xpyd_worker.ranks.start.preflight import prepare_files
from xpyd_worker.ranks.start.processes import COMMAND, RankProcesses
from xpyd_worker.ranks.watch.beats import Beat, BeatPage


class Pod:
    """The processes of `ranks`, a run of a replica's, or none. `spawn` before anything else."""

    def __init__(
        self,
        ranks: range,
        links: Links,
        take: Callable[[Frame], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """What the ranks send goes to `take`, on the links' thread."""
        self.ranks = ranks
        self._links = links
        self._take = take
        self._processes = RankProcesses(command)
        self._ring = make_ring(len(ranks))
        self._writer = RingWriter(self._ring)
        self.responses = [make_ring(1, RESPONSE_RING_BYTES) for _ in ranks]
        self._page = BeatPage(len(ranks))
        self._posts: dict[int, Link] = {}
        self.ends = self._processes.ends
        """Readable when a process has ended; the caller may add to it."""

    def spawn(
        self,
        load: Load,
        rendezvous: tuple[str, int],
        *,
        config: WorkerConfig,
        address: str,
        listener: int | None = None,
    ) -> None:
        """Start the processes, with `load` and, of this pod, `config`; `rendezvous`, `address` and
        `listener` (rank 0's): see Start. OSError when the system does not let us; `kill` then."""
        if not self.ranks:
            return
        prepare_files(len(self.ranks))
        beats = self._page.descriptor
        inherited: dict[int, tuple[int, ...]] = {}
        starts: list[Start] = []
        with ExitStack() as stack:
            for index, rank in enumerate(self.ranks):
                ring, responses = self._ring.of_reader(index), self.responses[index]
                start = Start(
                    config=config,
                    sizes=load.config.sizes,
                    rank=rank,
                    pod_rank=index,
                    pod_ranks=len(self.ranks),
                    rendezvous=rendezvous,
                    address=address,
                    listener=None if rank else listener,
                    ring=ring,
                    responses=responses,
                    beats=beats,
                    logs=load.logs,
                    engine_id=load.config.engine_id,
                    incarnation=load.incarnation,
                    meeting=load.meeting,
                    place=load.place,
                )
                starts.append(start)
                ours, theirs = socket.socketpair()
                stack.enter_context(theirs)
                # What a rank's end means is said by how its process ends.
                self._posts[rank] = self._links.add(ours, self._take, lambda _: None)
                own = () if start.listener is None else (start.listener,)
                inherited[rank] = (theirs.fileno(), *ring.all(), *responses.all(), *own)
            self._processes.start(inherited, beats=beats)
        for start in starts:
            self.tell(start.rank, start)

    def be_watched(self) -> None:
        """Let the ranks end this process from now on when it does not run (MainWatch)."""
        self._page.watch_maker()

    def pid(self, rank: int) -> int:
        """0 before it is there."""
        return self._processes.pid(rank)

    def tell(self, rank: int, message: ToRank) -> None:
        """Start-up."""
        self.post(Frame(Kind.CONTROL, rank, encode(message)))

    def post(self, frame: Frame) -> None:
        """Send the message to the rank that it names."""
        self._posts[frame.rank].post(frame)

    def publish(self, message: bytes, *, within_s: float, unless: int | None = None) -> None:
        """Write to all ranks through the ring. See RingWriter.write."""
        if self.ranks:
            self._writer.write(message, within_s=within_s, unless=unless)

    def look(self) -> list[Beat]:
        """What each shows of itself; they see that they are watched."""
        self._page.live()
        return [self._page.look(index) for index in range(len(self.ranks))]

    def take_ended(self) -> list[tuple[int, int]]:
        """Ranks that have ended since the last call, with Popen's returncode."""
        return self._processes.take_ended()

    def end(self, within_s: float) -> None:
        """Have them leave each other in order; those that have not after `within_s` are killed."""
        self.publish(b"", within_s=within_s)
        self._processes.wait(within_s)
        self._processes.kill()

    def kill(self) -> None:
        """Kill all ranks that are left, and reap them."""
        self._processes.kill()

    def close(self) -> None:
        """Give the memory back. When all have ended, and nothing is published or read any more."""
        self._writer.close()
        for fds in (self._ring, *self.responses):
            fds.close()
        self._page.close()

"""The ranks of replicas that share experts, as one world: they meet at one address, wait for each
other in every step, and the first of them that is lost is the loss of all.

    World  <--join, lost--  Instance of each replica  -->  its ranks
           --give_up, looks->

Each replica keeps an Instance of its own: its processes, rings and watch. Any thread. See
docs/adr/0123.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from xpyd_worker.ranks.loss import Loss
from xpyd_worker.ranks.pods.handshake import LOOPBACK, listen
from xpyd_worker.ranks.watch.beats import Beat


class Member(Protocol):
    """What the world has of a replica's Instance."""

    def beats(self) -> Sequence[Beat]:
        """What its ranks showed at the watch's last look."""
        ...

    def give_up(self, loss: Loss) -> None:
        """End all its ranks, because of `loss`."""
        ...


class World:
    """The instances of so many replicas. Its maker closes it once all are loaded, or are not.

    Replicas may come later: `begin` says which there are to be, their instances join and start,
    `admit` makes them part of it. Before that their loss is no one else's (docs/adr/0128). Where
    `outlive` says so, those that are left go on without one that is lost (docs/adr/0129).
    """

    def __init__(
        self,
        replicas: int,
        host: str = LOOPBACK,
        check: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Its ranks meet at `host`. `check` raises UserError where so many replicas cannot be.
        UserError where no address can be had."""
        self._check = check
        self.replicas = tuple(range(replicas))
        """That there are to be, in the order of their ranks."""
        self.meeting = 0
        """How often replicas were to come or go."""
        self._members: dict[int, Member] = {}
        self._joining: dict[int, Member] = {}
        self._lost: list[Callable[[Loss], None]] = []
        self.outlive: Callable[[int], bool] = lambda _: False
        """Whether the others go on without a replica that is lost. Its owner sets it."""
        self._lock = threading.Lock()
        self._loaded = threading.Barrier(replicas)
        self.loss: Loss | None = None
        self.listener: socket.socket = listen(host, 0, "--host")
        """Of the store, which the first rank of replica 0 holds."""
        self.address: tuple[str, int] = self.listener.getsockname()[:2]

    def begin(self, replicas: tuple[int, ...]) -> int:
        """There are to be these; the meeting's number. Those that come join it from now on.
        UserError, and nothing has changed, where there cannot be as many."""
        self._check(len(replicas))
        with self._lock:
            self.replicas = replicas
            self.meeting += 1
            self._joining = {}
            return self.meeting

    def without(self, replica: int) -> int | None:
        """The others go on without one that is lost; the meeting's number. None where they cannot:
        the first replica has the store."""
        with self._lock:
            if replica == 0 or self.loss is not None:
                return None
            del self._members[replica]
            self.replicas = tuple(one for one in self.replicas if one != replica)
            self.meeting += 1
            return self.meeting

    def join(self, replica: int, member: Member) -> tuple[int, int]:
        """The instance of `replica` is there, before it starts; the meeting that it is for, 0 at
        the start of all, and its place there."""
        (self._joining if self.meeting else self._members)[replica] = member
        return self.meeting, self.replicas.index(replica)

    def admit(self) -> None:
        """Those that joined have started: from now on the loss of each is the loss of all."""
        with self._lock:
            self._members |= self._joining
            self._joining, loss = {}, self.loss
        if loss is not None:
            self._give_up(loss, of=None)

    def leave(self, left: tuple[int, ...]) -> None:
        """Only these are left of those that are part of it: the end of another is no loss."""
        with self._lock:
            self._members = {n: one for n, one in self._members.items() if n in left}

    def tell(self, lost: Callable[[Loss], None]) -> None:
        """Call `lost` once, with the first loss, on the thread that saw it."""
        self._lost.append(lost)

    def await_weights(self) -> bool:
        """Called by each replica when the weights are there on its ranks: wait for the others', for
        what follows is measured together. No deadline is known for weights that come from a disk;
        False as soon as one is lost."""
        try:
            self._loaded.wait()
        except threading.BrokenBarrierError:
            return False
        return True

    def elsewhere(self, replica: int) -> list[Beat]:
        """What the ranks of all other replicas show."""
        return [
            beat
            for number, member in list(self._members.items())
            if number != replica
            for beat in member.beats()
        ]

    def lose(self, loss: Loss, *, of: int | None = None) -> None:
        """A rank of replica `of` is lost, or a replica fails: all others end with the same words.
        What comes behind the first loss follows from it."""
        with self._lock:
            if self.loss is not None or (of is not None and of not in self._members):
                return
        if of is not None and self.outlive(of):
            return
        with self._lock:
            if self.loss is not None:
                return
            self.loss = loss
        self._loaded.abort()
        self._give_up(loss, of=of)
        for lost in self._lost:
            lost(loss)

    def _give_up(self, loss: Loss, *, of: int | None) -> None:
        for number, member in [*self._members.items(), *self._joining.items()]:
            if number != of:
                member.give_up(loss)

    def close(self) -> None:
        """No rank comes to the address any more."""
        self.listener.close()

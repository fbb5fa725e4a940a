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
from xpyd_worker.ranks.pods.handshake import listen
from xpyd_worker.ranks.watch.beats import Beat

LOOPBACK = "127.0.0.1"
"""There also where the instance's own address is an IPv6 one."""


class Member(Protocol):
    """What the world has of a replica's Instance."""

    def beats(self) -> Sequence[Beat]:
        """What its ranks showed at the watch's last look."""
        ...

    def give_up(self, loss: Loss) -> None:
        """End all its ranks, because of `loss`."""
        ...


class World:
    """The instances of so many replicas. Its maker closes it once all are loaded, or are not."""

    def __init__(self, replicas: int, host: str = LOOPBACK) -> None:
        """Its ranks meet at `host`. UserError where no address can be had."""
        self._members: dict[int, Member] = {}
        self._lost: list[Callable[[Loss], None]] = []
        self._lock = threading.Lock()
        self._loaded = threading.Barrier(replicas)
        self.loss: Loss | None = None
        self.listener: socket.socket = listen(host, 0, "--host")
        """Of the store, which the first rank of replica 0 holds."""

    def join(self, replica: int, member: Member) -> None:
        """The instance of `replica` is there, before it starts."""
        self._members[replica] = member

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
            if self.loss is not None:
                return
            self.loss = loss
        self._loaded.abort()
        for number, member in list(self._members.items()):
            if number != of:
                member.give_up(loss)
        for lost in self._lost:
            lost(loss)

    def close(self) -> None:
        """No rank comes to the address any more."""
        self.listener.close()

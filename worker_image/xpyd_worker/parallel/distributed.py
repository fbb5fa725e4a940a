"""torch.distributed, typed: the store at one address, and process groups over Gloo and NCCL.

Groups are made of their members alone and hang on no global state, so that the order in which
others make theirs is no matter, and each ends when its owner says so. Nothing here pickles. The
objects behind are C++ with stubs that say less than is there, so this module alone holds them as
Any. What another rank's end makes of a call becomes GroupError.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # where the classes are, whatever torch was built of

from xpyd_worker.parallel.api import GroupError

Foreign = Any
"""An object of torch.distributed."""

_c10d: Foreign = c10d
_SOON_S = 2.0
"""How long ranks whose call failed wait for each other's word: they failed at about one time."""
_POLL_S = 0.02
_MEET_TAG = 99


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of an engine find each other."""

    host: str
    """Rank 0's address, or a name of it."""

    port: int
    """Where rank 0's store listens."""

    address: str
    """This rank's own: what it opens listens there only."""

    listener: socket.socket | None = None
    """The store's socket on rank 0, which listens already, where the owner has made it."""

    connect_s: float = 120.0
    """The time within which all ranks must be there: the slowest has to import torch."""

    step_s: float = 300.0
    """What a rank waits for another in a step: as long as the longest step may take. That a process
    has ended or does not run is noticed sooner, by the process that started it."""


class Store:
    """Keys that all ranks see. Rank 0's process holds it."""

    def __init__(self, at: Rendezvous, rank: int, ranks: Sequence[int], meeting: int = 0) -> None:
        """Connect, and wait until all `ranks` have, of which this is one. `meeting`: the number of
        this start of theirs. GroupError names those that do not come."""
        self.rank = rank
        self.connect_s = at.connect_s
        end = timedelta(seconds=at.connect_s)
        where = f"{at.host}:{at.port}"
        with _as_group_error(f"rank {rank} does not reach the store of rank 0 at {where}"):
            if rank == 0:
                listener = at.listener or _listen(at.address, at.port)
                # The store closes it.
                self._tcp: Foreign = _c10d.TCPStore(
                    at.address,
                    at.port,
                    is_master=True,
                    timeout=end,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
            else:
                self._tcp = _c10d.TCPStore(at.host, at.port, timeout=end, wait_for_workers=False)
        missing = self.roll_call(f"start-{meeting}", ranks, within_s=at.connect_s)
        if missing:
            raise GroupError(
                f"{named(missing)} did not come to {where} within {at.connect_s:g} s; "
                f"{len(ranks)} ranks were to"
            )

    def seen_as(self, rank: int) -> Store:
        """The same, for this rank under another number."""
        other = copy(self)
        other.rank = rank
        return other

    def part(self, name: str) -> Foreign:
        """The store with `name` before each key."""
        return _c10d.PrefixStore(name, self._tcp)

    def put(self, key: str, value: bytes) -> None:
        """Put a value where all ranks see it."""
        with _as_group_error("the store of rank 0 is gone"):
            self._tcp.set(key, value)

    def take(self, key: str, *, of: int, within_s: float) -> bytes:
        """What rank `of` put under `key`. GroupError when it does not in time."""
        with _as_group_error(f"rank {of} said nothing of {key} within {within_s:g} s"):
            self._tcp.wait([key], timedelta(seconds=within_s))
            return bytes(self._tcp.get(key))

    def roll_call(self, name: str, ranks: Sequence[int], *, within_s: float) -> list[int]:
        """Say that this rank is at `name`; which of `ranks` do not say so in time. Rank 0 where the
        store does not answer."""
        missing = list(ranks)
        end = time.monotonic() + within_s
        try:
            self._tcp.set(f"{name}/{self.rank}", b"")
            while True:
                missing = [one for one in missing if not self._tcp.check([f"{name}/{one}"])]
                if not missing or time.monotonic() >= end:
                    return missing
                time.sleep(_POLL_S)
        except RuntimeError:
            # Rank 0 ends as soon as it knows which ranks it misses, and the store with it.
            return [0] if 0 in missing else missing


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise GroupError(f"the store cannot listen on {address}:{port}: {error}") from error
    return listener


class Pending:
    """A send or a receive under way. It keeps its tensor."""

    def __init__(
        self, work: Foreign, tensor: Tensor, blame: Callable[[], str], within: timedelta | None
    ) -> None:
        """`within`: the host waits, so long at most; None: the stream does."""
        self._work = work
        self.tensor = tensor
        self._blame = blame
        self._within = within

    def wait(self, within: timedelta | None = None) -> Tensor:
        """Wait until the transfer is over: on a GPU for what is enqueued after this call, on the
        CPU for the caller. GroupError, when the other does not do its part in time."""
        deadline = within or self._within
        with _as_group_error(self._blame):
            if deadline is None:
                self._work.wait()
            else:
                self._work.wait(deadline)
        return self.tensor


class ProcessGroup:
    """Some ranks over one backend. Numbers of ranks are those in the group."""

    def __init__(
        self,
        backend: Foreign,
        store: Store,
        name: str,
        ranks: tuple[int, ...],
        within_s: float | None,
    ) -> None:
        """`within_s`: the deadline of each call, for which the host waits. None: calls are enqueued
        on a stream, and the backend has a watchdog that ends the process when one takes too long.
        """
        self._backend = backend
        # A deadline would have NCCL's wait hold the host up until the device is there.
        self._within = None if within_s is None else timedelta(seconds=within_s)
        self._reduce_options, self._gather_options = (
            _c10d.AllreduceOptions(),
            _c10d.AllgatherOptions(),
        )
        self._exchange_options = _c10d.AllToAllOptions()
        if within_s is None:
            # On the current stream, not on one of NCCL's between two events.
            self._reduce_options.asyncOp = self._gather_options.asyncOp = False
            self._exchange_options.asyncOp = False
        self._store = store
        self.name = name
        self.ranks = ranks
        self.rank = ranks.index(store.rank)
        self._failures = 0

    def all_reduce(self, x: Tensor) -> None:
        """Add up all ranks' `x`, in place."""
        with self._naming_the_missing("all_reduce"):
            _wait(self._backend.allreduce([x], self._reduce_options))

    def all_gather(self, out: Tensor, share: Tensor) -> None:
        """Put all ranks' `share` into `out`, one behind the other; both contiguous. `share` may be
        this rank's place in `out`."""
        with self._naming_the_missing("all_gather"):
            _wait(self._backend._allgather_base(out.view(-1), share.view(-1), self._gather_options))

    def all_to_all(
        self, out: Tensor, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> None:
        """Give each rank its `send` rows of `x`, and take `receive` rows of each into `out`, both
        contiguous and by rank."""
        with self._naming_the_missing("all_to_all"):
            _wait(
                self._backend.alltoall_base(
                    out, x, list(receive), list(send), self._exchange_options
                )
            )

    def send(self, x: Tensor, to: int, tag: int = 0) -> Pending:
        """Begin to send contiguous `x`. What is sent to one rank with one tag arrives in order."""
        blame = self._blame("take", to)
        with _as_group_error(blame):
            return Pending(self._backend.send([x], to, tag), x, blame, self._within)

    def receive(self, x: Tensor, source: int, tag: int = 0) -> Pending:
        """Begin to receive into contiguous `x`."""
        blame = self._blame("send", source)
        with _as_group_error(blame):
            return Pending(self._backend.recv([x], source, tag), x, blame, self._within)

    def close(self) -> None:
        """Give back what it holds. Over Gloo calls that wait in it fail; over NCCL it waits for
        what is under way."""
        self._backend.shutdown()

    def say(self, key: str, word: bytes) -> list[bytes]:
        """Each rank's `word` for `key`, by their numbers in the group, over the store. GroupError
        where one says none."""
        self._store.put(f"{key}/{self._store.rank}", word)
        within_s = self._store.connect_s
        return [self._store.take(f"{key}/{r}", of=r, within_s=within_s) for r in self.ranks]

    def meet(self, within_s: float) -> list[int]:
        """Wait until all ranks are here; those, by their numbers in the world, that do not come
        within `within_s`. Over Gloo."""
        end = time.monotonic() + within_s
        others = [rank for rank in range(len(self.ranks)) if rank != self.rank]
        missing: set[int] = set()
        # Held until all is over: a send without a holder is called off.
        words: list[tuple[int, Pending]] = []
        for begin in (self.send, self.receive):
            for other in others:
                try:
                    words.append((other, begin(torch.zeros(1), other, _MEET_TAG)))
                except GroupError:
                    missing.add(other)
        for other, word in words:
            try:
                word.wait(timedelta(seconds=max(_POLL_S, end - time.monotonic())))
            except GroupError:
                missing.add(other)
        return sorted(self.ranks[other] for other in missing)

    def _give_up(self) -> None:
        if self._within is None:
            # What waits on the device for a rank that is gone would be waited for.
            self._backend.abort()
        else:
            self._backend.shutdown()

    def _blame(self, verb: str, other: int) -> Callable[[], str]:
        return lambda: (
            f"rank {self.ranks[other]} did not {verb} what rank {self._store.rank} "
            f"{'sends' if verb == 'take' else 'waits for'} in group {self.name}"
        )

    @contextmanager
    def _naming_the_missing(self, what: str) -> Generator[None]:
        """Gloo does not name the ranks that it waited for: ask which are still there."""
        try:
            yield
        except RuntimeError as error:
            # Ranks that wait for this one fail now, too.
            self._give_up()
            self._failures += 1
            call = f"failed/{self.name}/{self._failures}"
            missing = self._store.roll_call(call, self.ranks, within_s=_SOON_S)
            who = f"{named(missing)} did not take part" if missing else "all ranks are there"
            raise GroupError(f"{what} in group {self.name}: {who}: {_first_line(error)}") from error


def gloo_device(address: str) -> Foreign:
    """Where the Gloo groups of this process listen, and one thread that moves their bytes."""
    return _c10d.ProcessGroupGloo.create_device(hostname=address)


def gloo_group(
    store: Store,
    name: str,
    ranks: tuple[int, ...],
    *,
    device: Foreign,
    at: Rendezvous,
) -> ProcessGroup:
    """`ranks`, this one among them, over Gloo. GroupError when they do not all come."""
    kind = _c10d.ProcessGroupGloo
    options = kind._Options()
    options._devices, options._threads = [device], 1
    # Of the constructor's own wait; then of each call.
    options._timeout = timedelta(seconds=at.connect_s)
    with _as_group_error(f"rank {store.rank} cannot make group {name} of ranks {ranks}"):
        backend = kind(store.part(name), ranks.index(store.rank), len(ranks), options)
    backend._set_default_timeout(timedelta(seconds=at.step_s))
    return ProcessGroup(backend, store, name, ranks, at.step_s)


def nccl_group(store: Store, name: str, ranks: tuple[int, ...], *, at: Rendezvous) -> ProcessGroup:
    """`ranks`, this one among them, over NCCL on the device of what it is given. It connects at the
    first call; each pair that sends and receives has a communicator and a stream of its own."""
    kind = _c10d.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=at.step_s)
    with _as_group_error(f"rank {store.rank} cannot make group {name} of ranks {ranks}"):
        backend = kind(store.part(name), ranks.index(store.rank), len(ranks), options)
    return ProcessGroup(backend, store, name, ranks, None)


def _wait(work: Foreign) -> None:
    """Wait until `work` is over; torch gives None for what is on the current stream already."""
    if work is not None:
        work.wait()


def numbers(of: Tensor) -> list[int]:
    """The elements of an int64 vector on the host."""
    return cast("list[int]", cast("Any", of).tolist())


@contextmanager
def _as_group_error(what: str | Callable[[], str]) -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        text = what if isinstance(what, str) else what()
        raise GroupError(f"{text}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """What torch says of it, without its C++ stack."""
    return str(error).partition("\n")[0]


def named(ranks: list[int]) -> str:
    """Ranks as a message names them."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"

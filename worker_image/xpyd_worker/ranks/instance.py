"""All ranks of an instance, as its engine's process has them: started, spoken to, watched, ended.

The load's thread starts it and closes it, the engine's thread publishes steps and reads answers,
the links' thread takes what ranks send, the watch's says when one is lost. Then all are gone.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from typing import TypeVar

from xpyd_core.errors import ProtocolError, UserError
from xpyd_worker.config import WorkerConfig
from xpyd_worker.engine.executor import LayerExperts, sum_by_layer
from xpyd_worker.ranks.link.frames import Frame, Kind
from xpyd_worker.ranks.link.links import LinkChannel, Links
from xpyd_worker.ranks.link.responses import Responses
from xpyd_worker.ranks.link.ring import GivenUpError, NotReadError
from xpyd_worker.ranks.loss import (
    EXIT_POD_LOST,
    EXIT_STEP_STUCK,
    Failure,
    Loss,
    RankIdentity,
    RankLostError,
    rank_identity,
)
from xpyd_worker.ranks.pods.handshake import LOOPBACK, listen
from xpyd_worker.ranks.pods.messages import Load
from xpyd_worker.ranks.pods.pod import Pod
from xpyd_worker.ranks.pods.pods import Pods
from xpyd_worker.ranks.pods.remote import RelayedResponses, RemoteRanks
from xpyd_worker.ranks.start.messages import (
    Agreed,
    ExpertsChosen,
    Failed,
    Fits,
    FromRank,
    Logs,
    Measure,
    Meet,
    Opened,
    RankReady,
    WeightsLoaded,
    decode_from_rank,
)
from xpyd_worker.ranks.start.processes import COMMAND
from xpyd_worker.ranks.watch.beats import Beat
from xpyd_worker.ranks.watch.judge import Judge, Shown
from xpyd_worker.ranks.watcher import Watch
from xpyd_worker.ranks.world import World

_log = logging.getLogger(__name__)
_T = TypeVar("_T", Opened, WeightsLoaded, Fits, RankReady)
_PUBLISH_S = 30.0
"""A rank that computes reads its next step only then; what fits into the ring does not wait."""
_SETTLE_S = 15.0
"""The judge says earlier which rank was lost first."""
_CLOSE_S = 2.0


class Instance:
    """The ranks that `config` names. `start` it once, `close` it in any case."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        logs: Logs,
        command: Sequence[str] = COMMAND,
        incarnation: str = "",
        world: World | None = None,
        pods: Pods | None = None,
    ) -> None:
        """`world`: where the ranks are one world with those of other replicas; `pods`: the others
        of the instance, where this is a replica; else it gathers and ends them itself."""
        self._config = config
        self._world = world
        self.sizes = sizes = config.sizes
        self.first_rank = config.first_rank
        self._logs = logs
        self._incarnation = incarnation
        self._links = Links("rank-links")
        self._started: queue.SimpleQueue[tuple[int, FromRank] | None] = queue.SimpleQueue()
        self._pod = Pod(config.pod_ranks(0), self._links, self._take, command)
        self._pods = pods
        self._own_pods = Pods(config) if config.pods > 1 and pods is None else None
        self._others: list[RemoteRanks] = []
        self._judge = Judge(sizes.replica, self.rank_identity)
        self._watch = Watch(
            self._pod,
            self._judge,
            others=self._look,
            lost=self._on_loss,
            elsewhere=self._elsewhere,
        )
        self._is_closed = False
        self._lock = threading.Lock()
        """Between `close` and another replica's `give_up`."""
        self.settled = threading.Event()
        self.loss: Loss | None = None
        """Why the instance cannot go on; the ranks are gone then."""
        self.fits: tuple[int, ...] = ()
        """Blocks of KV that each rank has room for, once started: it has as many as the rank with
        the least."""
        self.ready: tuple[RankReady, ...] = ()
        """What each rank said as it started."""
        self.lost_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable from then on."""
        self.responses: list[Responses | RelayedResponses] = []
        """The ranks' facts, by rank, once started. The engine's thread reads them."""
        self.responses += map(Responses, self._pod.responses)
        self.channels = [LinkChannel(rank, self._post) for rank in range(sizes.replica)]
        """The KV transfer's way to each rank, by rank."""
        self._chosen: dict[int, tuple[LayerExperts, ...]] = {}
        self._joined = (0, 0) if world is None else world.join(config.replica, self)
        """The meeting that it comes to, and its place there."""

    def rank_identity(self, rank: int) -> RankIdentity:
        """The rank as messages name it."""
        pods = range(self._config.pods)
        pod = next(number for number in pods if rank in self._config.pod_ranks(number))
        return rank_identity(
            rank,
            self.sizes,
            pid=self._pod.pid(rank),
            pod=pod if len(pods) > 1 else None,
            first=self.first_rank,
        )

    def experts_chosen(self) -> list[LayerExperts]:
        """By layer, what its ranks have said last. Any thread."""
        return sum_by_layer(chain.from_iterable(list(self._chosen.values())))

    def show(self) -> list[Shown]:
        """What is known of each rank now, also when it is lost. Any thread."""
        return self._judge.show()

    @property
    def threads(self) -> set[int]:
        """Idents of those that `close` waits for, once started."""
        return {self._links.thread_ident, self._watch.thread_ident}

    def _pod_of(self, rank: int) -> Pod | RemoteRanks:
        return next(one for one in (self._pod, *self._others) if rank in one.ranks)

    def _post(self, frame: Frame) -> None:
        self._pod_of(frame.rank).post(frame)

    # --- the load's thread

    def start(self) -> tuple[RankReady, ...]:
        """Start the ranks and wait until steps may come; what each has. Raises UserError for what
        the user can mend, RankLostError for the rest; `close` it then, too."""
        config = self._config
        self._find_others()
        # Who reaches their store or groups is one of them: they have no keys. Ranks of several pods
        # need each other's addresses (docs/parallel.md).
        is_split = bool(self._others) and len(self._pod.ranks) > 0
        meets_others = self._world is not None or is_split
        host = config.host if config.pods > 1 and meets_others else LOOPBACK
        with ExitStack() as stack:
            if self._world is None:
                listener = stack.enter_context(listen(host, 0, "--host"))
                at: tuple[str, int] = listener.getsockname()[:2]
            else:
                listener, at = self._world.listener, self._world.address
            has_store = self._world is None or config.replica == 0
            # A pod with all of the ranks has their store, too.
            rendezvous = at if meets_others else None
            load = Load(config, rendezvous, self._logs, self._incarnation, *self._joined)

            def spawn() -> None:
                store = listener.fileno() if has_store else None
                self._pod.spawn(load, at, config=config, address=host, listener=store)

            for one in self._others:
                assert self._pods is not None, "found there"
                self._pods[one.pod].load(load, one)
            self._watch.start(spawn)
            self._collect(Opened)
        self._tell(Meet())
        self._collect(WeightsLoaded)
        world = self._world
        if world is not None and not self._joined[0] and not world.await_weights():
            self.settled.wait(_SETTLE_S)
            raise self.error()
        self._tell(Measure())
        self.fits = tuple(one.blocks for one in self._collect(Fits))
        self._tell(Agreed(min(self.fits)))
        self.ready = self._collect(RankReady)
        self._watch.report(Judge.started)
        return self.ready

    def be_watched(self) -> None:
        """Once started: from now on the ranks end this process when it does not run."""
        self._pod.be_watched()

    def _find_others(self) -> None:
        """The ranks of other pods, once these are there."""
        if self._own_pods is not None:
            self._own_pods.gather()
            self._pods = self._own_pods
        for number in range(1, self._config.pods):
            if ranks := self._config.pod_ranks(number):
                others = RemoteRanks(
                    *(number, ranks, self.first_rank),
                    take=self._take,
                    ended=self._on_end,
                    lose=self._on_pod_lost,
                )
                self._others.append(others)
                self.responses += others.responses

    def _tell(self, message: Meet | Measure | Agreed) -> None:
        for rank in range(self.sizes.replica):
            self._pod_of(rank).tell(rank, message)

    def _collect(self, kind: type[_T]) -> tuple[_T, ...]:
        """Collect one message of every rank, by rank."""
        found: dict[int, _T] = {}
        while len(found) < self.sizes.replica:
            one = self._started.get()
            if one is None:
                raise self.error()
            rank, message = one
            if not isinstance(message, kind):
                raise RankLostError(
                    f"{self.rank_identity(rank)} said {message!r}, not {kind.__name__}"
                )
            found[rank] = message
        return tuple(found[rank] for rank in sorted(found))

    def error(self) -> Exception:
        """What to raise: the loss, or else that it was closed."""
        if self.loss is None:
            return RankLostError("the instance was closed")
        if self.loss.is_user_error:
            return UserError(self.loss.text)
        return RankLostError(self.loss.text, status=self.loss.status)

    def close(self, *, in_order: bool = False) -> None:
        """End all ranks, `in_order` when no step is under way, and give back what was shared."""
        with self._lock:
            self._is_closed = True
        if self._world is not None and not in_order and self.loss is None:
            # Where others are still loading, or in a step, they would wait for these ranks.
            text = f"replica {self._config.replica} of the instance has ended"
            self._world.lose(Loss(text, 1), of=self._config.replica)
        why = "the leader ends" if self.loss is None else self.loss.text
        for one in self._others:
            one.unload(in_order=in_order, reason=why)
        self._watch.close(in_order=in_order)
        if self._own_pods is not None:
            self._own_pods.close(in_order=in_order, reason=why)
        # Waiters wake up and raise.
        self._started.put(None)
        os.eventfd_write(self.lost_fd, 1)
        self._links.close(_CLOSE_S)
        for one in self.responses:
            one.close()
        self._pod.close()
        self._watch.release()
        os.close(self.lost_fd)

    # --- the engine's thread

    def publish(self, message: bytes) -> None:
        """A step, to all ranks. RankLostError."""
        if self.loss is not None:
            raise self.error()
        try:
            for one in self._others:
                one.publish(message)
            self._pod.publish(message, within_s=_PUBLISH_S, unless=self.lost_fd)
        except GivenUpError:
            raise self.error() from None
        except NotReadError as error:
            rank = self._pod.ranks[error.reader]
            loss = Loss(
                f"{self.rank_identity(rank)} has not read its steps for {_PUBLISH_S:g} s",
                EXIT_STEP_STUCK,
            )
            raise self._give_up(loss) from error

    def failed(self, rank: int, failure: Failure) -> None:
        """The rank answered a step with why it ends."""
        self._watch.report(lambda judge: judge.failed(rank, failure))

    def stuck(self, deadline_s: float) -> Exception:
        """End all ranks, because no answer to a step has come in time; returns the error to
        raise."""
        return self._give_up(
            Loss(f"a step is stuck: no answer within {deadline_s:g} s", EXIT_STEP_STUCK)
        )

    def _give_up(self, loss: Loss) -> Exception:
        self.give_up(loss)
        self.settled.wait(_SETTLE_S)
        return self.error()

    # --- any thread, of a world with other replicas

    def give_up(self, loss: Loss) -> None:
        """See Member."""
        with self._lock:
            if not self._is_closed:
                self._watch.report(lambda judge: judge.give_up(loss))

    def beats(self) -> list[Beat]:
        """See Member."""
        return [shown.beat for shown in self._judge.show()]

    # --- the links' thread

    def _take(self, frame: Frame) -> None:
        rank = frame.rank
        if frame.kind == Kind.CHANNEL:
            self.channels[rank].take(frame.body)
            return
        if frame.kind != Kind.CONTROL:
            raise ProtocolError(
                f"a frame of kind {frame.kind.name} from {self.rank_identity(rank)}"
            )
        message = decode_from_rank(frame.body)
        if isinstance(message, Failed):
            failure = message.failure
            self._watch.report(lambda judge: judge.failed(rank, failure))
        elif isinstance(message, ExpertsChosen):
            self._chosen[rank] = message.layers
        else:
            if isinstance(message, Opened):
                self._watch.report(lambda judge: judge.opened(rank))
            self._started.put((rank, message))

    def _on_end(self, rank: int, returncode: int) -> None:
        self._watch.report(lambda judge: judge.ended(rank, returncode))

    def _on_pod_lost(self, reason: str) -> None:
        loss = Loss(reason, EXIT_POD_LOST)
        self._watch.report(lambda judge: judge.give_up(loss))

    # --- the watch's thread

    def _look(self) -> list[Beat]:
        """Look at the ranks of the other pods."""
        return [beat for one in self._others for beat in one.look()]

    def _elsewhere(self) -> list[Beat]:
        return [] if self._world is None else self._world.elsewhere(self._config.replica)

    def _on_loss(self, loss: Loss) -> None:
        self.loss = loss
        for one in self._others:
            one.unload(in_order=False, reason=loss.text)
        if self._own_pods is not None:
            self._own_pods.end(in_order=False, reason=loss.text)
        self.settled.set()
        self._started.put(None)
        os.eventfd_write(self.lost_fd, 1)
        if self._world is not None:
            self._world.lose(loss, of=self._config.replica)

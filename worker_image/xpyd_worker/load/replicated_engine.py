"""Several replicas of an engine behind one bridge: chosen, kept alive, shown as one (ADR 0117).

    bridge --submit--> ReplicatedEngine --4 x waiting + running--> EngineCore of replica 0, 1, ...
           <--deliver--------'   one thread and one instance of ranks each

Each replica is an engine of its own: its scheduler is a thread here, its model and KV cache are in
rank processes, also where it has one rank only. So a replica that dies takes its requests along and
nothing else. It is started again, at once or with a growing pause, while the others serve; when the
last one is lost, so is the instance. Replicas that share experts keep in step (LockStep, ADR 0122):
their ranks are one world, and the instance is lost with any of them. Where KV moves each has an
address of its own, and each start of it an incarnation (ADR 0124). Replicas come and go while it
serves (`scale`): one that goes is let go of by the routers first, as an instance is (ADR 0133);
those that share experts do it at a finish check (ADR 0128).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain

from xpyd_core.errors import UserError, XpydError
from xpyd_core.request_id import TransferKey
from xpyd_kv.values import OfferedPrompt
from xpyd_worker.engine.core import Deliver
from xpyd_worker.engine.executor import LayerExperts, sum_by_layer
from xpyd_worker.engine.request import (
    ChoiceOutput,
    EngineOutput,
    EngineRequest,
    EngineStats,
    summed,
)
from xpyd_worker.load.engine import LoadedEngine
from xpyd_worker.load.replica import Replica, close_replicas, drain_kv
from xpyd_worker.load.replicated_kv import ReplicatedKv
from xpyd_worker.ranks.loss import Loss, RankLostError
from xpyd_worker.ranks.world import World
from xpyd_worker.replicas.choice import FrontEnd
from xpyd_worker.replicas.coordinator import Statistics
from xpyd_worker.replicas.lock_step import LockStep

_log = logging.getLogger(__name__)
LoadOne = Callable[[int, Deliver, str], LoadedEngine]
"""Load the replica of a number, whose outputs go to a Deliver, as the start of an incarnation."""
LetGo = Callable[[float], Future[None]]
"""Have the routers let go of the replicas that leave: over when they have, or have had so many
seconds. Cancelled, it ends."""
_LOOK_S = 0.1
_END_S = 30.0
"""The time for an engine to end what it has: it may be in a forward with others."""
_KV_CLOSE_S = 2.0
_GAUGES = frozenset({"running", "waiting", "blocks_total", "blocks_free", "kv_leases"})


class ReplicatedEngine:
    """All replicas as one engine, with the methods of EngineCore that a server calls. Any thread.

    `load_one` is called for each replica at the start, and for one that was lost; `changed`, on any
    thread, when a replica serves no more, or again.
    """

    def __init__(
        self,
        size: int,
        load_one: LoadOne,
        deliver: Deliver,
        lock_step: LockStep | None = None,
        changed: Callable[[], None] = lambda: None,
        world: World | None = None,
        *,
        may_outlive: bool = False,
    ) -> None:
        """`lock_step`, `world`: where the replicas share experts. It owns the first from now on.
        `may_outlive`: these go on where one of them is lost, and it comes again (ADR 0129)."""
        self.replicas = [Replica(number) for number in range(size)]
        self.kv = ReplicatedKv(
            lambda: [one.loaded.kv for one in self.replicas if one.loaded is not None]
        )
        self._load_one = load_one
        self._changed = changed
        self._known_serving = frozenset[int](range(size))
        """The replicas that served when `changed` was called last."""
        self._deliver = deliver
        self._front_end = FrontEnd(size)
        self.lock_step, self._world = lock_step, world
        self._outlives = lock_step is None or may_outlive
        self._changing = threading.Lock()
        """Held where replicas come or go, and where one that shares experts comes again."""
        self._lock = threading.RLock()
        """Guards who has which request: the loop submits, the engines' threads end requests. An
        engine that has ended gives its answer to a request while that is sent."""
        self._of: dict[str, Replica] = {}
        self._past = EngineStats()
        """The counters of engines that are gone: sums must not go down."""
        self._past_experts: list[LayerExperts] = []
        self.scalings = 0
        """How often replicas have come or gone."""
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="replicas", daemon=True)

    # --- start and end

    def load(self) -> None:
        """Load all, beside each other. Raises what the first raises that cannot; none is left."""
        try:
            self._load_all(self.replicas)
        except BaseException:
            self.close(engine_s=0.0, kv_s=0.0)
            raise

    def _load_all(self, replicas: Sequence[Replica]) -> None:
        with ThreadPoolExecutor(len(replicas), "load-replica") as pool:
            loads = [pool.submit(self._load, replica) for replica in replicas]
        errors = [error for load in loads if (error := load.exception()) is not None]
        if errors:
            # What the user can mend comes before what followed from it on other replicas.
            raise next((one for one in errors if isinstance(one, UserError)), errors[0])

    def _load(self, replica: Replica) -> LoadedEngine:
        incarnation = os.urandom(8).hex()
        loaded = self._load_one(replica.number, partial(self._take, replica), incarnation)
        replica.incarnation, replica.loaded = incarnation, loaded
        return loaded

    def start(self) -> None:
        """Start the engines, and keep them alive from now on."""
        if self.lock_step is not None:
            self.lock_step.start(self.take)
        for replica in self.replicas:
            self._start(replica)
        if self._outlives:
            self._keeper.start()

    def _start(self, replica: Replica) -> None:
        assert replica.loaded is not None, "loaded before"
        replica.since_s = time.monotonic()
        replica.loaded.start()

    def close(self, *, engine_s: float, kv_s: float) -> None:
        """End all of them. One that is just loaded ends with the process."""
        self._closing.set()
        if self._keeper.ident is not None:
            self._keeper.join(engine_s)
        if self.lock_step is not None:
            # Under the lock that a request is sent under: none comes behind it.
            with self._lock:
                self.lock_step.begin_end(self.is_idle)
        # Beside each other: in lock step none can end before all have been asked to.
        loaded = [one.loaded for one in self.replicas if one.loaded is not None]
        with ThreadPoolExecutor(len(self.replicas), "close-replica") as pool:
            closes = [pool.submit(one.close, engine_s=engine_s, kv_s=kv_s) for one in loaded]
        if self.lock_step is not None:
            self.lock_step.close(engine_s)
        for close in closes:
            close.result()

    @property
    def size(self) -> int:
        """How many replicas there are that stay; one that is lost comes again."""
        return sum(not one.is_leaving for one in self.replicas)

    def scale(self, size: int, *, drain_s: float, let_go: LetGo) -> int:
        """Have `size` replicas, at least one: load more, or let go of the last ones, whose requests
        and KV have `drain_s` to end. Those that stay go on meanwhile. Returns, when it is done, how
        many requests were cut. Raises what the load of a replica raises, and nothing has changed
        then; UserError when the instance ends, and at once where replicas come or go. Blocks."""
        if self.lock_step is not None and len(self.lock_step.replicas) < len(self.replicas):
            raise UserError("a replica that was lost comes again: try again when it has")
        if not self._changing.acquire(blocking=False):
            raise UserError("replicas come or go just now: try again when they have")
        try:
            have = len(self.replicas)
            if size > have:
                self._grow([Replica(number) for number in range(have, size)])
                return 0
            return self._shrink(self.replicas[size:], drain_s, let_go) if size < have else 0
        finally:
            self._changing.release()

    def _grow(self, more: Sequence[Replica]) -> None:
        try:
            meeting = self._begin(more)
            self._load_all(more)
            for replica in more:
                self._start(replica)
            self._enter(more, meeting)
            with self._lock:
                if self._closing.is_set():
                    raise UserError("the instance ends")
                self._have([*self.replicas, *more])
        except BaseException:
            # One of them may have started: its KV port has to be free for the next try.
            close_replicas(more, engine_s=_END_S, kv_s=_KV_CLOSE_S)
            raise
        self.scalings += 1
        _log.info("%d replicas serve", self.size)

    def _begin(self, more: Sequence[Replica]) -> int:
        """These are to come, with the change of this number. UserError, where they are too many."""
        if self._world is None or self.lock_step is None:
            return 0
        return self._world.begin((*self.lock_step.replicas, *(one.number for one in more)))

    def _enter(self, more: Sequence[Replica], meeting: int) -> None:
        """Have those that are loaded make forwards with the others, where these share experts.
        UserError, where one of these was lost meanwhile."""
        if self._world is not None and self.lock_step is not None:
            for replica in more:
                replica.check_well()
            # First: from when it is accepted on their loss is the loss of all.
            self._world.admit()
            try:
                self.lock_step.resize(meeting, self._world.replicas)
            except UserError:
                self._world.leave(self.lock_step.replicas)
                raise

    def _shrink(self, leaving: Sequence[Replica], drain_s: float, let_go: LetGo) -> int:
        self._mark(leaving, is_leaving=True)
        end_s = time.monotonic() + drain_s
        asked = let_go(drain_s)
        try:
            self._wait(asked.done, end_s)
        finally:
            asked.cancel()
        self._mark(leaving, is_leaving=True, is_closed=True)
        if self._world is None:
            drain_kv(leaving)
        # KV moves beside the change that lock step needs.
        self._wait_idle(leaving, end_s, of_kv=self._world is None)
        if cut := sum(len(replica.open) for replica in leaving):
            _log.warning("%d requests are cut: %d replicas leave", cut, len(leaving))
        size = len(self.replicas) - len(leaving)
        if self._world is not None and self.lock_step is not None:
            self._part(leaving, size, self._world, self.lock_step)
            drain_kv(leaving)
            self._wait_idle(leaving, end_s)
        elif not any(one.serving for one in self.replicas[:size]):
            self._mark(leaving, is_leaving=False)
            raise UserError("none of the replicas that stay serves: try again when one does")
        with self._lock:
            self._have(self.replicas[:size])
        for replica in leaving:
            if replica.loaded is not None:
                self._let_go(replica.loaded)
        self._look()
        self.scalings += 1
        _log.info("%d replicas serve", size)
        return cut

    def _part(
        self, leaving: Sequence[Replica], size: int, world: World, lock_step: LockStep
    ) -> None:
        """Have those that leave make no forward with the others any more. Where that cannot be they
        serve again, so none was drained before."""
        for replica in leaving:
            if replica.loaded is not None:
                replica.loaded.engine.end_requests()
        try:
            if not self._wait_idle(leaving, time.monotonic() + _END_S, of_kv=False):
                raise UserError("requests of the replicas that leave do not end; they stay")
            left = tuple(number for number in lock_step.replicas if number < size)
            lock_step.resize(world.begin(left), left)
        except BaseException:
            self._mark(leaving, is_leaving=False)
            raise
        world.leave(left)

    def _mark(
        self, replicas: Sequence[Replica], *, is_leaving: bool, is_closed: bool = False
    ) -> None:
        with self._lock:
            for replica in replicas:
                replica.is_leaving, replica.is_closed = is_leaving, is_closed

    def _wait_idle(self, replicas: Sequence[Replica], end_s: float, *, of_kv: bool = True) -> bool:
        """Until none of them has requests, nor KV with `of_kv`, or that time; whether none has."""
        return self._wait(
            lambda: not any(one.is_busy if of_kv else one.open for one in replicas), end_s
        )

    def _wait(self, holds: Callable[[], bool], end_s: float) -> bool:
        """Until it holds, or that time; whether it does. UserError when the instance ends."""
        while not (is_so := holds()) and time.monotonic() < end_s:
            if self._closing.wait(_LOOK_S):
                raise UserError("the instance ends")
        return is_so

    def _have(self, replicas: list[Replica]) -> None:
        """The list is replaced, never changed: whoever goes through it has one of both."""
        self.replicas = replicas
        self._front_end = FrontEnd(len(replicas))

    def _keep(self) -> None:
        """Start again what was lost, until the last one is: then the instance ends."""
        while not self._closing.wait(_LOOK_S):
            self._look()
            for replica in self.replicas:
                loaded = replica.loaded
                is_lost = loaded is not None and replica.serving is None
                # Asked last: the last one that is lost stays where `loss` finds it.
                if not self._serves:
                    return
                # One that leaves is let go of by who sent it away.
                if loaded is not None and is_lost and not replica.is_leaving:
                    self._give_up(replica, loaded)
                if replica.loaded is None and not (self._closing.is_set() or replica.is_leaving):
                    self._start_again(replica)

    def _look(self) -> None:
        """Say it where other replicas serve than before."""
        serving = frozenset(one.number for one in self.replicas if one.serving is not None)
        if serving != self._known_serving:
            self._known_serving = serving
            self._changed()

    def _give_up(self, replica: Replica, lost: LoadedEngine) -> None:
        why = lost.loss.text if lost.loss is not None else repr(lost.engine.failure)
        _log.error("replica %d was lost: %s", replica.number, why)
        self._let_go(lost)
        replica.count_loss(has_served=True)

    def _let_go(self, gone: LoadedEngine) -> None:
        """Close it, and keep what it counted."""
        gone.close(engine_s=_END_S, kv_s=_KV_CLOSE_S)
        self.kv.retire(gone.kv)
        past = replace(gone.stats(), **dict.fromkeys(_GAUGES, 0))
        with self._lock:
            self._past = summed((self._past, past))
            self._past_experts = sum_by_layer([*self._past_experts, *gone.ready.experts_chosen()])

    def _start_again(self, replica: Replica) -> None:
        if not replica.is_due:
            return
        try:
            with nullcontext() if self.lock_step is None else self._changing:
                if self.lock_step is not None:
                    self.lock_step.await_repaired()
                replica.is_coming = self.lock_step is not None
                meeting = self._begin([replica])
                self._load(replica)
                if replica.is_leaving:
                    raise UserError("it was let go of while it loaded")
                self._start(replica)
                self._enter([replica], meeting)
        except Exception as error:  # the thread's edge: it is tried again
            close_replicas([replica], engine_s=_END_S, kv_s=_KV_CLOSE_S)
            replica.count_loss(has_served=False)
            is_known = isinstance(error, XpydError | RankLostError)
            _log.error("replica %d cannot start: %s", replica.number, error, exc_info=not is_known)
            return
        replica.count_return()
        self._look()
        _log.info("replica %d serves again", replica.number)

    @property
    def failure(self) -> BaseException | None:
        """Why the last engine's thread ended, once none serves."""
        found = [one.loaded.engine.failure for one in self.replicas if one.loaded is not None]
        return None if self._serves else next((one for one in found if one is not None), None)

    @property
    def loss(self) -> Loss | None:
        """Which rank was lost last, once no replica serves; in lock step the first."""
        found = [one.loaded.loss for one in self.replicas if one.loaded is not None]
        return None if self._serves else next((one for one in found if one is not None), None)

    @property
    def _serves(self) -> bool:
        """Whether the instance does: in lock step perhaps only with all replicas."""
        found = [replica.serving is not None for replica in self.replicas]
        return any(found) if self._outlives else all(found)

    # --- requests

    def submit(self, request: EngineRequest) -> None:
        """Queue a request at the replica that its client names, or at the one with the least to do.
        Its last output has `finished` set, whatever happens."""
        with self._lock:
            self._front_end.publish([replica.counts() for replica in self.replicas])
            number = self._front_end.pick() if request.replica is None else request.replica
            # Replicas may have become fewer since the request's header was read.
            is_there = number is not None and number < len(self.replicas)
            replica = self.replicas[number] if number is not None and is_there else None
            is_open = not (replica is None or replica.is_closed or self._closing.is_set())
            serving = replica.serving if replica is not None and is_open else None
            if replica is not None and serving is not None:
                replica.open.add(request.request_id)
                self._of[request.request_id] = replica
                if self.lock_step is not None:
                    self._send(self.lock_step, request, replica.number, serving)
                    return
        if serving is not None:
            serving.engine.submit(request)
            return
        choices = tuple(ChoiceOutput(choice, (), "error") for choice in range(request.n))
        text = "no replica takes requests" if number is None else f"replica {number} is gone"
        last = EngineOutput(
            request.request_id, choices, finished=True, error=text, error_kind="replica_lost"
        )
        self._deliver([last])

    def _send(
        self, lock_step: LockStep, request: EngineRequest, replica: int, to: LoadedEngine
    ) -> None:
        wave = self._front_end.wave
        to.engine.submit(request, wave=wave)
        if self._front_end.send(replica):
            lock_step.ask(wave)

    def take(self, statistics: Statistics) -> None:
        """The coordinator of a lock step publishes. Its thread."""
        with self._lock:
            # What was published while there were fewer replicas says nothing of those that came.
            if len(statistics.counts) >= len(self.replicas):
                self._front_end.take(statistics)

    def abort(self, request_id: str, choices: tuple[int, ...] | None = None) -> None:
        """End a request or some of its choices; as EngineCore.abort."""
        with self._lock:
            replica = self._of.get(request_id)
            if choices is None and replica is not None:
                self._forget(request_id)
        serving = None if replica is None else replica.serving
        if serving is not None:
            serving.engine.abort(request_id, choices)

    def _forget(self, request_id: str) -> None:
        replica = self._of.pop(request_id, None)
        if replica is not None:
            replica.open.discard(request_id)

    def _take(self, replica: Replica, outputs: Sequence[EngineOutput]) -> None:
        """Outputs of a replica, on its engine's thread."""
        if replica.serving is None or replica.is_leaving:
            self._look()
            # Also where the engine ends in order, after its ranks: another replica can serve it.
            outputs = [
                replace(one, error_kind="replica_lost") if one.error_kind == "internal" else one
                for one in outputs
            ]
        with self._lock:
            for one in outputs:
                if one.finished:
                    self._forget(one.request_id)
        self._deliver(outputs)

    def kv_offered(self, key: TransferKey) -> OfferedPrompt | None:
        """What P offers a D under `key`, on whichever replica."""
        offers = (one.engine.kv_offered(key) for one in self._all_serving)
        return next((offer for offer in offers if offer is not None), None)

    def kv_release(self, uuid: str) -> None:
        """The router gave a request up; the replica that has KV for it frees it."""
        for one in self._all_serving:
            one.engine.kv_release(uuid)

    @property
    def _all_serving(self) -> list[LoadedEngine]:
        return [one for replica in self.replicas if (one := replica.serving) is not None]

    def reset_prefix_cache(self, done: Callable[[bool], None]) -> None:
        """Forget cached prefixes on all replicas; `done` gets whether none is left on any."""
        serving = self._all_serving
        results: list[bool] = []

        def one_done(success: bool) -> None:
            with self._lock:
                results.append(success)
                is_last = len(results) == len(serving)
            if is_last:
                done(all(results))

        if not serving:
            done(False)
        for loaded in serving:
            loaded.engine.reset_prefix_cache(one_done)

    def stats(self) -> EngineStats:
        """The counters and gauges of all replicas."""
        serving = [one.stats() for replica in self.replicas if (one := replica.loaded) is not None]
        return summed((self._past, *serving))

    def experts_chosen(self) -> list[LayerExperts]:
        """By layer, on all replicas."""
        loaded = [one.loaded for one in self.replicas if one.loaded is not None]
        chosen = chain.from_iterable(one.ready.experts_chosen() for one in loaded)
        return sum_by_layer([*self._past_experts, *chosen])

    def is_idle(self) -> bool:
        """No request is queued or running on any replica."""
        return all(one.serving is None or one.serving.engine.is_idle() for one in self.replicas)

"""Real engines in lock step, their coordinator and their threads; what computes is a fake.

The k-th forward of a replica ends when all replicas have launched theirs, as with experts that they
share. A replica that does not come within DEADLINE_S is what a hang is here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from tests.worker.engine_driver import make_request
from tests.worker.engine_fakes import BLOCK, EOS, FakeExecutor, alone
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.core import Deliver, EngineCore
from xpyd_worker.engine.executor import Finished, Resize, Running, StepInput, StepOutput
from xpyd_worker.engine.inbox import Inbox, Item
from xpyd_worker.engine.open_requests import StopRules
from xpyd_worker.engine.request import EngineOutput, EngineRequest, EngineStats, SchedulerConfig
from xpyd_worker.kv.engine import Kv
from xpyd_worker.load.engine import LoadedEngine
from xpyd_worker.load.replicas import ReplicatedEngine
from xpyd_worker.ranks.loss import Loss, RankLostError
from xpyd_worker.replicas.lock_step import FinishCheck, LockStep, Member, Reduce

DEADLINE_S = 20.0
MODEL_LEN = 400
BLOCKS = 256


class Forwards:
    """Where the forwards of all replicas meet. `launched`: how many each has launched; `hold`: what
    keeps a replica from its next one, `sees`: what looks at its step, on its engine's thread."""

    def __init__(self, replicas: int, deadline_s: float) -> None:
        self.launched = [0] * replicas
        self.hold: Callable[[int], None] = lambda _: None
        self.sees: Callable[[int, StepInput], None] = lambda *_: None
        self._deadline_s = deadline_s
        self._is_over = False
        self._changed = threading.Condition()
        self._meeting = 0
        self._gone: set[int] = set()
        self._epoch = self._base = 0
        self._broken: dict[int, tuple[int, frozenset[int]]] = {}

    def launch(self, replica: int, resize: Resize | None) -> tuple[int, int]:
        """The number of its forward, among those that no loss has ended."""
        self.hold(replica)
        with self._changed:
            if resize is not None:
                self._resize(replica, resize)
            self.launched[replica] += 1
            self._changed.notify_all()
            return self.launched[replica], self._epoch

    def _resize(self, replica: int, resize: Resize) -> None:
        """All come with the same forward, behind as many as any other has made."""
        if resize.meeting > self._meeting:
            self._meeting = resize.meeting
            if resize.is_repair:
                self._epoch += 1
                self._base = max(self.launched)
                self._gone |= {*range(len(self.launched))} - {*resize.replicas}
            else:
                in_step = {self.launched[one] for one in self.there}
                assert len(in_step) == 1, self.launched
                more = max(0, max(resize.replicas) + 1 - len(self.launched))
                self.launched += [0] * more
                for one in {*resize.replicas} - {*self.there[: len(self.there) - more]}:
                    self.launched[one] = max(in_step)
                self._gone -= {*resize.replicas}
        if resize.is_repair:
            self.launched[replica] = self._base
        if replica not in resize.replicas:
            self._gone.add(replica)

    def lose(self, replica: int, unlucky: frozenset[int]) -> None:
        """It makes no forward any more; `unlucky` ones do not get all of its last one."""
        with self._changed:
            self._broken[self._epoch] = (self.launched[replica] + 1, unlucky)
            self._changed.notify_all()

    @property
    def there(self) -> list[int]:
        """Replicas that have not gone."""
        return [one for one in range(len(self.launched)) if one not in self._gone]

    def _slowest(self) -> int:
        return min(self.launched[one] for one in self.there)

    def meet(self, number: int, epoch: int, replica: int) -> bool:
        """Wait until all have launched that one; False where it broke."""

        def broke() -> bool:
            first, unlucky = self._broken.get(epoch, (number + 2, frozenset()))
            return number >= first or (number + 1 == first and replica in unlucky)

        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_over or broke() or epoch < self._epoch or self._slowest() >= number
                ),
                self._deadline_s,
            )
            if broke():
                return False
            if epoch == self._epoch and self._slowest() < number:
                raise RuntimeError(f"forward {number} hangs: {self.launched} were launched")
        return True

    def end(self) -> None:
        """The ranks are killed."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


@dataclass(frozen=True)
class Met:
    """A forward under way."""

    executor: MetExecutor
    number: tuple[int, int]
    running: Running

    def wait(self) -> StepOutput:
        executor, number = self.executor, self.number
        while not executor.forwards.meet(*number, executor.replica):
            executor.check_lost()
            repair = executor.await_repair()
            number = executor.forwards.launch(executor.replica, repair)
            executor.made_again += 1
        self.executor.under_way -= 1
        return self.running.wait()


class MetExecutor:
    """The fake executor of a replica whose forwards meet those of the others. `dummies` counts."""

    def __init__(self, inner: FakeExecutor, forwards: Forwards, replica: int) -> None:
        self.inner, self.num_blocks = inner, inner.num_blocks
        self.depth, self.draws_ahead = inner.depth, inner.draws_ahead
        self.dummies = self.under_way = self.most_under_way = 0
        self.forwards, self.replica = forwards, replica
        self.await_repair: Callable[[], Resize] = lambda: Resize(0, ())
        self.is_lost, self.made_again = False, 0

    def check_lost(self) -> None:
        if self.is_lost:
            raise RankLostError("a rank was ended by SIGKILL")

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> Running:
        self.check_lost()
        if step.sequences:
            running = self.inner.launch(step, layer_done)
        else:
            running = Finished(StepOutput({}, {}))
            self.dummies += 1
        self.forwards.sees(self.replica, step)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        return Met(self, self.forwards.launch(self.replica, step.resize), running)

    def await_oldest(self, awake: int) -> bool:
        return True


class LosingInbox(Inbox):
    """Loses the items that `loses` says."""

    loses: Callable[[Item], bool] = staticmethod(lambda _: False)

    def put(self, item: Item) -> bool:
        return True if self.loses(item) else super().put(item)


class Engine:
    """What ReplicatedEngine has of a LoadedEngine."""

    def __init__(self, core: EngineCore) -> None:
        self.engine = core
        self.loss: Loss | None = None
        self.is_closed = False
        self.kv = Kv()
        self.ready = SimpleNamespace(experts_chosen=list)

    def start(self) -> None:
        self.engine.start()

    def close(self, *, engine_s: float, kv_s: float) -> None:
        self.engine.stop(engine_s)
        self.is_closed = not self.engine.is_running

    def stats(self) -> EngineStats:
        return self.engine.stats()


class World:
    """What ReplicatedEngine has of the ranks' world."""

    def __init__(self, replicas: int) -> None:
        self.replicas, self.meeting = tuple(range(replicas)), 0
        self.members = {*self.replicas}

    def begin(self, replicas: tuple[int, ...]) -> int:
        self.meeting += 1
        self.replicas = replicas
        return self.meeting

    def without(self, replica: int) -> int | None:
        left = tuple(one for one in self.replicas if one != replica)
        self.members.discard(replica)
        return self.begin(left) if replica else None

    def admit(self) -> None:
        """Those that come are in it."""
        self.members |= {*self.replicas}

    def leave(self, left: tuple[int, ...]) -> None:
        self.members &= {*left}


class Instance:
    """`size` replicas behind a ReplicatedEngine."""

    def __init__(
        self,
        size: int,
        *,
        depth: int = 1,
        reduce: Callable[[Reduce], Reduce] = lambda reduce: reduce,
        deadline_s: float = DEADLINE_S,
        outlives: bool = False,
        make_check: Callable[..., FinishCheck] = FinishCheck,
        make_inbox: Callable[[], LosingInbox] = LosingInbox,
    ) -> None:
        """`reduce`: what a test puts around the finish check."""
        check = make_check(size, deadline_s=deadline_s)
        self.fell: list[str] = []
        self.lock_step = LockStep(
            size,
            clock=time.monotonic,
            fell=self._fall,
            reduce=reduce(check.reduce),
            outlives=lambda replica: self.world.without(replica) if outlives else None,
        )
        self._check = check
        self.forwards = Forwards(size, deadline_s)
        self._make_inbox = make_inbox
        self.inboxes = [make_inbox() for _ in range(size)]
        self.executors: list[MetExecutor] = []
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.requests: dict[str, EngineRequest] = {}
        self._depth = depth
        self._changed = threading.Condition()
        # The one that a change of the replicas' number changes.
        self.lock_step._check = check
        self.world = World(size)
        self.engine = ReplicatedEngine(
            *(size, self._load, self._deliver, self.lock_step),
            world=cast("Any", self.world),
            may_outlive=outlives,
        )
        # One after the other: their order is their number.
        for replica in self.engine.replicas:
            self.engine._load(replica)

    def _load(self, replica: int, deliver: Deliver, incarnation: str) -> LoadedEngine:
        limits = SchedulerConfig(8, 32, 1000, True, 0, "fcfs")
        inner = FakeExecutor(BLOCKS, limits, self._depth, draws_ahead=False)
        executor = MetExecutor(inner, self.forwards, replica)
        with self._changed:
            others = [one for one in self.executors if one.replica != replica]
            self.executors = sorted([*others, executor], key=lambda one: one.replica)
        inbox = self._make_inbox() if self.world.meeting else self.inboxes[replica]
        member = self.lock_step.member(replica)
        core = EngineCore(
            cast("Any", executor),
            pool=BlockManager(BLOCKS, block_size=BLOCK, enable_prefix_caching=True),
            inbox=inbox,
            config=limits,
            rules=StopRules((EOS,), MODEL_LEN),
            deliver=deliver,
            lock_step=member,
        )
        executor.await_repair = member.await_repair
        return cast("LoadedEngine", Engine(core))

    @property
    def members(self) -> Sequence[Member]:
        return self.lock_step.members

    def core(self, replica: int) -> EngineCore:
        loaded = self.engine.replicas[replica].loaded
        assert loaded is not None
        return loaded.engine

    def submit(self, name: str, replica: int | None = None, *, tokens: int = 8) -> None:
        first = 1 + len(self.requests)
        prompt = [(first + n) % 37 + 1 for n in range(5)]
        request = make_request(name, prompt, max_tokens=tokens, ignore_eos=True)
        object.__setattr__(request, "replica", replica)
        self.requests[name] = request
        self.engine.submit(request)

    def scale(self, size: int, *, drain_s: float = 0.0) -> int:
        """As the engine's; there are no routers."""
        over: Future[None] = Future()
        over.set_result(None)
        return self.engine.scale(size, drain_s=drain_s, let_go=lambda _: over)

    def lose(self, replica: int, unlucky: frozenset[int] = frozenset()) -> None:
        """A rank of it is killed."""
        loaded = cast("Any", self.engine.replicas[replica].loaded)
        executor = next(one for one in self.executors if one.replica == replica)
        executor.is_lost = True
        loaded.loss = Loss("a rank was ended by SIGKILL", 11)
        self.forwards.lose(replica, unlucky)
        if not self.lock_step.lose(replica):
            self.lock_step.fail("a rank was ended by SIGKILL")
            self._fall("a rank was ended by SIGKILL")

    def _fall(self, text: str) -> None:
        """As the ranks' world does."""
        self.fell.append(text)
        self.forwards.end()
        self._check.fail(text)

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        with self._changed:
            for one in outputs:
                self.outputs.setdefault(one.request_id, []).append(one)
            self._changed.notify_all()

    def is_finished(self, name: str) -> bool:
        return any(one.finished for one in self.outputs.get(name, ()))

    def until(self, holds: Callable[[], bool], *, may_fall: bool = False) -> None:
        """Until an output, or a moment later, makes it true."""
        with self._changed:
            for _ in range(round(2 * DEADLINE_S / 0.01)):
                if holds():
                    return
                assert may_fall or not self.fell, self.fell
                self._changed.wait(0.01)
        raise AssertionError("it did not come to pass")

    def until_finished(self, *names: str) -> None:
        self.until(lambda: all(map(self.is_finished, names)))

    def until_idle(self) -> None:
        """Until the wave is over on all, and the coordinator knows."""
        self.until(lambda: not any(one.in_wave for one in self.members))
        self.until(self.engine.is_idle)

    def assert_as_alone(self, *names: str) -> None:
        for name in names:
            ((tokens, reason),) = alone(self.requests[name], MODEL_LEN)
            parts = [part for one in self.outputs[name] for part in one.choices]
            assert [token.token_id for part in parts for token in part.tokens] == tokens, name
            assert parts[-1].finish_reason == reason

    def assert_in_step(self) -> None:
        """All have made the same number of forwards, in waves of whole checks."""
        assert len(set(self.forwards.launched)) == 1, self.forwards.launched
        assert self.forwards.launched[0] % 24 == 0
        assert [one.dummies for one in self.executors] == [
            member.dummy_forwards for member in self.members
        ]


@contextmanager
def running(size: int, **options: Any) -> Iterator[Instance]:
    """Started; closed, in order where the test has not seen it fall."""
    instance = Instance(size, **options)
    instance.engine.start()
    try:
        yield instance
    finally:
        instance.engine.close(engine_s=DEADLINE_S, kv_s=0.0)

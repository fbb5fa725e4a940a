"""One process: the real connector of its role between a simulated endpoint and engine.

It can be frozen (SIGSTOP: nothing of it runs, its connections stand), die, and leave in order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from tests.kv.kvfakes import FakeKvMemory, FakePool
from tests.kv.simulation.decode import DecodeEngine
from tests.kv.simulation.endpoint import SimEndpoint
from tests.kv.simulation.memory import SourceMemory, WatchedStore
from tests.kv.simulation.prefill import PrefillEngine
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.connector.build import build
from xpyd_kv.transport.api import Handler
from xpyd_kv.wire import messages as wire

if TYPE_CHECKING:
    from tests.kv.simulation.world import World


class Process:
    """`name` is the instance's, `incarnation` this process's."""

    def __init__(self, world: World, name: str, address: Address, starts: int) -> None:
        self.world = world
        self.name = name
        self.address = address
        self.incarnation = f"{name}.{starts}"
        self.role: Literal["P", "D"] = "P" if name.startswith("P") else "D"
        self.is_alive = True
        self.is_leaving = False
        self.frozen_until = 0.0
        self.thawed_at = 0.0
        # When anything of a transfer last happened here; pauses of the process do not count.
        self.activity: dict[TransferKey, float] = {}
        self._pauses: list[tuple[float, float]] = []
        blocks = world.plan.p_blocks if self.role == "P" else world.plan.d_blocks
        layout = world.plan.layout_of(self.role)
        self.pool = FakePool(blocks, layout.block_size)
        self.endpoint: SimEndpoint
        is_p = self.role == "P"
        memory: Any = SourceMemory(blocks, self.pool) if is_p else FakeKvMemory(blocks, layout)
        self.connector = build(
            self.role,
            make_endpoint=self._make_endpoint,
            memory=memory,
            pool=self.pool,
            wake=self._wake,
            settings=world.plan.settings,
            make_store=WatchedStore,  # type: ignore[arg-type]
            clock=world.schedule.clock,
        )
        self.prefill: PrefillEngine | None = None
        self.decode: DecodeEngine | None = None
        if self.role == "P":
            self.prefill = PrefillEngine(self, memory)
            if self.connector.store is not None:
                self.store.on_spilled = world.watch.on_spilled
        else:
            self.decode = DecodeEngine(self, memory)
            self.store.on_given_back = partial(world.watch.on_given_back, self)
            self.store.on_taken = partial(world.watch.on_taken, self)

    def __str__(self) -> str:
        return self.incarnation

    @property
    def store(self) -> WatchedStore:
        """D's, or in mode get P's."""
        assert isinstance(self.connector.store, WatchedStore)
        return self.connector.store

    @property
    def session(self) -> Any:
        """The session behind the endpoint's handler."""
        return self.endpoint.handler.session  # type: ignore[attr-defined]

    @property
    def hello(self) -> wire.Hello:
        return wire.Hello(
            major=1,
            minor=0,
            engine_id=self.name,
            incarnation=self.incarnation,
            role=self.role,
            nonce=bytes(32),
        )

    @property
    def is_frozen(self) -> bool:
        return self.frozen_until > self.world.schedule.now

    def _make_endpoint(self, handler: Handler) -> Any:
        self.endpoint = SimEndpoint(handler, self)
        return self.endpoint

    def _wake(self) -> None:
        engine = self.prefill or self.decode
        if engine is not None:
            engine.wake()

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Of this process: not while it is frozen, never once it is dead."""

        def happen() -> None:
            if not self.is_alive:
                return
            if self.is_frozen:
                self.world.schedule.at(self.frozen_until, happen)
            else:
                event()

        self.world.schedule.at(time, happen)

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.world.schedule.now + seconds, event)

    # --- what befalls it

    def freeze(self, seconds: float) -> None:
        now = self.world.schedule.now
        self.frozen_until = self.thawed_at = max(self.frozen_until, now + seconds)
        self.pause(now, self.frozen_until)

    def pause(self, since: float, until: float) -> None:
        """Between these times its deadlines may be late."""
        self._pauses.append((since, until))

    def exited(self) -> None:
        """It has closed its endpoint and ends."""
        self.world.gone(self)

    # --- for the invariants

    def touched(self, message: Any) -> None:
        if hasattr(message, "uuid"):
            key = TransferKey(message.uuid, message.prompt_index)
            self.activity[key] = self.world.schedule.now

    def idle_s(self, since: float) -> float:
        """Seconds that passed since then, without its pauses."""
        now = self.world.schedule.now
        paused = sum(max(0.0, min(end, now) - max(begin, since)) for begin, end in self._pauses)
        return now - since - paused

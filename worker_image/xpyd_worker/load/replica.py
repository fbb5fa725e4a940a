"""One replica of an instance: its engine while it has one, and the requests that it was given."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from xpyd_core.errors import UserError
from xpyd_worker.load.engine import LoadedEngine
from xpyd_worker.ranks.loss import RankLostError
from xpyd_worker.replicas.coordinator import Counts

_STEADY_S = 60.0
"""A replica that served for so long is started again at once when it is lost."""
_LONGEST_PAUSE_S = 30.0


def pause_s(losses: int) -> float:
    """How long to wait with the start of a replica that was lost, or could not be started, so many
    times without having served for a while."""
    return 0.0 if losses <= 1 else min(_LONGEST_PAUSE_S, 2.0 ** (losses - 2))


@dataclass
class Replica:
    """One replica. `loaded` is None while it is started again; `open` are its requests' ids;
    `is_coming`: it gets no requests, for a step of its own would be none of the others;
    `is_leaving`: it gets none but those that a router had for it; `is_closed`: nor these."""

    number: int
    loaded: LoadedEngine | None = None
    is_coming: bool = False
    is_leaving: bool = False
    is_closed: bool = False
    open: set[str] = field(default_factory=set[str])
    restarts: int = 0
    losses: int = 0
    since_s: float = 0.0
    incarnation: str = ""
    """Of its present start, for the peers of its KV."""

    @property
    def serving(self) -> LoadedEngine | None:
        """Its engine, where it takes requests."""
        return None if self.is_coming or not self._is_well else self.loaded

    @property
    def _is_well(self) -> bool:
        loaded = self.loaded
        return loaded is not None and loaded.loss is None and loaded.engine.failure is None

    def count_loss(self, *, has_served: bool) -> None:
        """It was lost, or could not be started, and is closed."""
        was_steady = has_served and time.monotonic() - self.since_s > _STEADY_S
        self.losses = 1 if was_steady else self.losses + 1
        self.since_s = time.monotonic()
        self.loaded, self.is_coming = None, False

    def count_return(self) -> None:
        """It serves again."""
        self.restarts += 1
        self.is_coming = False

    @property
    def is_due(self) -> bool:
        """Whether its pause is over."""
        return time.monotonic() - self.since_s >= pause_s(self.losses)

    def counts(self) -> Counts | None:
        """Its requests, as the engine's last step saw them; what is not known to run, waits."""
        serving = self.serving
        if serving is None or self.is_leaving:
            return None
        running = min(serving.engine.stats().running, len(self.open))
        return Counts(len(self.open) - running, running)

    @property
    def is_busy(self) -> bool:
        """It has requests, or its engine has."""
        serving = self.serving
        return bool(self.open) or not (serving is None or serving.engine.is_idle())

    def check_well(self) -> None:
        """Raise what it was lost with since it started; UserError where it ended."""
        loss = None if self.loaded is None else self.loaded.loss
        if loss is not None:
            raise RankLostError(loss.text)
        if not self._is_well:
            raise UserError(f"replica {self.number} ended before it served")


def drain_kv(replicas: Sequence[Replica]) -> None:
    """Have them refuse new OFFERs."""
    for replica in replicas:
        if replica.loaded is not None:
            replica.loaded.kv.drain()


def close_replicas(replicas: Iterable[Replica], *, engine_s: float, kv_s: float) -> None:
    """End those that are loaded."""
    for replica in replicas:
        if replica.loaded is not None:
            replica.loaded.close(engine_s=engine_s, kv_s=kv_s)

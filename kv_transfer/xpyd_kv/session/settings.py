"""Deadlines, bounds and choices of transfers, and what all sessions of one process have in common.

Frozen values for both halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from xpyd_kv.memory.api import KvMemory
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.deadlines import Alarm
from xpyd_kv.transport.api import Endpoint
from xpyd_kv.wire import messages as wire

# A peer may ask for a longer lease than ours, not for one without end.
MAX_LEASE_S = 600.0


@dataclass(frozen=True)
class KvLimits:
    """All times in seconds of the clock that the sessions get.

    `dial_s`: from OFFER wanted to connection up (connect 2, AUTH 2, slack). `word_s`: how old a
    router's word may be that a peer is dead; instances read it four times a second. `offer_s`:
    OFFER answered by GRANT or LEASE. `lease_s`: how long P keeps blocks for a silent D, and D keeps
    KV that no request expects. `done_s`: COMMIT answered. `cancel_s`: CANCEL answered by CANCELLED,
    else the connection is closed. `probe_s`: a self-test, with its connecting.
    `tombstone_s`: how long an ended key is remembered.
    `max_transfers`: open at once at one D. `ahead_bytes`: DATA given to the endpoint ahead of its
    turn, for each peer, or two frames if they are longer; so much a cancelled transfer may have to
    wait for. Blocks held by computed
    but unfinished transfers are at most `max_held_share` of P's. `hold_s`: how long a step of P's
    engine waits for D at most (PUT).
    """

    dial_s: float = 5.0
    word_s: float = 1.0
    offer_s: float = 5.0
    lease_s: float = 30.0
    done_s: float = 10.0
    cancel_s: float = 5.0
    probe_s: float = 5.0
    tombstone_s: float = 60.0
    max_transfers: int = 4096
    # A few frames: the endpoint asks for the next in the same turn, so more gives no speed.
    ahead_bytes: int = 16 * 1024 * 1024
    max_held_share: float = 0.5
    hold_s: float = 10.0


@dataclass(frozen=True)
class KvSettings:
    """The settings of the sessions and the store, apart from the endpoint's own."""

    limits: KvLimits = field(default_factory=KvLimits)
    frames: FrameLimits = field(default_factory=FrameLimits)
    store: StoreLimits = field(default_factory=StoreLimits)
    mode: wire.Mode = "put_async"
    """P's. D does what P says."""
    engine: str = ""
    """HELLO's `engine`."""


@dataclass(frozen=True, kw_only=True)
class SessionContext:
    """The values that the sessions of one process share. `engine`: all of the cache, `memory`: what
    of it is here; `on_device`: whether that is on a GPU."""

    endpoint: Endpoint
    memory: KvMemory
    engine: EngineLayout
    on_device: bool = False
    settings: KvSettings = field(default_factory=KvSettings)
    clock: Callable[[], float]
    alarm: Alarm = field(default_factory=Alarm)

"""Fleets and policies for tests of who is chosen."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from tests.router.beats import beat
from xpyd_core.messages import Heartbeat
from xpyd_router.fleet.instances import InstanceKey, Snapshot
from xpyd_router.fleet.loads import Load, LoadTable
from xpyd_router.fleet.registry import Registry
from xpyd_router.policy.base import Want
from xpyd_router.policy.pairs import Alone, Pair, PairPolicy, build_policy

_hosts = itertools.count(1)


def snapshot(*beats: Heartbeat) -> Snapshot:
    """The fleet of `beats`."""
    registry = Registry(period_s=3.0, missed_beats=3)
    for one in beats:
        registry.apply(one, now=0.0)
    return registry.snapshot


def some(kind: str, count: int, **fields: Any) -> list[Heartbeat]:
    """Beats of `count` different instances, in the order of their addresses."""
    beats = [beat(kind, host=next(_hosts), **fields) for _ in range(count)]
    return sorted(beats, key=lambda one: one.http_address)


def make_policy(
    name: str = "RoundRobin",
    *,
    loads: LoadTable | None = None,
    draw: Callable[[], float] | None = None,
    local_prefill_tokens: int = 0,
    **names: Any,
) -> PairPolicy:
    """As the router makes it; chance is seeded."""
    return build_policy(
        name,
        local_prefill_tokens=local_prefill_tokens,
        loads=LoadTable() if loads is None else loads,
        random=draw or random.Random(7).random,
        **names,
    )


class Bench:
    """`ps` and `ds` instances, their loads, and a policy that picks among them."""

    def __init__(self, ps: int, ds: int, policy: str, *, a: int = 0, **config: Any) -> None:
        self.p = some("P", ps, continuation=1)
        self.d = some("D", ds, continuation=1)
        self.a = some("A", a, continuation=1)
        self.loads = LoadTable()
        for one in (*self.p, *self.d, *self.a):
            self.loads.take(key_of(one), one)
        self.policy = make_policy(policy, loads=self.loads, **config)
        self.snapshot = snapshot(*self.p, *self.d, *self.a)

    def load(self, one: Heartbeat) -> Load:
        """Of the instance that beats so."""
        return self.loads.of(key_of(one))

    def pair(self, want: Want | None = None) -> Pair:
        """The next choice, which must be a pair."""
        choice = self.policy.pick(self.snapshot, want or Want("m"))
        assert isinstance(choice, Pair)
        return choice

    def p_index(self, want: Want | None = None) -> int:
        """Which of the Ps is chosen next."""
        return self.p.index(self.pair(want).prefill.beat)

    def d_index(self, want: Want | None = None) -> int:
        """Which of the Ds is chosen next."""
        return self.d.index(self.pair(want).decode.beat)

    def alone(self, want: Want | None = None) -> Alone:
        """The next choice, which must be one instance."""
        choice = self.policy.pick(self.snapshot, want or Want("m"))
        assert isinstance(choice, Alone)
        return choice


def key_of(one: Heartbeat) -> InstanceKey:
    """The key of the instance that beats so."""
    return InstanceKey(one.http_address, one.incarnation)

"""keep(): the processes that one workload should have, as a Deployment's controller would decide.

Ordinals are stable: an instance keeps its number, and with it its address, through restarts. A new
one takes the lowest free number. Of a scale-down those are the victims that lose least.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from xpyd_operator.plan.values import (
    DrainInstance,
    ForgetInstance,
    InstanceSeen,
    KeepAction,
    KeepPlan,
    KillInstance,
    Probes,
    RestartInstance,
    StartInstance,
    Workload,
)

BACKOFF_FIRST_S = 1.0
BACKOFF_MOST_S = 60.0
FORGIVES_S = 10.0
"""For so long as this an instance lives, one failure in the row before it is forgotten: it is for
one that does not come up, or soon ends, that restarts wait. See docs/adr/0044."""
KILL_GRACE_S = 10.0
"""Time in addition to the drain timeout, which the instance itself obeys."""


def keep(
    workload: Workload,
    seen: Sequence[InstanceSeen],
    now: float,
    *,
    drain_timeout_s: float,
    probes: Probes,
    taken: Collection[int] = (),
) -> KeepPlan:
    """Actions on the workload's instances.

    `probes` are theirs; `taken`: ordinals of the pool's other revisions. At most
    `workload.replicas` instances that were not asked to leave ever live; one that leaves is drained
    before it is killed.
    """
    actions: list[KeepAction] = []
    waits: list[float] = []
    leaving = [i for i in seen if i.draining_since is not None]
    staying = sorted((i for i in seen if i.draining_since is None), key=lambda i: i.ordinal)
    for instance in leaving:
        _end(instance, now, drain_timeout_s, actions, waits)
    victims = sorted(staying, key=_loss)[: max(0, len(staying) - workload.replicas)]
    for victim in victims:
        gone = victim.exited_at is not None
        actions.append(ForgetInstance(victim.ordinal) if gone else DrainInstance(victim.ordinal))
    staying = [instance for instance in staying if instance not in victims]
    for instance in staying:
        _restart(instance, now, probes, actions, waits)
    missing = workload.replicas - len(staying)
    used = {i.ordinal for i in seen} | set(taken)
    actions.extend(StartInstance(ordinal) for ordinal in _lowest_free(used, missing))
    return KeepPlan(tuple(actions), min(waits, default=None))


def _loss(instance: InstanceSeen) -> tuple[bool, bool, int, int]:
    """What it costs to lose the instance, for an order: one that does not live costs nothing, then
    its load counts, then a high number goes before a low one."""
    has_lived = instance.lived_at is not None
    return instance.exited_at is None, has_lived, instance.load, -instance.ordinal


def backoff_s(instance: InstanceSeen) -> tuple[float, int]:
    """How long an exited instance waits for its restart, and its number of failures in a row. One
    that worked is started again at once the first time, as by a kubelet."""
    assert instance.exited_at is not None
    lived_s = 0.0 if instance.lived_at is None else instance.exited_at - instance.lived_at
    failures = max(0, instance.failures - int(lived_s / FORGIVES_S)) + 1
    if failures == 1 and instance.lived_at is not None:
        return 0.0, failures
    # The exponent is capped too: 2.0 ** 2000 is an OverflowError.
    return min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2.0 ** min(failures - 1, 16)), failures


def _end(
    instance: InstanceSeen,
    now: float,
    drain_timeout_s: float,
    actions: list[KeepAction],
    waits: list[float],
) -> None:
    assert instance.draining_since is not None
    left_s = instance.draining_since + drain_timeout_s + KILL_GRACE_S - now
    if instance.exited_at is not None:
        actions.append(ForgetInstance(instance.ordinal))
    elif left_s > 0:
        waits.append(left_s)
    elif not instance.killed:
        actions.append(KillInstance(instance.ordinal))


def _restart(
    instance: InstanceSeen,
    now: float,
    probes: Probes,
    actions: list[KeepAction],
    waits: list[float],
) -> None:
    if instance.exited_at is None:
        probe = probes.now(instance)
        if instance.failed_probes >= probe.failures and not instance.killed:
            actions.append(RestartInstance(instance.ordinal, probe))
        return
    delay_s, failures = backoff_s(instance)
    left_s = instance.exited_at + delay_s - now
    if left_s > 0:
        waits.append(left_s)
    else:
        actions.append(StartInstance(instance.ordinal, failures))


def _lowest_free(used: Collection[int], count: int) -> Iterable[int]:
    ordinal = 0
    while count > 0:
        if ordinal not in used:
            count -= 1
            yield ordinal
        ordinal += 1

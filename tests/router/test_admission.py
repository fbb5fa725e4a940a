"""Admission with tasks: handover, deadlines, clients that leave. In virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random

import msgspec
import pytest

from tests.router.virtual_time import pending_timers, run_virtually
from xpyd_core.errors import ApiError
from xpyd_router.admission import (
    PRIORITY_HEADER,
    Admission,
    AdmissionLimits,
    Row,
    Ticket,
    read_priority,
)
from xpyd_router.fair_queue import Cost
from xpyd_router.metrics import RouterMetrics

pytestmark = pytest.mark.usefixtures("virtual_loop")


def admission(limits: AdmissionLimits, *others: Row) -> tuple[Admission, RouterMetrics]:
    metrics = RouterMetrics()
    clock = asyncio.get_running_loop().time
    return Admission(limits, metrics, clock, others=others), metrics


def sample(metrics: RouterMetrics, line: str) -> float:
    text = metrics.render(()).decode()
    return next(float(row.split()[-1]) for row in text.splitlines() if row.startswith(line + " "))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def refusal(task: asyncio.Task[Ticket]) -> tuple[int, str | None, int | None]:
    with pytest.raises(ApiError) as caught:
        await task
    return caught.value.status, caught.value.code, caught.value.retry_after_s


async def test_a_place_is_had_without_giving_up_the_turn():
    door, metrics = admission(AdmissionLimits(requests=1))
    coroutine = door.enter(Cost(1, 7))
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    ticket: Ticket = done.value.value
    assert door.in_flight == Cost(1, 7)
    assert sample(metrics, "xpyd_router_tokens_in_flight") == 7
    assert ticket.queue_s == 0.0
    ticket.leave()
    ticket.leave()
    assert door.in_flight == Cost(0, 0), "the second leave gives nothing back"


async def test_a_request_larger_than_the_limit_runs_alone():
    door, _ = admission(AdmissionLimits(tokens=100))
    small = await door.enter(Cost(1, 1))
    large = asyncio.create_task(door.enter(Cost(1, 5000)))
    await settle()
    small.leave()
    ticket = await large
    assert door.in_flight == Cost(1, 100)
    ticket.leave()
    assert door.in_flight == Cost(0, 0)


async def test_waiters_go_in_order_of_priority_and_then_of_arrival():
    door, metrics = admission(AdmissionLimits(requests=1))
    order: list[str] = []

    async def request(name: str, priority: int) -> None:
        ticket = await door.enter(Cost(), priority=priority)
        order.append(name)
        await asyncio.sleep(1.0)
        ticket.leave()

    wishes = [("first", 0), ("a", 1), ("b", 0), ("c", 1), ("d", -3), ("e", 0)]
    tasks = [asyncio.create_task(request(*wish)) for wish in wishes]
    await settle()
    assert door.waiting == sample(metrics, "xpyd_router_queue_length") == 5
    await asyncio.gather(*tasks)
    assert order == ["first", "d", "b", "e", "a", "c"]
    assert door.in_flight == Cost(0, 0)
    assert sample(metrics, "xpyd_router_queue_seconds_sum") == 1 + 2 + 3 + 4 + 5
    assert sample(metrics, "xpyd_router_queue_length") == 0


async def test_a_ticket_says_how_long_it_was_waited_for():
    door, _ = admission(AdmissionLimits(requests=1))
    first = await door.enter(Cost())
    waiting = asyncio.create_task(door.enter(Cost()))
    await asyncio.sleep(2.5)
    first.leave()
    assert (await waiting).queue_s == 2.5
    assert pending_timers() == 0, "its deadline is gone"


async def test_a_full_line_answers_429_and_says_when_to_come_again():
    door, metrics = admission(AdmissionLimits(requests=1, queue_entries=1))
    ticket = await door.enter(Cost())
    await asyncio.sleep(4.0)
    ticket.leave()
    await door.enter(Cost())
    waiting = asyncio.create_task(door.enter(Cost()))
    await settle()
    over = asyncio.create_task(door.enter(Cost()))
    assert await refusal(over) == (429, "queue_full", 8)
    assert sample(metrics, 'xpyd_router_rejected_total{reason="full"}') == 1
    waiting.cancel()


async def test_a_higher_priority_takes_the_place_of_the_last_in_a_full_line():
    door, _ = admission(AdmissionLimits(requests=1, queue_entries=1))
    running = await door.enter(Cost())
    batch = asyncio.create_task(door.enter(Cost(), priority=1))
    await settle()
    urgent = asyncio.create_task(door.enter(Cost(), priority=0))
    assert (await refusal(batch))[:2] == (429, "displaced")
    running.leave()
    await urgent


@pytest.mark.parametrize(("deadline_in_s", "waits_s"), [(1000.0, 60.0), (7.0, 7.0), (-1.0, 0.0)])
async def test_a_turn_that_does_not_come_in_time_is_answered_503(
    deadline_in_s: float, waits_s: float
):
    door, metrics = admission(AdmissionLimits(requests=1))
    running = await door.enter(Cost())
    now_s = asyncio.get_running_loop().time()
    late = asyncio.create_task(door.enter(Cost(), deadline_s=now_s + deadline_in_s))
    status, code, retry_after_s = await refusal(late)
    assert (status, code) == (503, "queue_timeout")
    assert retry_after_s is not None
    assert asyncio.get_running_loop().time() - now_s == waits_s
    assert door.waiting == 0
    assert sample(metrics, 'xpyd_router_rejected_total{reason="timeout"}') == 1
    running.leave()
    assert door.in_flight == Cost(0, 0)


async def test_the_deadline_of_the_head_lets_those_behind_go():
    door, _ = admission(AdmissionLimits(tokens=100))
    await door.enter(Cost(1, 50))
    now_s = asyncio.get_running_loop().time()
    large = asyncio.create_task(door.enter(Cost(1, 80), deadline_s=now_s + 3.0))
    await settle()
    small = await door.enter(Cost(1, 50))
    assert small.queue_s == 3.0
    assert (await refusal(large))[1] == "queue_timeout"


async def test_a_client_that_leaves_the_line_is_forgotten_at_once():
    door, _ = admission(AdmissionLimits(tokens=100))
    await door.enter(Cost(1, 50))
    large = asyncio.create_task(door.enter(Cost(1, 80)))
    await settle()
    small = asyncio.create_task(door.enter(Cost(1, 50)))
    await settle()
    large.cancel()
    assert (await small).queue_s == 0.0, "in virtual time: at once"
    assert large.cancelled()
    assert door.waiting == 0


@pytest.mark.parametrize("leaves_first", [True, False], ids=["before", "after"])
async def test_a_place_handed_to_a_client_that_left_goes_to_the_next(leaves_first: bool):
    """The client leaves in the same turn of the loop in which its place comes."""

    door, _ = admission(AdmissionLimits(requests=1))
    running = await door.enter(Cost())
    gone = asyncio.create_task(door.enter(Cost()))
    await settle()
    following = asyncio.create_task(door.enter(Cost()))
    await settle()
    if leaves_first:
        gone.cancel()
        running.leave()
    else:
        running.leave()
        gone.cancel()
    ticket = await following
    assert gone.cancelled()
    ticket.leave()
    assert door.in_flight == Cost(0, 0)


async def test_a_place_that_another_process_gave_back_is_found():
    theirs: Row = [2, 0, 0, 0]
    door, _ = admission(AdmissionLimits(requests=2), theirs)
    waiting = asyncio.create_task(door.enter(Cost()))
    await asyncio.sleep(10.0)
    assert not waiting.done()
    theirs[0] = 1
    assert (await waiting).queue_s < 10.1


def test_every_place_comes_back_whatever_clients_do():
    """Hundreds of requests with random sizes, times, priorities and patience."""

    async def scenario(seed: int) -> None:
        draw = random.Random(seed)
        limits = AdmissionLimits(requests=6, tokens=300, queue_entries=20, queue_timeout_s=8.0)
        door, _ = admission(limits)
        ends = {"served": 0, "refused": 0}

        async def request() -> None:
            await asyncio.sleep(draw.random() * 60)
            cost = Cost(1, draw.choice((1, 20, 120, 500)), 100)
            try:
                ticket = await door.enter(cost, priority=draw.randint(0, 2))
            except ApiError:
                ends["refused"] += 1
                return
            try:
                assert ticket.queue_s <= limits.queue_timeout_s
                assert door.in_flight.requests <= 6
                assert door.in_flight.tokens <= 300
                await asyncio.sleep(draw.random())
                ends["served"] += 1
            finally:
                ticket.leave()

        async def impatient() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(60 * draw.random()):
                    await request()

        await asyncio.gather(*(impatient() for _ in range(600)))
        assert door.in_flight == Cost(0, 0)
        assert door.waiting == 0
        assert min(ends.values()) > 20, "both ends were met"

    for seed in range(5):
        run_virtually(scenario(seed))


def member_of(fields: dict[str, object]) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(fields["priority"]).encode() if fields else b"null")


@pytest.mark.parametrize(
    ("fields", "header", "expected"),
    [
        ({}, None, 0),
        ({"priority": None}, None, 0),
        ({"priority": 7}, None, 7),
        ({"priority": 10**30}, None, 2**63 - 1),
        ({"priority": 7}, "low", 100),
        ({}, " High ", -100),
        ({}, "normal", 0),
        ({}, "-5", -5),
        ({"priority": 7}, "", 7),
    ],
)
def test_the_header_wins_over_the_bodys_priority(
    fields: dict[str, object], header: str | None, expected: int
):
    assert read_priority(member_of(fields), header) == expected


@pytest.mark.parametrize(
    ("fields", "header", "param"),
    [
        ({"priority": True}, None, "priority"),
        ({"priority": "high"}, None, "priority"),
        ({"priority": 1.5}, None, "priority"),
        ({}, "urgent", PRIORITY_HEADER),
        ({}, "9" * 5000, PRIORITY_HEADER),
    ],
)
def test_a_priority_that_is_none_is_refused_by_its_name(
    fields: dict[str, object], header: str | None, param: str
):
    with pytest.raises(ApiError) as caught:
        read_priority(member_of(fields), header)
    assert (caught.value.status, caught.value.param) == (400, param)

"""Fuzzing the discovery port: a few hundred attacks here, minutes of them by `make soak`.

All the while an instance beats; it must stay, nothing may stop, and what is held must not grow.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time

import pytest

from tests.router.discovery_fuzz import ATTACKS, attack
from tests.router.fakes import until
from tests.router.test_router_discovery_port import Port, beat, port

SEED = 20_260_901
_AT_ONCE = 16
_MAX_GROWTH_BYTES = 64 * 1024 * 1024


async def fuzz(made: Port, rounds: int, seed: int) -> None:
    """Attacks, some at once; after each round the good instance's beat is taken."""
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: errors.append(what))
    good = await made.instance()
    for number in range(rounds):
        draws = [random.Random(seed + number * _AT_ONCE + n) for n in range(_AT_ONCE)]
        await asyncio.gather(*(attack(draw, made.discovery.port) for draw in draws))
        taken = made.count("refreshed")
        good.send(beat(running=number))
        await until(lambda taken=taken: made.count("refreshed") > taken)
        assert errors == []
        assert good.is_open
        assert any(i.http.port == 20001 for i in made.fleet.instances)
    await until(lambda: len(made.discovery.beats) == 1)
    assert made.discovery.beats.held_bytes == 0


async def test_attacks_cost_their_own_connections() -> None:
    async with port(handshake_s=2.0, message_s=2.0) as made:
        await fuzz(made, rounds=20, seed=SEED)
        assert made.count("malformed") > 20
        assert made.count("closed") > 20


@pytest.mark.soak
@pytest.mark.patience(600)
async def test_attacks_for_minutes_leave_memory_and_the_instance_as_they_were() -> None:
    async with port(handshake_s=2.0, message_s=2.0) as made:
        await fuzz(made, rounds=50, seed=SEED)
        for client in made.clients:
            client.abort()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        end, seed = time.monotonic() + 120, SEED + 10**6
        while time.monotonic() < end:
            await fuzz(made, rounds=25, seed=seed)
            made.clients.pop().abort()
            await until(lambda: not len(made.discovery.beats))
            seed += 10**6
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        assert grown < _MAX_GROWTH_BYTES, f"seed {SEED}"


def test_every_attack_is_drawn_and_one_without_end_is_among_them() -> None:
    made = {kind.__name__: kind(random.Random(3)) for kind in ATTACKS}
    assert all(made.values())
    assert len(set(made.values())) == len(ATTACKS)

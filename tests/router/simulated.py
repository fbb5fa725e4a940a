"""Engines of known speed in virtual time, under the real policies, loads and observations.

A P computes one prompt after another at its rate; a D makes a token for each of its requests in
every step, and a step takes the longer the more they are. What the router would observe is observed
by its own code; nothing here is random but the seeded requests.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from tests.router.choosing import key_of, make_policy, some
from tests.router.virtual_time import run_virtually
from xpyd_core.messages import Heartbeat
from xpyd_router.fleet.instances import Instance
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView
from xpyd_router.policy.base import NO_SLO, Slo, Want
from xpyd_router.policy.pairs import Pair
from xpyd_router.request.objectives import Objectives
from xpyd_router.request_metrics import InstanceTable, ObjectiveTable

_AT_ONCE = 5
"""Tokens between two looks at how many the others are: a fifth of the events."""


@dataclass
class Speed:
    """Of one engine: what every prompt or step takes, and what each token or request adds."""

    base_s: float
    each_s: float


@dataclass
class Done:
    """What one request met."""

    prompt_tokens: int
    ttft_s: float
    itl_s: float
    prefill: int
    decode: int
    """Whose P and D, by their place."""


@dataclass
class Simulation:
    """`ps` and `ds`: the fleet. `rate`: requests per second, which come at random times."""

    ps: list[Speed]
    ds: list[Speed]
    policy: str
    rate: float
    requests: int = 400
    slo: Slo = NO_SLO
    prompts: tuple[int, ...] = (200, 500, 1000, 4000)
    outputs: tuple[int, ...] = (20, 60, 120)
    seed: int = 1
    done: list[Done] = field(default_factory=list[Done])

    def run(self) -> list[Done]:
        """All requests, in the order of their ends."""
        run_virtually(self._run())
        return self.done

    async def _run(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._p, self._d = some("P", len(self.ps)), some("D", len(self.ds))
        self._loads = LoadTable()
        self._view = FleetView(Registry(period_s=3.0, missed_beats=3), self._clock, self._loads)
        for beat in (*self._p, *self._d):
            self._view.apply(beat)
        self._policy = make_policy(self.policy, loads=self._loads)
        self._figures = InstanceTable(self._clock)
        objectives = Objectives(
            self.slo,
            fleet=self._view,
            loads=self._loads,
            instance_metrics=self._figures,
            table=ObjectiveTable(),
            clock=self._clock,
        )
        self._busy = [asyncio.Lock() for _ in self.ps]
        self._active = [0] * len(self.ds)
        sampling = asyncio.create_task(objectives.run())
        chance = random.Random(self.seed)
        async with asyncio.TaskGroup() as group:
            for _ in range(self.requests):
                prompt, output = chance.choice(self.prompts), chance.choice(self.outputs)
                group.create_task(self._serve(prompt, output))
                await asyncio.sleep(chance.expovariate(self.rate))
        sampling.cancel()

    async def _serve(self, prompt: int, output: int) -> None:
        came_s = self._clock()
        want = Want("m", prompt_tokens=prompt, output_tokens=output, slo=self.slo)
        choice = self._policy.pick(self._view.snapshot, want)
        assert isinstance(choice, Pair)
        tokens = self._policy.placed(choice, want)
        p, d = self._place(self._p, choice.prefill), self._place(self._d, choice.decode)
        prefill, decode = (self._loads.of(one.key) for one in choice)
        decode.begin(prompt, output)
        prefill.begin(tokens)
        waiting = prefill.queued_tokens
        async with self._busy[p]:
            await asyncio.sleep(self.ps[p].base_s + self.ps[p].each_s * tokens)
        prefill.end(tokens)
        ttft_s = self._clock() - came_s
        prefill.pace.first.observe(waiting, ttft_s)
        await self._decode(choice.decode, d, output)
        decode.end(prompt, output)
        itl_s = (self._clock() - came_s - ttft_s) / output
        self.done.append(Done(prompt, ttft_s, itl_s, p, d))

    async def _decode(self, instance: Instance, place: int, output: int) -> None:
        call = self._figures.call(instance, 0)
        self._active[place] += 1
        for _ in range(output // _AT_ONCE):
            speed = self.ds[place]
            await asyncio.sleep(_AT_ONCE * (speed.base_s + speed.each_s * self._active[place]))
            call.streamed(_AT_ONCE, 1)
        self._active[place] -= 1
        call.end()

    def _place(self, beats: list[Heartbeat], instance: Instance) -> int:
        return [key_of(one) for one in beats].index(instance.key)

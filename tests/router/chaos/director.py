"""Does what the script says, as soon as it may be done (script.py has the rules)."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator

from tests.router.chaos.script import Exposure, Fault, Timeline, victims
from tests.router.chaos.world import Mock, World

# A fault that cannot begin for so long: the requests before it hang, or nobody gets well.
_PATIENCE_S = 90.0


class Director:
    """Plays `script` on `world`; `done` counts the faults by kind and role."""

    def __init__(
        self, world: World, script: Iterator[Fault], exposure: Exposure, timeline: Timeline
    ) -> None:
        self._world = world
        self._script = script
        self._exposure = exposure
        self._timeline = timeline
        self._tasks: set[asyncio.Task[None]] = set()
        self.done: Counter[str] = Counter()

    async def play(self, faults: int) -> None:
        """The next `faults` lines of the script, each begun as soon as it may, and all over."""
        for _ in range(faults):
            fault = next(self._script)
            await asyncio.sleep(fault.pause_s)
            victim = await self._victim(fault)
            self._say(f"#{fault.number} {fault.kind} begins", victim)
            victim.fitness.is_well = False
            self._exposure.begin_fault(fault.cost)
            task = asyncio.create_task(self._do(fault, victim))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self.done[f"{fault.kind} {fault.role}"] += 1
        await self.rest()

    async def rest(self) -> None:
        """Until all that was begun is over and everyone is back."""
        if self._tasks:
            await asyncio.gather(*self._tasks)

    async def _victim(self, fault: Fault) -> Mock:
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            for task in self._tasks:
                if task.done():
                    task.result()
            if self._exposure.may_begin(fault.cost):
                await self._world.refresh()
                fit = victims([m.fitness for m in self._world.mocks.values()], fault.role)
                # Requests came while the engines were asked.
                if fit and self._exposure.may_begin(fault.cost):
                    return self._world.mocks[fit[fault.rank % len(fit)].name]
            assert time.monotonic() < deadline_s, (
                f"fault {fault} may not begin for {_PATIENCE_S} s: "
                f"{[m.fitness for m in self._world.mocks.values()]}"
            )
            await asyncio.sleep(0.02)

    async def _do(self, fault: Fault, victim: Mock) -> None:
        match fault.kind:
            case "kill" | "restart" | "freeze_kill":
                await self._kill(fault, victim)
            case "freeze" | "pause":
                await self._freeze(fault, victim)
            case "drain":
                await self._drain(fault, victim)
            case _:
                await self._upset(fault, victim)
        now = self._world.mocks[victim.fitness.name]
        await self._world.until(
            f"{victim.fitness.name} ready after {fault}", lambda: self._world.is_served(now)
        )
        await self._world.become_well(now)
        self._say(f"#{fault.number} {fault.kind} over, back at {now.host}", now)

    async def _kill(self, fault: Fault, victim: Mock) -> None:
        process = victim.process
        if fault.kind == "freeze_kill":
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(fault.lasts_s)
        process.kill()
        await asyncio.to_thread(process.wait, 10)
        if fault.kind == "restart":
            self._world.start(victim.fitness.name, moves=fault.moves)
        await self._until_known(fault, victim)
        if fault.kind != "restart":
            await asyncio.sleep(fault.away_s)
            self._world.start(victim.fitness.name, moves=fault.moves)

    async def _freeze(self, fault: Fault, victim: Mock) -> None:
        victim.process.send_signal(signal.SIGSTOP)
        if fault.kind == "freeze":
            await self._until_known(fault, victim)
            await asyncio.sleep(fault.away_s)
            victim.process.send_signal(signal.SIGCONT)
            return
        await asyncio.sleep(fault.lasts_s)
        victim.process.send_signal(signal.SIGCONT)
        # A call that it failed before may be on its way back to the client still.
        await self._world.until("ready again", lambda: self._world.is_served(victim))
        self._exposure.end_fault(fault.cost)

    async def _until_known(self, fault: Fault, victim: Mock) -> None:
        """Until the router has noticed: nobody meets the fault any more."""

        async def is_known() -> bool:
            return not await self._world.is_ready(victim)

        await self._world.until(f"the router notices {fault}", is_known)
        self._exposure.end_fault(fault.cost)
        self._say(f"#{fault.number} {fault.kind} is known", victim)

    async def _drain(self, fault: Fault, victim: Mock) -> None:
        victim.process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(victim.process.wait, 60)
        assert status == 0, f"{victim.fitness.name} ended with {status}"
        self._exposure.end_fault(fault.cost)
        await asyncio.sleep(fault.away_s)
        self._world.start(victim.fitness.name, moves=fault.moves)

    async def _upset(self, fault: Fault, victim: Mock) -> None:
        mood = {"mode": fault.kind, "chance": 0.7 if fault.rank % 2 else 1.0}
        await self._world.state(victim, mood)
        await asyncio.sleep(fault.lasts_s)
        await self._world.state(victim, {"mode": "well"})
        self._exposure.end_fault(fault.cost)

    def _say(self, what: str, victim: Mock) -> None:
        self._timeline.note(time.time(), f"{victim.fitness.name} at {victim.host}: {what}")

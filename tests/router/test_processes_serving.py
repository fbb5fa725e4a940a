"""A router of several processes as its clients see it: one fleet, one set of limits, one /metrics;
and what becomes of it when a process dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.operator.kube_objects import KEY, RoutersWorld, canary_map, ready_pod
from tests.router.fakes import Call, HttpEngine, serve_model, until
from tests.router.several import Client, Several, children, routed, several, when
from xpyd_core.keys import key_ids
from xpyd_operator.controller.decision.kinds import CONFIG_MAP
from xpyd_operator.status.canary import figures_of
from xpyd_router.admission import AdmissionLimits
from xpyd_router.keys.lines import line_of, new_key

pytestmark = pytest.mark.slow


class Gate:
    """A script that answers when it is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, engine: HttpEngine, call: Call, request: Any) -> Any:
        await self.open.wait()
        return await serve_model(engine, call, request)


async def begin(client: Client, **body: Any) -> asyncio.Task[int]:
    return asyncio.create_task(client.status(**body))


async def with_pair(made: Several) -> tuple[HttpEngine, HttpEngine, list[Client]]:
    p, d = await made.engine("P"), await made.engine("D")
    clients = await made.clients()
    await made.known_to_all(clients)
    return p, d, clients


async def test_every_worker_serves_what_the_parent_heard_of() -> None:
    async with several(2) as made:
        _, d, clients = await with_pair(made)
        assert [await client.status() for client in clients] == [200, 200]
        assert d.served == 2
        await made.beat(d, state="Draining")
        for client in clients:
            await when(lambda c=client: c.has_state(d, "Draining"))


async def test_the_least_loaded_is_so_over_all_workers() -> None:
    async with several(2, policy="LeastLoaded") as made:
        gate = Gate()
        _, first, clients = await with_pair(made)
        first.script = gate
        held = [await begin(await made.client(0)) for _ in range(3)]
        await until(lambda: first.served == 3)
        second = await made.engine("D")
        await made.known_to_all(clients)
        # Worker 1 has sent nothing itself: it knows of the three from worker 0's row.
        for _ in range(3):
            assert await clients[1].status() == 200
        assert (first.served, second.served) == (3, 3)
        gate.open.set()
        assert [await one for one in held] == [200] * 3


async def test_a_limit_holds_for_all_workers_together() -> None:
    async def waits(client: Client, count: int) -> bool:
        return (await client.samples())["xpyd_router_queue_length"] == count

    async with several(2, limits=AdmissionLimits(requests=2, queue_entries=1)) as made:
        gate = Gate()
        _, d, clients = await with_pair(made)
        d.script = gate
        held = [await begin(await made.client(number)) for number in (0, 1)]
        await until(lambda: d.served == 2)
        waiting = await begin(clients[0])
        await when(lambda: waits(clients[1], 1))
        # The line's one place is taken in worker 0: worker 1 has none either.
        assert await (await made.client(1)).status() == 429
        gate.open.set()
        assert [await one for one in (*held, waiting)] == [200] * 3
        assert await clients[1].status() == 200


async def test_metrics_are_the_whole_routers_whoever_is_asked() -> None:
    async with several(2) as made:
        _, _, clients = await with_pair(made)
        for number, client in enumerate(clients):
            for _ in range(number + 1):
                assert await client.status() == 200
        for client in clients:
            found = await client.samples()
            answered = 'xpyd_router_requests_total{endpoint="completions",status="200"}'
            assert found[answered] == 3
            assert found['xpyd_router_request_seconds_count{endpoint="completions"}'] == 3
            assert found['xpyd_router_instances{state="Ready",type="D"}'] == 1
            assert found['xpyd_router_heartbeats_total{result="new"}'] == 2
            assert found["xpyd_router_workers"] == 2
            assert found["xpyd_router_has_pair"] == 1


async def test_a_cordon_reaches_every_worker_before_it_is_answered(tmp_path: Path) -> None:
    keys = tmp_path / "admin.key"
    keys.write_text("k" * 32)

    async with several(3, admin_key_file=keys) as made:
        _, d, clients = await with_pair(made)
        other = await made.engine("D")
        await made.known_to_all(clients)
        head = {"Authorization": "Bearer " + "k" * 32}
        name = f"{made.admin}/admin/instances/{d.beat.http_address}"
        async with clients[0].admin_http.post(f"{name}/cordon", headers=head) as response:
            assert (await response.json())["state"] == "Cordoned"
        for client in clients:
            await when(lambda c=client: c.has_state(d, "Cordoned"))
            assert await client.status() == 200
        assert (d.served, other.served) == (0, 3)
        async with clients[1].admin_http.post(f"{name}/uncordon", headers=head) as response:
            assert response.status == 200
        for client in clients:
            await when(lambda c=client: c.has_state(d, "Ready"))


async def test_what_one_worker_met_all_know() -> None:
    async def is_ejected(client: Client) -> bool:
        return "Ejected" in (await client.states()).values()

    async with several(2) as made:
        _, d, clients = await with_pair(made)
        spare = await made.engine("D")
        await made.known_to_all(clients)
        await d.stop()
        # Some request of worker 0 finds nobody there; then nobody calls it any more.
        while not any([await is_ejected(client) for client in clients[:1]]):
            assert await clients[0].status() == 200
        await when(lambda: is_ejected(clients[1]))
        found = await clients[1].samples()
        assert found['xpyd_router_ejections_total{cause="connect"}'] == 1
        assert spare.served >= 1


async def test_a_killed_worker_takes_only_its_own_requests_with_it_and_is_replaced() -> None:
    def is_replaced(made: Several, pid: int) -> bool:
        return made.workers[0].pid != pid and made.workers[0].is_ready

    async with several(2, limits=AdmissionLimits(requests=2)) as made:
        gate = Gate()
        _, d, clients = await with_pair(made)
        assert await clients[0].status() == 200
        before = (await clients[1].samples())[ANSWERED]
        d.script = gate
        doomed, kept = await begin(clients[0]), await begin(await made.client(1))
        await until(lambda: d.served == 3)
        pid = made.workers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(aiohttp.ClientError):
            await doomed
        await until(lambda: made.workers[0].pid != pid)
        counted = made.parent._rows.row(0)  # pyright: ignore[reportPrivateUsage] - all see it
        assert not any(counted), "what the dead one had in flight"
        await until(lambda: is_replaced(made, pid))
        # Its place was given back: the limit of two lets another in beside the kept one.
        next_client = await made.client(0)
        more = await begin(next_client)
        await until(lambda: d.served == 4)
        gate.open.set()
        assert [await kept, await more] == [200, 200]
        found = await clients[1].samples()
        assert found["xpyd_router_worker_deaths_total"] == 1
        assert found[ANSWERED] == before + 2, "what the dead one counted remains"


async def test_a_canary_has_its_share_and_its_counts_over_all_workers(tmp_path: Path) -> None:
    path = tmp_path / "canary.json"

    def step(number: int, weight: int) -> str:
        found = {"name": f"abc-{number}", "weightPercent": weight}
        path.write_text(json.dumps(found | {"prefill": ["p/b"], "decode": ["d/b"]}))
        return f"abc-{number}"

    name = step(0, 30)
    async with several(2, canary_file=path) as made:
        old, new = [
            [
                await made.engine(kind, pool=kind.lower(), revision=own, fleet_revision=own)
                for kind in "PD"
            ]
            for own in "ab"
        ]
        clients = await made.clients()
        await made.known_to_all(clients)
        # What the operator asks of the router's pod.
        world = RoutersWorld(made.parent.admin_port, ready_pod("r-0"), clock=time.monotonic)
        world.cache.put(CONFIG_MAP, canary_map("abc"))
        await world.reader.look(made.http)

        async def goes_by(name: str) -> bool:
            await world.reader.look_at_canaries(made.http)
            return world.reader.canary(KEY).names == {"r-0": name}

        def counted() -> list[tuple[int, int]]:
            counts = world.reader.canary(KEY).counts
            sides = [figures_of(counts, side) for side in ("old", "new")]
            return [(side.requests, side.failed) for side in sides]

        assert await goes_by(name)
        for client in clients:
            before = new[0].served
            for _ in range(50):
                assert await client.status(stream=True) == 200
            assert abs(new[0].served - before - 15) <= 1, "of each worker"
        assert await goes_by(name)
        served = [old[1].served, new[1].served]
        assert counted() == [(number, 0) for number in served]
        assert figures_of(world.reader.canary(KEY).counts).ttft_ms is not None
        # A worker that dies takes nothing of it away; the router goes by it again with the next.
        pid = made.workers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: made.workers[0].pid != pid and made.workers[0].is_ready)
        await when(lambda: goes_by(name))
        assert await (await made.client(0)).status() == 200
        assert await goes_by(name)
        assert sum(requests for requests, _ in counted()) == sum(served) + 1
        world.cache.put(CONFIG_MAP, canary_map("abc", step=1, shown=1))
        name = step(1, 60)
        await when(lambda: goes_by(name))
        assert counted() == [(0, 0), (0, 0)]
        assert await clients[1].status() == 200
        assert await goes_by(name)
        assert sum(requests for requests, _ in counted()) == 1


ANSWERED = 'xpyd_router_requests_total{endpoint="completions",status="200"}'


async def test_a_stuck_worker_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpyd_router.processes.worker_processes.MAX_MISSES", 2)

    async with several(2) as made:
        pid = made.workers[1].pid
        assert pid is not None
        its_client = await made.client(1)
        os.kill(pid, signal.SIGSTOP)
        unanswered = await begin(its_client)
        await until(lambda: made.workers[1].pid not in (pid, None))
        with pytest.raises(aiohttp.ClientError):
            await unanswered
        await until(lambda: made.workers[1].is_ready)
        await made.engine("P")
        await made.engine("D")
        client = await made.client(1)
        await made.known_to_all([client])
        assert await client.status() == 200


async def test_a_new_worker_has_the_present_state_when_it_listens(tmp_path: Path) -> None:
    keys = tmp_path / "admin.key"
    keys.write_text("k" * 32)

    def d_key(made: Several, engine: HttpEngine) -> Any:
        return next(i.key for i in made.parent.fleet.instances if i.name == engine.beat.instance)

    async with several(2, admin_key_file=keys) as made:
        _, d, clients = await with_pair(made)
        await made.engine("D", routers=2)
        await made.known_to_all(clients)
        fleet = made.parent.fleet
        fleet.cordon(d_key(made, d), is_cordoned=True)
        # Beside another router, and all have had time to beat.
        first_s = fleet.arrival.first_s - 2 * fleet.arrival.period_s
        fleet.arrival = fleet.arrival._replace(first_s=first_s)
        pid = made.workers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: made.workers[0].pid != pid)
        await until(lambda: made.workers[0].is_ready)
        # The first things that it is asked: nothing had to be waited for.
        client = await made.client(0)
        async with client.http.get(f"{client.base}/readiness") as response:
            assert (response.status, await response.json()) == (200, {"status": "ready"})
        states = await client.states()
        names = {engine.beat.instance for engine in made.engines}
        assert states == {**dict.fromkeys(names, "Ready"), d.beat.instance: "Cordoned"}


async def test_a_drain_finishes_the_streams_of_all_workers() -> None:
    async with several(2) as made:
        gate = Gate()
        _, d, clients = await with_pair(made)
        d.script = gate
        running = [await begin(client) for client in clients]
        await until(lambda: d.served == 2)
        ending = asyncio.create_task(made.parent.run())
        made.parent.stop()
        await until(lambda: is_refused(made.parent.http_port))
        assert not ending.done()
        # Whoever waits for it reads what is left, of all workers.
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{made.parent.admin_port}/metrics") as response,
        ):
            assert "xpyd_router_in_flight 2" in (await response.text()).splitlines()
        gate.open.set()
        assert [await one for one in running] == [200, 200]
        await ending
        assert is_refused(made.parent.admin_port)
        assert all(worker.pid is None for worker in made.workers)


async def test_a_second_stop_ends_workers_that_still_stream() -> None:
    async with several(2) as made:
        _, d, clients = await with_pair(made)
        d.script = Gate()
        running = [await begin(client) for client in clients]
        await until(lambda: d.served == 2)
        made.parent.stop()
        await until(lambda: is_refused(made.parent.http_port))
        made.parent.stop()
        await made.parent.run()
        for one in running:
            with pytest.raises(aiohttp.ClientError):
                await one


async def test_workers_whose_parent_is_killed_finish_what_runs_and_end() -> None:
    async with routed() as (parent, made):
        port = made.router.http_port
        d = await made.engine("D")
        await made.engine("P")
        gate = Gate()
        d.script = gate
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as http:
            client = Client(url, http, made.admin, http)
            names = {engine.beat.instance for engine in made.engines}
            await when(lambda: client.knows(names))
            workers = children(parent.pid)
            assert len(workers) == 2
            running = await begin(client)
            await until(lambda: d.served == 1)
            parent.kill()
            # The next router needs both.
            await until(lambda: is_refused(port) and is_refused(made.router.admin_port))
            gate.open.set()
            assert await running == 200
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


# prctl(PR_SET_CHILD_SUBREAPER): orphans become its children, as they do a container's process 1.
ADOPTS = "import ctypes; assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0"


async def test_what_a_killed_worker_leaves_behind_is_no_zombie_of_a_parent_that_is_process_1() -> (
    None
):
    async with routed("--exact-prefixes", prelude=ADOPTS) as (parent, made):
        await made.engine("P", compatibility="k")
        workers = children(parent.pid)
        await until(lambda: all(children(pid) for pid in workers))
        [counting] = children(workers[0])
        os.kill(workers[0], signal.SIGKILL)
        await until(lambda: not Path(f"/proc/{counting}").exists())
        assert parent.returncode is None


def is_refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


async def test_a_worker_that_starts_while_the_router_drains_does_not_hold_it_up() -> None:
    async with several(2) as made:
        gate = Gate()
        _, d, clients = await with_pair(made)
        d.script = gate
        running = await begin(clients[1])
        await until(lambda: d.served == 1)
        pid = made.workers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        # Its successor was told to drain before it read the first word.
        await until(lambda: made.workers[0].pid not in (pid, None))
        made.parent.stop()
        await until(lambda: made.workers[0].pid is None)
        gate.open.set()
        assert await running == 200
        await made.parent.run()


async def test_a_worker_that_is_stuck_while_the_router_drains_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("xpyd_router.processes.worker_processes.MAX_MISSES", 2)

    async with several(2) as made:
        pid = made.workers[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        made.parent.stop()
        await made.parent.run()
        assert all(worker.pid is None for worker in made.workers)


async def test_client_keys_and_their_limits_are_the_whole_routers(tmp_path: Path) -> None:
    key, other = new_key(), new_key()
    file = tmp_path / "keys.txt"
    file.write_text(line_of("a", key, {"requests": "2"}) + "\n" + line_of("b", other, {}))
    async with several(2, api_key_file=file) as made:
        gate = Gate()
        p, _, clients = await with_pair(made)
        p.script = gate
        for client in clients:
            assert await client.status() == 401
        clients = await made.clients()  # a 401 ends its connection
        for client in clients:
            client.http.headers["Authorization"] = f"Bearer {key}"
        running = [await begin(client) for client in clients]
        await until(lambda: p.served == 2)
        third = await made.client(0)
        third.http.headers["Authorization"] = f"Bearer {key}"
        assert await third.status() == 429, "two run, in two processes"
        third.http.headers["Authorization"] = f"Bearer {other}"
        gate.open.set()
        assert [await one for one in running] == [200, 200]
        file.write_text(line_of("b", other, {}))
        for client in clients:
            await when(lambda c=client: has_no_key(c))
        assert await third.status() == 200


async def test_each_worker_follows_the_file_of_the_fleets_keys(tmp_path: Path) -> None:
    file = tmp_path / "kv.key"
    file.write_text("o" * 32)
    async with several(2, kv_insecure=False, kv_key_file=file) as made:
        clients = await made.clients()

        async def has(client: Client, *keys: bytes) -> bool:
            return (await client.get("/instances"))["key_ids"] == list(key_ids(keys))

        for client in clients:
            assert await has(client, b"o" * 32)
        file.write_text(f"{'n' * 32}\n{'o' * 32}")
        for client in clients:
            await when(lambda c=client: has(c, b"n" * 32, b"o" * 32))


async def has_no_key(client: Client) -> bool:
    try:
        return await client.status() == 401
    except aiohttp.ClientError:
        return False  # it was being served when its key went

"""Fuzzing a P in a process of its own, by the Ds that it dials, for a second over each
transport, and for 60 s by `make soak`.

Each attack costs its own connection, and the prompt that was to go there: a good D stays connected
and gets KV all the while, P's blocks come back, and neither its memory nor its files grow.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kv.kvfakes import LAYOUT
from tests.kv.pod_process import PodProcess, pod_process
from tests.kv.pods import Pod, admitted, ids_of, key_of, pod, until
from tests.kv.transport_kit import address_of
from tests.kv.wire_fuzz_dialler import Acceptor, record
from xpyd_kv.values import Landed

SEED = 20_261_121
ATTACKS_PER_ROUND = 20
TOKENS = 24
MIB = 2**20
# An address that failed AUTH is remembered for so long: only what stays is a leak.
REMEMBERED_S = 0.1


# PUT differs from PUT_ASYNC in when its engine waits, which the fuzzed P has none of.
WAYS = [("tcp", "put_async"), ("uds", "get"), ("shm", "put_async"), ("shm", "get")]


class Run:
    """One P, one good D, one fuzzer."""

    def __init__(self, p: PodProcess, good: Pod, fuzzer: Acceptor) -> None:
        self.p, self.good, self.fuzzer = p, good, fuzzer
        self.prompts = 0
        self.attacks = 0
        with fuzzer.listening() as listener:
            self.send(address_of(listener))
            fuzzer.recorded = record(listener)
        until(lambda: self.p.peers()["lost"] == 1)

    def send(self, address: tuple[str, int]) -> int:
        self.prompts += 1
        self.p.ask("send", seed=self.prompts, tokens=TOKENS, address=list(address))
        return self.prompts

    def land(self) -> None:
        """A transfer to the good D, whole and right; nothing is held after it."""
        seed = self.prompts + 1
        assert self.good.kv.consumer is not None
        key = key_of(seed)
        self.good.kv.consumer.expect(key, wait_s=10.0, now=time.monotonic())
        self.send(self.good.address)
        answer = admitted(self.good, key, ids_of(seed, TOKENS))
        assert isinstance(answer, Landed)
        assert self.good.memory.holds(answer.block_ids, seed)
        self.good.pool.release(answer.block_ids)
        assert self.good.lost == []
        until(lambda: self.p.state()["free_blocks"] == 64)

    def attack(self, number: int) -> None:
        self.attacks += 1
        kinds = self.fuzzer.kinds
        kind = kinds[number % len(kinds)]
        # Shown by pytest when the run fails: the last line is the attack that it failed at.
        print(f"attack {self.attacks}: {kind.__name__}")  # noqa: T201
        with self.fuzzer.listening() as listener:
            self.send(address_of(listener))
            self.fuzzer.attack(listener, kind)
        until(self._only_the_good_is_left)

    def _only_the_good_is_left(self) -> bool:
        """And the prompt is given up: P's blocks are free."""
        peers = self.p.peers()
        # An attacker may be gone before P has seen its LAYOUT.
        assert peers["lost"] <= 1 + self.fuzzer.opened
        return peers["connections"] == 1 and self.p.state()["free_blocks"] == 64

    def at_rest(self) -> dict[str, int]:
        forgotten = time.monotonic() + 2 * REMEMBERED_S
        until(lambda: time.monotonic() > forgotten)
        self.land()
        state = self.p.state()
        assert state["threads"] == ["MainThread", "xpyd-kv-io"]
        return {
            "files": self.p.files(),
            "objects": state["objects"],
            "memory": self.p.memory("VmRSS"),
        }


@contextlib.contextmanager
def _scene(transport: str, mode: str, folder: Path, seed: int) -> Iterator[Run]:
    settings = {
        "mode": mode,
        "timeouts": {"failed_auth_s": REMEMBERED_S},
        "limits": {"lease_s": 2.0, "tombstone_s": REMEMBERED_S},
        "frames": {"group_bytes": 1},
        "sockets": str(folder),
    }
    if transport == "shm":
        settings["shared_bytes"] = 64 * LAYOUT.bytes_per_block
    options = {"socket_dir": folder, "transports": (transport,)}
    if transport == "tcp":
        options = {}
        del settings["sockets"]
    fuzzer = Acceptor(random.Random(seed), transport, folder, rest_s=2 * REMEMBERED_S)
    with (
        pod_process("P", **settings) as p,
        pod("D", **options) as good,
        contextlib.closing(fuzzer),
    ):
        yield Run(p, good, fuzzer)


def _fuzz(transport: str, mode: str, folder: Path, seed: int, seconds: float) -> None:
    print(f"seed {seed}")  # noqa: T201
    with _scene(transport, mode, folder, seed) as run:
        run.land()
        every_kind = list(range(len(run.fuzzer.kinds)))
        for kind in every_kind * 2:
            run.attack(kind)
        before = run.at_rest()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(ATTACKS_PER_ROUND):
                run.attack(run.fuzzer.rng.randrange(len(every_kind)))
            run.land()
        after = run.at_rest()
        print(f"{run.attacks} attacks: {before} became {after}")  # noqa: T201
        assert after["files"] == before["files"]
        assert after["objects"] - before["objects"] < 1000
        assert after["memory"] - before["memory"] < 4 * MIB


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "mode"), WAYS)
@pytest.mark.long
def test_a_second_of_bad_ds_costs_a_p_their_connections_and_prompts_and_nothing_else(
    transport: str, mode: str, tmp_path: Path
) -> None:
    _fuzz(transport, mode, tmp_path, SEED, 1)


@pytest.mark.soak
@pytest.mark.parametrize(("transport", "mode"), WAYS)
def test_a_minute_of_bad_ds_costs_a_p_their_connections_and_prompts_and_nothing_else(
    transport: str, mode: str, tmp_path: Path
) -> None:
    _fuzz(transport, mode, tmp_path, random.SystemRandom().randrange(2**32), 60)

"""Fuzzing a D in a process of its own, at its KV port and at its Unix socket, for a second each,
and for 60 s by `make soak`. What a D may do to a P: test_wire_fuzz_dialler.py.

Each attack costs its own connection and nothing else: two good Ps stay connected and land KV all
the while, D's thread lives, and neither its memory nor its files grow.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kv.kvfakes import LAYOUT
from tests.kv.pod_process import PodProcess, pod_process
from tests.kv.pods import Pod, ids_of, key_of, pod, send, settled, until
from tests.kv.transport_kit import KINDS
from tests.kv.wire_fuzz import Door, Fuzzer, record
from tests.kv.wire_fuzz_shm import UnixFuzzer
from xpyd_kv.transport.host.shared_memory import SharedMemory

SEED = 20_260_301
ATTACKS_PER_ROUND = 20
TOKENS = 24
MIB = 2**20
UNIT = LAYOUT.bytes_per_block
# What D remembers of transfers that are over is gone after this time: only what stays is a leak.
TOMBSTONE_S = 0.3
SETTINGS: dict[str, Any] = {
    "limits": {"tombstone_s": TOMBSTONE_S, "lease_s": 2.0},
    # Attackers and good peers use all three landings.
    "store": {"direct_free": 0.6, "buffer_bytes": 8 * UNIT, "pool_bytes": 16 * UNIT},
}


class Run:
    """One D, two good Ps, one fuzzer."""

    def __init__(self, d: PodProcess, peers: list[Pod], door: Door, seed: int) -> None:
        self.d, self.peers, self.seed = d, peers, seed
        self.prompts = 0
        self.attacks = 0
        recorded = "f" * 32
        kind = Fuzzer if door.transport == "tcp" else UnixFuzzer
        self.fuzzer = kind(random.Random(seed), door, record(door, recorded))
        self.past = [recorded]
        until(lambda: d.peers()["lost"] == 1)

    def land(self) -> None:
        """A transfer of each good peer, from its OFFER to its landing."""
        for peer in self.peers:
            self.prompts += 1
            self.d.expect(self.prompts, TOKENS)
            key = send(peer, self.d.address, ids_of(self.prompts, TOKENS), self.prompts, chunk=10)
            assert self.d.answer(self.prompts) == "right"
            until(lambda peer=peer, key=key: settled(peer, key))
        assert [peer.lost for peer in self.peers] == [[], []]

    def round(self, kinds: list[int]) -> None:
        """Attacks while a good transfer stands half done, which then lands."""
        self.prompts += 1
        seed, peer = self.prompts, self.peers[self.prompts % 2]
        producer = peer.kv.producer
        assert producer is not None
        ids, key = ids_of(seed, TOKENS), key_of(seed)
        self.d.expect(seed, TOKENS)
        producer.offer(
            key, self.d.address, ids, prompt_tokens=TOKENS, salt=b"", now=time.monotonic()
        )
        until(lambda: producer.poll(time.monotonic()) or producer.status(key).state == "granted")
        self.past = [*self.past[-3:], key.uuid]
        self.fuzzer.known = self.past
        for kind in kinds:
            self.attack(kind)
        blocks = peer.pool.take(TOKENS // LAYOUT.block_size)
        assert blocks is not None
        peer.memory.fill(blocks, seed)
        producer.stage(key, blocks, TOKENS)
        for layer in range(len(LAYOUT.layers)):
            producer.layer_done(layer)
        producer.step_done()
        peer.pool.release(blocks)
        assert self.d.answer(seed) == "right"
        until(lambda: settled(peer, key))
        assert [one.lost for one in self.peers] == [[], []]

    def attack(self, number: int) -> None:
        self.attacks += 1
        kinds = self.fuzzer.kinds
        kind = kinds[number % len(kinds)]
        # Shown by pytest when the run fails: the last line is the attack that it failed at.
        print(f"seed {self.seed}, attack {self.attacks}: {kind.__name__}")  # noqa: T201
        self.fuzzer.attack(kind)
        lost = 1 + self.fuzzer.opened
        # The attacker's connection is gone, and no other.
        until(lambda: self._only_the_good_are_left(lost))

    def _only_the_good_are_left(self, lost: int) -> bool:
        peers = self.d.peers()
        assert peers["lost"] <= lost
        assert peers["connections"] >= len(self.peers)
        gone = peers["strangers"] == 0 and peers["connections"] == len(self.peers)
        return gone and peers["lost"] == lost

    def at_rest(self) -> dict[str, int]:
        """What D holds, once it has had time to forget what is over."""
        forgotten = time.monotonic() + 2 * TOMBSTONE_S
        until(lambda: time.monotonic() > forgotten)
        self.land()
        until(lambda: self.d.state()["leases"] == 0)
        state = self.d.state()
        assert state["threads"] == ["MainThread", "xpyd-kv-io"]
        assert (state["buffer"], state["pool"], state["free_blocks"]) == (0, 0, 64)
        return {
            "files": self.d.files(),
            "maps": self.d.borrowed_maps(),
            "objects": state["objects"],
            "memory": self.d.memory("VmRSS"),
        }


@contextlib.contextmanager
def _scene(transport: str, folder: Path, seed: int) -> Iterator[Run]:
    """A D, and two good Ps over `transport`."""
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"transports": (transport,)}
        if transport != "tcp":
            options["socket_dir"] = folder
        if transport == "shm":
            shared = [SharedMemory(64 * UNIT) for _ in range(2)]
            for memory in shared:
                stack.callback(memory.close)
        else:
            shared = [None, None]
        d = stack.enter_context(pod_process("D", sockets=str(folder), **SETTINGS))
        peers = [
            stack.enter_context(pod("P", name=name, shared=memory, **options))
            for name, memory in zip(("one", "two"), shared, strict=True)
        ]
        run = Run(d, peers, Door(d.address, transport, folder), seed)
        if isinstance(run.fuzzer, UnixFuzzer):
            stack.callback(run.fuzzer.close)
        yield run


def _fuzz(transport: str, folder: Path, seed: int, seconds: float) -> None:
    with _scene(transport, folder, seed) as run:
        run.land()
        every_kind = list(range(len(run.fuzzer.kinds)))
        run.round(every_kind * 2)
        before = run.at_rest()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            picks = [run.fuzzer.rng.randrange(len(every_kind)) for _ in range(ATTACKS_PER_ROUND)]
            run.round(picks)
        after = run.at_rest()
        print(f"{run.attacks} attacks: {before} became {after}")  # noqa: T201
        assert after["files"] == before["files"]
        assert after["maps"] == before["maps"] == (2 if transport == "shm" else 0)
        # D remembers a P whose DATA came broken by its name, so many at most; nothing of others.
        assert after["objects"] - before["objects"] < max(1000, run.attacks // 8)
        assert after["memory"] - before["memory"] < 4 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("transport", KINDS)
def test_a_second_of_fuzzing_costs_each_attack_its_connection_and_nothing_else(
    transport: str, tmp_path: Path
) -> None:
    _fuzz(transport, tmp_path, SEED, 1)


@pytest.mark.soak
@pytest.mark.parametrize("transport", KINDS)
def test_a_minute_of_fuzzing_costs_each_attack_its_connection_and_nothing_else(
    transport: str, tmp_path: Path
) -> None:
    _fuzz(transport, tmp_path, random.SystemRandom().randrange(2**32), 60)

"""What goes wrong between a P and a D as processes: broken bytes, a key that changes, a P that is
another one suddenly, memory that cannot be mapped. Each request gets its answer all the same."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kv.pod_process import PodProcess, pod_process
from tests.kv.pods import KEY, PATIENCE_S, WIRE_LAYOUT, until
from tests.kv.transport_kit import Puppet, is_closed
from tests.kv.wire_fuzz import good_transfer
from xpyd_core.request_id import Address
from xpyd_kv.wire.frames import PREFIX_BYTES
from xpyd_kv.wire.messages import TYPE_NUMBERS, Data

TOKENS = 24
NEW_KEY = b"the fleet's next key, as long"
MIB = 2**20


class Spoiler:
    """A network that flips a bit of the next `spoil` DATA frames."""

    def __init__(self, target: Address) -> None:
        self.spoil = 0
        self.dials = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self._stop = threading.Event()
        self._socks: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> Address:
        return Address(*self._listener.getsockname())

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for sock in self._socks:
            sock.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                self.dials += 1
                server = socket.create_connection(self._target, timeout=PATIENCE_S)
                self._socks += (client, server)
                for source, sink, spoils in ((client, server, True), (server, client, False)):
                    source.settimeout(0.05)
                    thread = threading.Thread(target=self._pump, args=(source, sink, spoils))
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, spoils: bool) -> None:
        kept = bytearray()
        with contextlib.suppress(OSError):
            while not self._stop.is_set():
                try:
                    data = source.recv(65536)
                except TimeoutError:
                    continue
                if not data:
                    break
                kept += data
                while len(kept) >= PREFIX_BYTES:
                    length = PREFIX_BYTES + int.from_bytes(kept[6:8], "little")
                    length += int.from_bytes(kept[8:12], "little")
                    if len(kept) < length:
                        break
                    if spoils and self.spoil and kept[4] == TYPE_NUMBERS[Data]:
                        self.spoil -= 1
                        kept[length - 1] ^= 1
                    sink.sendall(kept[:length])
                    del kept[:length]
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def spoiler(target: Address) -> Iterator[Spoiler]:
    made = Spoiler(target)
    try:
        yield made
    finally:
        made.close()


def ask(p: PodProcess, d: PodProcess, seed: int, address: Address | None = None) -> str:
    """What came of one request's KV."""
    d.expect(seed, TOKENS, wait_s=PATIENCE_S)
    p.ask("send", seed=seed, tokens=TOKENS, address=address or d.address)
    return d.answer(seed)


def at_rest(d: PodProcess) -> None:
    until(lambda: d.state()["leases"] == 0)
    state = d.state()
    assert (state["buffer"], state["pool"], state["free_blocks"]) == (0, 0, 64)


def test_a_broken_frame_is_sent_again_once_and_then_the_prompt_is_computed() -> None:
    with pod_process("P") as p, pod_process("D") as d, spoiler(d.address) as network:
        assert ask(p, d, 1, network.address) == "right"
        network.spoil = 1
        assert ask(p, d, 2, network.address) == "right"
        assert d.peers()["broken"] == 1
        assert (d.peers()["quarantines"], network.dials) == (0, 1)
        # Broken, broken again when it is sent again: the third in all.
        network.spoil = 2
        assert ask(p, d, 3, network.address) in ("corrupt", "peer_lost")
        assert (d.peers()["broken"], d.peers()["quarantines"]) == (3, 1)
        until(lambda: d.peers()["connections"] == 0)
        # P hears that it is refused, once; then it does not dial.
        for seed in (4, 5, 6):
            d.expect(seed, TOKENS, wait_s=0.5)
            p.ask("send", seed=seed, tokens=TOKENS, address=network.address)
            assert d.answer(seed) in ("no_offer", "peer_lost")
        assert network.dials <= 2
        assert p.state()["free_blocks"] == 64
        at_rest(d)


def test_a_quarantine_ends_by_time_and_holds_nobody_else() -> None:
    times = {"quarantine_s": 0.3, "failed_auth_s": 0.1}
    with (
        pod_process("P", timeouts=times) as p,
        pod_process("P", name="other") as other,
        pod_process("D", timeouts=times) as d,
        spoiler(d.address) as network,
    ):
        network.spoil = 10
        seed = 1
        while not d.peers()["quarantines"]:
            assert ask(p, d, seed, network.address) != "right"
            seed += 1
        assert ask(other, d, 100) == "right"
        network.spoil = 0

        def answers_again() -> bool:
            nonlocal seed
            seed += 1
            d.expect(seed, TOKENS, wait_s=0.5)
            p.ask("send", seed=seed, tokens=TOKENS, address=network.address)
            return d.answer(seed) == "right"

        until(answers_again)
        at_rest(d)


STEPS = ([KEY], [KEY, NEW_KEY], [NEW_KEY, KEY], [NEW_KEY])


@pytest.mark.slow
def test_no_transfer_is_lost_at_any_step_of_a_keys_rotation() -> None:
    """Each step replaces one process after the other, so that neighbouring steps meet: P's first,
    D's first, and both."""
    seed = 0
    with contextlib.ExitStack() as stack:
        files = [[key.decode() for key in keys] for keys in STEPS]

        def start(role: str, step: int) -> PodProcess:
            name = f"{role}{step}"
            return stack.enter_context(pod_process(role, name=name, keys=files[step]))

        p, d = start("P", 0), start("D", 0)
        for step in range(1, len(STEPS)):
            new_p, new_d = start("P", step), start("D", step)
            for sender, receiver in ((p, d), (new_p, d), (p, new_d), (new_p, new_d)):
                seed += 1
                assert ask(sender, receiver, seed) == "right", (step, sender, receiver)
            p.popen.kill()
            d.popen.kill()
            p, d = new_p, new_d
        # The old key is worth nothing any more.
        old = start("P", 0)
        d.expect(99, TOKENS, wait_s=0.5)
        old.ask("send", seed=99, tokens=TOKENS, address=d.address)
        assert d.answer(99) == "no_offer"
        assert d.peers()["junk"] == 1


def test_a_p_that_comes_back_as_another_process_ends_all_of_the_old_ones() -> None:
    with pod_process("D") as d, socket.create_connection(d.address, timeout=PATIENCE_S) as sock:
        old = Puppet(
            sock, "P", key=KEY, layout=WIRE_LAYOUT, engine_id="pod-P", incarnation="older"
        ).open()
        offer, data, commit = good_transfer(f"{7:032x}", TOKENS, random.Random(7))
        sock.sendall(offer)
        assert old.read()
        sock.sendall(data[: len(data) // 2])
        until(lambda: d.state()["leases"] == 1)
        d.expect(8, TOKENS)
        with pod_process("P") as p:
            p.ask("send", seed=8, tokens=TOKENS, address=d.address)
            assert d.answer(8) == "right"
            assert is_closed(sock)
        with contextlib.suppress(OSError):
            sock.sendall(data[len(data) // 2 :] + commit)
        at_rest(d)


@pytest.mark.parametrize("fits", [True, False])
def test_where_d_cannot_map_ps_memory_the_pair_goes_on_over_the_socket(
    tmp_path: Path, fits: bool
) -> None:
    size = 512 * MIB
    spare = 4 * size if fits else size // 2
    with (
        pod_process("P", sockets=str(tmp_path), shared_bytes=size) as p,
        pod_process("D", sockets=str(tmp_path), spare_address_bytes=spare) as d,
    ):
        first = ask(p, d, 1)
        assert first == ("right" if fits else "peer_lost")
        for seed in range(2, 6):
            assert ask(p, d, seed) == "right"
        opened = {"shm": 1} if fits else {"shm": 1, "uds": 1}
        assert p.peers()["opened"] == d.peers()["opened"] == opened
        assert d.peers()["paths_failed"] == ({} if fits else {"shm": 1})
        assert p.state()["free_blocks"] == 64
        at_rest(d)

"""References to KV that are not the peer's own: out of range, consumed, stale, foreign, past lease.

The five cases of vllm#52234, where a decode engine answered 200 with other requests' KV. Here a
hand-made D with the fleet's key asks a real P for KV by such a reference, and a hand-made P writes
to a real D by one, over loopback. P sends no byte of it, and D's request gets its own KV or a
reason to compute. tests/e2e/test_forged_references.py has the same with engines and texts.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pytest

from tests.kv.kvfakes import BLOCK_SIZE, LAYOUT, expected_bytes
from tests.kv.pods import PATIENCE_S, WIRE_LAYOUT, Pod, admitted, ids_of, key_of, pod, send, until
from tests.kv.transport_kit import Puppet, is_closed
from xpyd_core.blocks import token_bytes
from xpyd_core.request_id import Address
from xpyd_kv.session.settings import KvLimits, KvSettings
from xpyd_kv.transport.body import checksum
from xpyd_kv.values import Landed, NoKv
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.connection import Received
from xpyd_kv.wire.frames import DataBegin, DataChunk, encode

TOKENS = 20
BLOCKS = TOKENS // BLOCK_SIZE
OURS, THEIRS = 1, 2
"""The prompts by whose KV a peer may be known, and by whose it must not."""
SHORT_S = 0.3
_ALL = {"first_layer": 0, "end_layer": len(LAYOUT.layers)}


def of(seed: int, *, epoch: int = 0, prompt_index: int = 0) -> dict[str, Any]:
    """How a frame names the KV of a prompt."""
    return {"uuid": key_of(seed).uuid, "prompt_index": prompt_index, "epoch": epoch}


def kv_of(seed: int, blocks: range = range(BLOCKS)) -> bytes:
    """The bytes of a prompt's KV, as DATA of all layers has them."""
    layers = range(len(LAYOUT.layers))
    return b"".join(expected_bytes(seed, layer, block) for layer in layers for block in blocks)


class Speaker:
    """A hand-made peer: says frames, and hears what comes until its PING is answered."""

    def __init__(self, sock: socket.socket, role: str, **hello: Any) -> None:
        self.sock = sock
        sock.settimeout(PATIENCE_S)
        self._puppet = Puppet(sock, role, layout=WIRE_LAYOUT, transports=("tcp",), **hello).open()
        self._events: list[Any] = []
        self._fences = 0

    def say(self, message: wire.Message, body: bytes = b"") -> None:
        self.sock.sendall(encode(message, len(body)) + body)

    def say_data(self, seed: int, body: bytes, *, first_block: int = 0, **named: Any) -> bytes:
        """DATA of all layers; its checksum."""
        end = first_block + len(body) // LAYOUT.bytes_per_block
        where: dict[str, Any] = {**of(seed, **named), **_ALL, "seq": 0}
        header = wire.Data(**where, first_block=first_block, end_block=end)
        digest = checksum([memoryview(body)])
        self.say(header, body + digest)
        return digest

    def hear(self, *kinds: type[wire.Message]) -> Received:
        """The next message of one of these kinds; others are dropped."""
        while True:
            event = self._next()
            if isinstance(event, Received) and isinstance(event.message, kinds):
                return event

    def hear_all(self) -> list[Any]:
        """Everything that comes until a CANCEL of nothing is answered: frames are read in order."""
        self._fences += 1
        fence: dict[str, Any] = {"uuid": f"{self._fences:032x}", "prompt_index": 9, "epoch": 0}
        self.say(wire.Cancel(**fence))
        found: list[Any] = []
        while True:
            event = self._next()
            if isinstance(event, Received) and event.message == wire.Cancelled(**fence):
                return found
            found.append(event)

    def hear_kv(self) -> bytes:
        """The bytes of DATA until COMMIT."""
        found = b""
        while True:
            event = self._next()
            if isinstance(event, DataChunk):
                found += bytes(event.data)
            if isinstance(event, Received) and isinstance(event.message, wire.Commit):
                return found

    def _next(self) -> Any:
        while not self._events:
            events = self._puppet.read()
            if not events:
                raise ConnectionError("the other side has closed")
            self._events += events
            self.sock.sendall(self._puppet.wire.outgoing())
        return self._events.pop(0)


# --- a D asks for KV that is not its own


@dataclass
class Asked:
    """A P in mode get, and two Ds by hand: each was offered one prompt of its own."""

    p: Pod
    ours: Speaker
    theirs: Speaker
    places: tuple[Address, Address]

    def offer(self, seed: int, place: int) -> None:
        """Have P compute a prompt for one of the Ds."""
        send(self.p, self.places[place], ids_of(seed, TOKENS), seed, chunk=TOKENS)

    def take(self, speaker: Speaker, seed: int) -> bytes:
        """The KV of an own prompt, which was offered."""
        speaker.say(wire.Pull(**of(seed)))
        found = speaker.hear_kv()
        speaker.say(wire.Done(**of(seed)))
        return found

    def end(self, seed: int) -> None:
        """P's engine goes on until P holds nothing of the prompt."""

        def is_over() -> bool:
            assert self.p.kv.producer is not None
            self.p.kv.producer.poll(time.monotonic())
            return self.p.kv.producer.is_settled(key_of(seed))

        until(is_over, f"the end of prompt {seed}")


@contextlib.contextmanager
def asked(lease_s: float = 30.0) -> Generator[Asked]:
    settings = KvSettings(mode="get", limits=KvLimits(lease_s=lease_s, cancel_s=PATIENCE_S))
    with contextlib.ExitStack() as stack:
        # So few blocks that the next prompt gets those of the one before.
        p = stack.enter_context(pod("P", settings, blocks=2 * BLOCKS))
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in "DD"]
        places = tuple(Address(*one.getsockname()) for one in listeners)
        speakers: list[Speaker] = []
        for seed, (listener, place) in enumerate(zip(listeners, places, strict=True), start=OURS):
            send(p, place, ids_of(seed, TOKENS), seed, chunk=TOKENS)
            listener.settimeout(PATIENCE_S)
            sock = stack.enter_context(listener.accept()[0])
            speakers.append(Speaker(sock, "D"))
            offered = speakers[-1].hear(wire.Offer).message
            assert isinstance(offered, wire.Offer)
            assert offered.uuid == key_of(seed).uuid
            speakers[-1].say(wire.Lease(**of(seed), ttl_ms=int(lease_s * 1000)))
        yield Asked(p, *speakers, places=places)  # type: ignore[arg-type]


def sent_kv(events: list[Any]) -> bool:
    return any(isinstance(event, DataBegin | DataChunk) for event in events)


@pytest.mark.parametrize(
    "named",
    [of(9), of(OURS, prompt_index=1), of(OURS, epoch=1), of(OURS, epoch=2**32 - 1)],
    ids=["request", "prompt", "epoch", "last epoch"],
)
def test_a_d_that_names_kv_which_never_was_gets_none(named: dict[str, Any]) -> None:
    with asked() as case:
        case.ours.say(wire.Pull(**named))
        case.ours.say(wire.Grant(**named))
        assert not sent_kv(case.ours.hear_all())
        assert case.take(case.ours, OURS) == kv_of(OURS)


@pytest.mark.parametrize("skip_tokens", [TOKENS, TOKENS + BLOCK_SIZE, 2**32 - BLOCK_SIZE, 3])
def test_a_d_that_names_tokens_out_of_range_loses_its_connection_and_nobody_elses(
    skip_tokens: int,
) -> None:
    with asked() as case:
        case.ours.say(wire.Pull(**of(OURS), skip_tokens=skip_tokens))
        assert is_closed(case.ours.sock)
        case.end(OURS)
        assert case.take(case.theirs, THEIRS) == kv_of(THEIRS)


def test_a_d_that_names_kv_which_it_has_consumed_gets_no_other_prompts() -> None:
    with asked() as case:
        assert case.take(case.ours, OURS) == kv_of(OURS)
        case.end(OURS)
        # Another prompt is computed into the same blocks.
        case.offer(3, place=1)
        case.theirs.hear(wire.Offer)
        for _ in range(2):
            case.ours.say(wire.Pull(**of(OURS)))
            case.ours.say(wire.Nack(**of(OURS), frames=1), bytes(4))
            assert not sent_kv(case.ours.hear_all())
        assert case.take(case.theirs, 3) == kv_of(3)


def test_a_d_that_names_an_older_try_gets_nothing_and_the_newer_one_is_right() -> None:
    with asked() as case:
        producer = case.p.kv.producer
        assert producer is not None
        producer.cancel(key_of(OURS), "preempted")
        case.ours.hear(wire.Cancel)
        case.ours.say(wire.Cancelled(**of(OURS)))
        case.end(OURS)
        case.offer(OURS, place=0)
        newer = case.ours.hear(wire.Offer).message
        assert isinstance(newer, wire.Offer)
        assert newer.epoch == 1
        case.ours.say(wire.Pull(**of(OURS, epoch=0)))
        assert not sent_kv(case.ours.hear_all())
        case.ours.say(wire.Pull(**of(OURS, epoch=1)))
        assert case.ours.hear_kv() == kv_of(OURS)


def test_a_d_that_names_another_ds_kv_gets_nothing_and_the_other_one_all_of_it() -> None:
    with asked() as case:
        for forged in (wire.Pull, wire.Grant, wire.Done, wire.Cancel, wire.Cancelled):
            case.ours.say(forged(**of(THEIRS)))
        case.ours.say(wire.Nack(**of(THEIRS), frames=1), bytes(4))
        assert not sent_kv(case.ours.hear_all())
        assert case.take(case.theirs, THEIRS) == kv_of(THEIRS)


def test_a_d_that_comes_behind_the_end_of_its_lease_gets_nothing() -> None:
    with asked(lease_s=SHORT_S) as case:
        case.ours.hear(wire.Cancel)
        case.ours.say(wire.Cancelled(**of(OURS)))
        case.end(OURS)
        case.theirs.hear(wire.Cancel)
        case.theirs.say(wire.Cancelled(**of(THEIRS)))
        case.end(THEIRS)
        case.offer(3, place=1)
        case.ours.say(wire.Pull(**of(OURS)))
        assert not sent_kv(case.ours.hear_all())


# --- a P writes to where it may not


@dataclass
class Written:
    """A D, and two Ps by hand: each has room for one prompt of its own there."""

    d: Pod
    ours: Speaker
    theirs: Speaker
    is_expected: bool

    def refused(self) -> dict[str, int]:
        return dict(self.d.kv.metrics.refused_data)

    def offer(self, speaker: Speaker, seed: int, *, epoch: int = 0) -> None:
        """A request that waits for it where leases are long; OFFER, and the room for it."""
        assert self.d.kv.consumer is not None
        if self.is_expected and not epoch:
            self.d.kv.consumer.expect(key_of(seed), wait_s=PATIENCE_S, now=time.monotonic())
        ids = token_bytes(ids_of(seed, TOKENS))
        offer = wire.Offer(
            **of(seed, epoch=epoch),
            tokens=TOKENS,
            prompt_tokens=TOKENS,
            digest=sha256(ids).digest(),
            total_bytes=len(kv_of(seed)),
        )
        speaker.say(offer, ids)
        with self.polling():
            speaker.hear(wire.Grant)

    @contextlib.contextmanager
    def polling(self) -> Generator[None]:
        """D's engine takes turns meanwhile, in a thread."""
        stop = threading.Event()

        def run() -> None:
            assert self.d.kv.consumer is not None
            while not stop.wait(0.005):
                self.d.kv.consumer.poll(time.monotonic())

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(PATIENCE_S)

    def finish(self, speaker: Speaker, seed: int, *, epoch: int = 0) -> None:
        """All of a prompt's KV, as it should be."""
        body = kv_of(seed)
        digest = speaker.say_data(seed, body, epoch=epoch)
        sums = sha256(digest).digest()
        commit = wire.Commit(**of(seed, epoch=epoch), frames=1, total_bytes=len(body), digest=sums)
        speaker.say(commit)

    def is_right(self, seed: int) -> bool:
        """Whether the request of the prompt starts from its own KV."""
        answer = admitted(self.d, key_of(seed), ids_of(seed, TOKENS))
        if not isinstance(answer, Landed):
            return False
        found = self.d.memory.holds(answer.block_ids, seed)
        self.d.pool.release(answer.block_ids)
        return found


@contextlib.contextmanager
def written(lease_s: float = 30.0) -> Generator[Written]:
    settings = KvSettings(limits=KvLimits(lease_s=lease_s, cancel_s=PATIENCE_S))
    with contextlib.ExitStack() as stack:
        d = stack.enter_context(pod("D", settings))
        socks = [stack.enter_context(socket.create_connection(d.address)) for _ in "PP"]
        ours, theirs = (Speaker(sock, "P") for sock in socks)
        case = Written(d, ours, theirs, is_expected=lease_s > SHORT_S)
        case.offer(case.ours, OURS)
        case.offer(case.theirs, THEIRS)
        yield case


FORGED: dict[str, tuple[Callable[[Speaker], object], str]] = {
    "a request that never was": (lambda p: p.say_data(9, kv_of(9)), "unknown"),
    "another prompt of the request": (
        lambda p: p.say_data(OURS, kv_of(9), prompt_index=1),
        "unknown",
    ),
    "a try that is not yet": (lambda p: p.say_data(OURS, kv_of(9), epoch=1), "stale"),
    "blocks behind the prompt": (
        lambda p: p.say_data(OURS, kv_of(9), first_block=1),
        "range",
    ),
    "another P's": (lambda p: p.say_data(THEIRS, kv_of(9)), "foreign"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_p_that_writes_by_a_reference_that_is_not_its_own_changes_no_block(forged: str) -> None:
    write, reason = FORGED[forged]
    with written() as case:
        case.finish(case.theirs, THEIRS)
        case.theirs.hear(wire.Done)
        write(case.ours)
        case.ours.hear_all()
        assert case.refused() == {reason: 1}
        case.finish(case.ours, OURS)
        assert case.is_right(THEIRS)
        assert case.is_right(OURS)
        until(lambda: case.d.pool.num_free == 64)


def test_a_p_that_writes_again_to_what_was_consumed_changes_no_block() -> None:
    with written() as case:
        case.finish(case.ours, OURS)
        case.ours.hear(wire.Done)
        # Before its request has it, behind that, and where another prompt may be by then.
        case.ours.say_data(OURS, kv_of(9))
        case.ours.hear_all()
        assert case.is_right(OURS)
        case.ours.say_data(OURS, kv_of(9))
        case.ours.hear_all()
        case.offer(case.ours, 3)
        case.ours.say_data(OURS, kv_of(9))
        case.finish(case.ours, 3)
        assert case.is_right(3)
        assert sum(case.refused().values()) == 3


def test_a_p_that_goes_on_with_an_older_try_changes_no_block_of_the_newer_one() -> None:
    with written() as case:
        case.offer(case.ours, OURS, epoch=1)
        case.ours.say_data(OURS, kv_of(9), epoch=0)
        case.ours.hear_all()
        assert sum(case.refused().values()) == 1
        case.finish(case.ours, OURS, epoch=1)
        assert case.is_right(OURS)


def test_a_p_that_writes_behind_the_end_of_its_lease_changes_no_block() -> None:
    with written(lease_s=SHORT_S) as case:
        for speaker, seed in ((case.ours, OURS), (case.theirs, THEIRS)):
            speaker.hear(wire.Cancel)
            speaker.say(wire.Cancelled(**of(seed)))
        with case.polling():
            until(lambda: case.d.pool.num_free == 64)
        case.finish(case.ours, OURS)
        case.ours.hear_all()
        assert sum(case.refused().values()) == 1
        answer = admitted(case.d, key_of(OURS), ids_of(OURS, TOKENS))
        assert isinstance(answer, NoKv)

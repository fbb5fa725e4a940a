"""P's state machine, frame by frame: what it sends when, what it waits for, what ends it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest

from tests.kv.kvfakes import LAYOUT
from tests.kv.kvsim import SimPeer
from tests.kv.send_driver import ADDRESS, BLOCKS, HELLO, KEY, LAYERS, REF, Driver
from xpyd_core.errors import ProtocolError
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.plan.frames import Area
from xpyd_kv.session.events import SendEnded, SendGranted
from xpyd_kv.session.outgoing import ReadyArea, joined
from xpyd_kv.session.settings import MAX_LEASE_S
from xpyd_kv.wire import messages as wire


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_offer_grant_data_commit_done(driver: Driver) -> None:
    driver.committed()
    assert driver.said() == ["OFFER", "COMMIT"]
    driver.answer(wire.Done(**REF))
    assert driver.events == [SendGranted(KEY, 0, "d1"), SendEnded(KEY, 0, "")]
    assert [(h.seq, h.first_layer, h.end_layer, h.end_block) for h in driver.headers] == [
        (0, 0, 1, 3), (1, 1, 2, 3), (2, 2, 3, 3)
    ]  # fmt: skip
    assert driver.session.tick(driver.clock.now) is None
    assert driver.metrics.transfers == {"done": 1}


def test_commit_names_what_was_sent(driver: Driver) -> None:
    driver.committed()
    commit = driver.sent[-1]
    assert isinstance(commit, wire.Commit)
    assert (commit.frames, commit.total_bytes) == (LAYERS, 3 * LAYOUT.bytes_per_block)
    assert commit.digest == sha256(b"01234567" * LAYERS).digest()


def test_views_are_the_blocks_own_bytes_layer_by_layer(driver: Driver) -> None:
    driver.offer()
    driver.grant(skip_tokens=4)
    driver.session.ready(KEY, 0, [ReadyArea(Area(1, 3, 0, 3), BLOCKS)])
    _, views, _ = driver.queue[0]
    expected = [driver.memory.block_view(layer, block) for layer in (1, 2) for block in BLOCKS[1:]]
    assert [bytes(view) for view in views] == [bytes(view) for view in expected]
    assert all(view.obj is other.obj for view, other in zip(views, expected, strict=True))


def test_commit_waits_for_the_last_byte_and_for_the_engine(driver: Driver) -> None:
    driver.offer()
    driver.ready(0, 2)
    driver.grant()
    driver.send_one()
    driver.send_one()
    driver.ready(2, 3)
    driver.session.complete(KEY, 0)
    assert driver.said() == ["OFFER"]
    driver.send_one()
    assert driver.said() == ["COMMIT"]


def test_nothing_is_sent_before_the_grant(driver: Driver) -> None:
    driver.offer()
    driver.ready()
    driver.session.complete(KEY, 0)
    driver.answer(wire.Lease(**REF, ttl_ms=30_000))
    assert not driver.queue
    driver.grant()
    assert len(driver.queue) == LAYERS


@pytest.mark.parametrize("skip", [3, 12, 100])
def test_a_grant_that_skips_what_cannot_be_skipped_closes_the_connection(
    driver: Driver, skip: int
) -> None:
    driver.offer()
    with pytest.raises(ProtocolError, match="skip"):
        driver.grant(skip)


def test_done_before_commit_closes_the_connection(driver: Driver) -> None:
    driver.offer()
    driver.grant()
    with pytest.raises(ProtocolError, match="DONE"):
        driver.answer(wire.Done(**REF))


@pytest.mark.parametrize(
    "message",
    [wire.Commit(**REF, frames=1, total_bytes=1, digest=bytes(32))],
)
def test_what_only_a_p_sends_closes_the_connection(driver: Driver, message: wire.Message) -> None:
    with pytest.raises(ProtocolError):
        driver.answer(message)


def nack(*seqs: int) -> tuple[wire.Nack, bytes]:
    return wire.Nack(**REF, frames=len(seqs)), struct.pack(f"<{len(seqs)}I", *seqs)


def test_a_nack_brings_the_same_frames_once_more_and_no_second_time(driver: Driver) -> None:
    driver.committed()
    driver.said()
    driver.answer(*nack(2, 0))
    assert [driver.send_one() for _ in range(2)] == [True, True]
    assert [h.seq for h in driver.headers[-2:]] == [0, 2]
    assert driver.said() == ["COMMIT"]
    driver.answer(*nack(2))
    assert driver.said() == ["CANCEL nack"]
    driver.answer(wire.Cancelled(**REF))
    assert driver.events[-1] == SendEnded(KEY, 0, "nack")


def test_commit_names_the_checksum_that_a_frame_had_when_it_was_sent_last(driver: Driver) -> None:
    driver.committed()
    driver.answer(*nack(1))
    assert driver.send_one(b"anew....")
    commit = driver.sent[-1]
    assert isinstance(commit, wire.Commit)
    assert commit.digest == sha256(b"01234567" + b"anew...." + b"01234567").digest()


@pytest.mark.parametrize("seqs", [(), (LAYERS,)])
def test_a_nack_for_frames_that_never_were_closes_the_connection(
    driver: Driver, seqs: tuple[int, ...]
) -> None:
    driver.committed()
    with pytest.raises(ProtocolError, match="NACK"):
        driver.answer(*nack(*seqs))


# State -> what brings a transfer there, seconds it may stay, what is said after that.
DEADLINES: dict[str, tuple[Callable[[Driver], object], float, list[str]]] = {
    "offered": (lambda b: b.offer(), 5, ["OFFER", "CANCEL offer_timeout"]),
    "deferred": (
        lambda b: (b.offer(), b.answer(wire.Lease(**REF, ttl_ms=7000))),
        7,
        ["OFFER", "CANCEL offer_timeout"],
    ),
    "granted": (lambda b: (b.offer(), b.grant()), 30, ["OFFER", "CANCEL stalled"]),
    "streaming": (
        lambda b: (b.offer(), b.grant(), b.ready(0, 1), b.send_one()),
        30,
        ["OFFER", "CANCEL stalled"],
    ),
    "committed": (lambda b: b.committed(), 10, ["OFFER", "COMMIT", "CANCEL done_timeout"]),
}


@pytest.mark.parametrize("state", DEADLINES)
def test_every_wait_has_a_deadline_and_ends_when_cancel_is_answered(
    driver: Driver, state: str
) -> None:
    bring, seconds, words = DEADLINES[state]
    bring(driver)
    driver.pass_time(seconds - 0.1)
    assert driver.session.open_transfers == 1
    driver.pass_time(0.2)
    assert driver.said() == words
    assert not any(isinstance(event, SendEnded) for event in driver.events)
    driver.answer(wire.Cancelled(**REF))
    assert isinstance(driver.events[-1], SendEnded)
    assert driver.events[-1].reason == words[-1].removeprefix("CANCEL ")
    assert not driver.session.open_transfers
    assert driver.session.tick(driver.clock.now) is None


def test_a_connection_that_never_stands_has_a_deadline_too() -> None:
    driver = Driver(connected=False)
    driver.offer()
    driver.pass_time(5.1)
    assert driver.events == [SendEnded(KEY, 0, "dial_timeout")]
    driver.session.peer_up(driver.peer)
    assert driver.said() == []


def test_a_cancel_without_answer_closes_the_connection_and_only_then_frees(driver: Driver) -> None:
    driver.offer()
    driver.grant()
    driver.ready()
    driver.session.cancel(KEY, 0, "aborted")
    driver.pass_time(5.1)
    assert driver.disconnected == [driver.peer]
    assert driver.events[1:] == []
    driver.session.peer_down(driver.peer, "CANCEL was not answered")
    assert driver.events[1:] == [SendEnded(KEY, 0, "aborted")]


def test_progress_on_either_side_keeps_a_stream_alive(driver: Driver) -> None:
    driver.offer()
    driver.grant()
    for layer in range(LAYERS):
        driver.pass_time(29)
        driver.ready(layer, layer + 1)
        driver.pass_time(29)
        driver.send_one()
    assert driver.said() == ["OFFER"]


def test_a_lease_is_renewed_from_its_receipt_but_not_without_end(driver: Driver) -> None:
    driver.offer()
    driver.ready()
    driver.session.complete(KEY, 0)
    for _ in range(5):
        driver.answer(wire.Lease(**REF, ttl_ms=30_000))
        driver.pass_time(29)
    assert driver.said() == ["OFFER"]
    driver.answer(wire.Lease(**REF, ttl_ms=2**32 - 1))
    driver.pass_time(MAX_LEASE_S + 1)
    assert driver.said() == ["CANCEL offer_timeout"]


@pytest.mark.parametrize("by", ["engine", "peer", "both"])
def test_cancel_drops_what_is_queued_and_waits_for_what_is_sent(driver: Driver, by: str) -> None:
    driver.offer()
    driver.grant()
    driver.ready()
    make_header, _, done = driver.queue.pop(0)
    assert make_header() is not None
    driver.said()
    if by in ("engine", "both"):
        driver.session.cancel(KEY, 0, "aborted")
        assert driver.said() == ["CANCEL aborted"]
    if by in ("peer", "both"):
        driver.answer(wire.Cancel(**REF, reason="timeout"))
    if by in ("engine", "both"):
        driver.answer(wire.Cancelled(**REF))
    driver.ready(0, 1)
    assert [driver.send_one(), driver.send_one()] == [False, False]
    assert not driver.queue
    assert driver.said() == []
    assert len(driver.events) == 1
    done(b"01234567")
    assert driver.said() == ([] if by == "engine" else ["CANCELLED"])
    reason = "timeout" if by == "peer" else "aborted"
    assert driver.events[1:] == [SendEnded(KEY, 0, reason)]


def test_both_sides_cancelling_at_once_answer_once_each(driver: Driver) -> None:
    driver.offer()
    driver.session.cancel(KEY, 0, "aborted")
    driver.answer(wire.Cancel(**REF, reason="timeout"))
    driver.answer(wire.Cancelled(**REF))
    assert driver.said() == ["OFFER", "CANCEL aborted", "CANCELLED"]
    assert driver.events == [SendEnded(KEY, 0, "aborted")]


def test_a_peers_reason_reaches_log_lines_only_as_a_word(driver: Driver) -> None:
    driver.offer()
    driver.answer(wire.Cancel(**REF, reason="x\nERROR all is lost"))
    assert driver.events == [SendEnded(KEY, 0, "cancelled_by_peer")]


def test_a_cancel_of_an_unknown_transfer_is_answered(driver: Driver) -> None:
    driver.answer(wire.Cancel(**{**REF, "epoch": 9}))
    assert driver.said() == ["CANCELLED"]


def test_cancel_after_done_tells_d_once_while_it_is_remembered(driver: Driver) -> None:
    driver.committed()
    driver.answer(wire.Done(**REF))
    driver.said()
    driver.session.cancel(KEY, 0, "stopped")
    driver.session.cancel(KEY, 0, "stopped")
    assert driver.said() == ["CANCEL stopped"]
    driver.answer(wire.Cancelled(**REF))
    assert len(driver.events) == 2


def test_another_peer_changes_nothing(driver: Driver) -> None:
    driver.offer()
    stranger: Any = SimPeer(ADDRESS, HELLO)
    driver.session.message(stranger, wire.Grant(**REF), b"")
    driver.session.message(stranger, wire.Cancel(**REF), b"")
    assert driver.events == []
    driver.session.peer_down(stranger, "closed")
    assert driver.session.open_transfers == 1


def test_a_d_that_drains_gets_no_new_offer_and_its_old_transfers_finish(driver: Driver) -> None:
    driver.offer()
    driver.answer(wire.Goaway())
    driver.offer(TransferKey("c" * 32, 0))
    assert driver.events == [SendEnded(TransferKey("c" * 32, 0), 0, "draining")]
    driver.grant()
    assert driver.said() == ["OFFER"]
    assert driver.events[-1] == SendGranted(KEY, 0, "d1")


def test_one_connection_serves_all_transfers_that_waited_for_it() -> None:
    driver = Driver(connected=False)
    keys = [TransferKey(f"{n:032x}", 0) for n in range(3)]
    for key in keys:
        driver.offer(key)
    driver.session.dial_failed(Address("127.0.0.8", 21001), "unreachable")
    assert driver.events == []
    driver.session.peer_up(driver.peer)
    assert driver.said() == ["OFFER"] * 3
    driver.session.peer_down(driver.peer, "closed")
    assert driver.events == [SendEnded(key, 0, "peer_lost") for key in keys]


def test_frames_keep_within_what_d_takes(driver: Driver) -> None:
    driver.peer.layout = wire.Layout(
        factors={}, layers=(0, 1, 2), kv_heads=2, head_dim=1, block_size=4, dtype="float32",
        block_bytes=64, max_tokens=100, max_data_bytes=128,
    )  # fmt: skip
    driver.session.peer_up(driver.peer)
    driver.offer()
    driver.grant()
    driver.session.ready(KEY, 0, [ReadyArea(Area(0, 3, 0, 3), BLOCKS)])
    assert [sum(map(len, views)) for _, views, _ in driver.queue] == [128, 64] * 3


def test_what_has_piled_up_goes_in_fewer_frames_that_stay_below_the_bound():
    def ready(first, end, blocks=(7, 8), first_block=0):
        return ReadyArea(Area(first, end, first_block, first_block + len(blocks)), blocks)

    layers = [ready(n, n + 1) for n in range(5)]
    assert joined(layers, block_bytes=10, most_bytes=40) == [ready(0, 2), ready(2, 4), ready(4, 5)]
    assert joined(layers, block_bytes=10, most_bytes=10**6) == [ready(0, 5)]
    for most_bytes in (0, 39):
        assert joined(layers, block_bytes=10, most_bytes=most_bytes) == layers
    apart = [ready(0, 1), ready(2, 3), ready(3, 4, (9, 9)), ready(4, 5, (9, 9), 2)]
    assert joined(apart, block_bytes=1, most_bytes=10**6) == apart

"""The transport's small parts, without sockets."""

from itertools import pairwise
from random import Random

import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_kv.metrics import EndpointCounters, RateLimit
from xpyd_kv.transport.body import (
    MAX_VIEWS_PER_CALL,
    TURN_BYTES,
    Cursor,
    Departure,
    checksum,
)

sizes = st.lists(st.integers(0, 40), max_size=30)


def _views(lengths, fill=None):
    buffers = [bytearray(length) for length in lengths]
    if fill is not None:
        at = 0
        for buffer in buffers:
            buffer[:] = fill[at : at + len(buffer)]
            at += len(buffer)
    return [memoryview(buffer) for buffer in buffers]


@settings(deadline=None)
@given(sizes, st.randoms(use_true_random=False), st.integers(1, 100))
def test_a_cursor_gives_every_byte_once_in_order(lengths, random, window):
    content = bytes(i % 251 for i in range(sum(lengths)))
    cursor = Cursor(_views(lengths, content))
    sent = b""
    while cursor.left:
        views = cursor.window(window)
        offered = b"".join(views)
        assert offered
        taken = random.randint(1, len(offered))
        sent += offered[:taken]
        cursor.advance(taken)
    assert sent == content


@settings(deadline=None)
@given(sizes, st.lists(st.integers(1, 50), min_size=60, max_size=60))
def test_a_cursor_is_written_through_in_order(lengths, pieces):
    content = bytes(i % 251 for i in range(sum(lengths)))
    views = _views(lengths)
    cursor = Cursor(views)
    rest = memoryview(content)
    for piece in pieces:
        cursor.write(rest[:piece])
        rest = rest[piece:]
    cursor.write(rest)
    assert cursor.left == 0
    assert b"".join(views) == content


def test_a_window_is_never_more_than_one_call_takes():
    cursor = Cursor([memoryview(b"x")] * 3000)
    assert len(cursor.window(10**9)) == MAX_VIEWS_PER_CALL


def test_a_window_is_as_large_as_asked_where_so_much_is_left():
    cursor = Cursor([memoryview(bytes(1000))] * 100)
    assert list(map(len, cursor.window(10_000))) == [1000] * 10
    cursor.advance(500)
    assert list(map(len, cursor.window(10_100))) == [500, *[1000] * 9, 600]
    assert list(map(len, cursor.window(300))) == [300]
    cursor.advance(99_000)
    assert list(map(len, cursor.window(10_000))) == [500]
    cursor.advance(500)
    assert cursor.window(10_000) == []


@settings(deadline=None)
@given(st.binary(max_size=500), st.lists(st.integers(0, 500), max_size=5))
def test_the_checksum_is_that_of_the_joined_bytes(content, places):
    edges = [0, *sorted(min(p, len(content)) for p in places), len(content)]
    views = [memoryview(content)[a:b] for a, b in pairwise(edges)]
    assert checksum(views) == xxhash.xxh3_64(content).digest()


def _cut(content, random, count):
    edges = sorted(random.randrange(len(content) + 1) for _ in range(count))
    return [memoryview(content)[a:b] for a, b in pairwise([0, *edges, len(content)])]


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([1, 1000, TURN_BYTES - 1, TURN_BYTES, TURN_BYTES + 1, 3 * TURN_BYTES + 17]),
    st.integers(0, 1000),
)
def test_a_frame_departs_whole_with_its_checksum_however_much_is_taken(size, seed):
    random = Random(seed)
    content = random.randbytes(size)
    views = _cut(content, random, random.choice([0, 5, 3000]))
    departure, sent = Departure(b"prefix", views), []
    while departure.left:
        offered = b"".join(
            departure.window(random.choice([size // 40 + 1, TURN_BYTES, 10 * TURN_BYTES]))
        )
        assert 0 < len(offered) <= TURN_BYTES + len(b"prefix") + 8
        taken = random.choice([len(offered), random.randint(1, len(offered))])
        sent.append(offered[:taken])
        departure.advance(taken)
    digest = xxhash.xxh3_64(content).digest()
    assert b"".join(sent) == b"prefix" + content + digest
    assert departure.digest() == digest


def test_a_frame_departs_in_turns_summed_up_once_the_checksum_with_the_last():
    content = bytearray(3 * TURN_BYTES)
    departure, sizes = Departure(b"prefix", [memoryview(content)]), []
    while departure.left:
        sizes.append(sum(map(len, departure.window(2**30))))
        departure.advance(sizes[-1] - 100)
        # A turn that the kernel has taken in part is not read again.
        content[sum(sizes) - 1000] ^= 0xFF
        assert sum(map(len, departure.window(2**30))) == 100
        departure.advance(100)
    assert sizes == [TURN_BYTES + 6, TURN_BYTES, TURN_BYTES + 8]
    assert departure.digest() == xxhash.xxh3_64(bytes(len(content))).digest()


def test_lines_caused_by_strangers_are_counted_and_left_out():
    limit = RateLimit(interval_s=5.0)
    assert [limit.take(now) for now in (0.0, 1.0, 4.9, 5.0, 6.0, 11.0)] == [
        0,
        None,
        None,
        2,
        None,
        1,
    ]


def test_refusals_have_a_bounded_number_of_names():
    counters = EndpointCounters()
    for number in range(1000):
        counters.refused.add(f"factor{number}")
    assert len(counters.refused) <= 65
    assert sum(counters.refused.values()) == 1000

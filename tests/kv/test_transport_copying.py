"""Runs into views: both ways do the same, refuse the same, and the one in C lets others run."""

import ctypes
import random
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_kv import native
from xpyd_kv.transport.host.shared_memory import copy_in_python, copy_with

MARGIN = 64
SIZES = [0, 1, 31, 32, 127, 128, 4096, 16383, 16384, 16385, 16384 + 159, 65536]


def built() -> ctypes.CDLL:
    library = native.library("copy_runs")
    if library is None:
        pytest.skip("built without a C compiler")
    return library


@pytest.fixture(params=["in C", "in Python"])
def copy(request):
    return copy_with(built()) if request.param == "in C" else copy_in_python


def cut(total, points):
    """Lengths, `total` in all, that end at `points` (and at none twice, but for empty ones)."""
    return [b - a for a, b in pairwise([0, *sorted(p % (total + 1) for p in points), total])]


def spread(lengths, size, rng):
    """Offsets anywhere in `size` bytes."""
    return tuple(rng.randrange(size - length + 1) for length in lengths)


def room_for(lengths, rng):
    """Memory, views of these lengths in it in any order with gaps between, and where they are."""
    order = list(range(len(lengths)))
    rng.shuffle(order)
    begins, end = {}, MARGIN
    for index in order:
        begins[index] = end + rng.randrange(MARGIN)
        end = begins[index] + lengths[index]
    room = bytearray(b"\xee" * (end + MARGIN))
    places = [slice(begins[i], begins[i] + n) for i, n in enumerate(lengths)]
    return room, [memoryview(room)[place] for place in places], places


def copies_as_said(copy, lengths, rooms, *, seed):
    rng = random.Random(seed)
    source = rng.randbytes(max(lengths, default=0) + 1000)
    offsets = spread(lengths, len(source), rng)
    content = b"".join(source[o : o + n] for o, n in zip(offsets, lengths, strict=True))
    room, views, places = room_for(rooms, rng)
    wanted, at = bytearray(room), 0
    for place, length in zip(places, rooms, strict=True):
        wanted[place] = content[at : at + length]
        at += length
    copy(memoryview(source), (offsets, tuple(lengths)), views)
    assert room == wanted  # what lies between the views, too


CUTS = st.lists(st.integers(0, 2**32), max_size=20)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from([*SIZES, 200_000]), CUTS, CUTS, st.integers(0, 99))
def test_runs_and_views_may_be_cut_as_they_like(total, runs, views, seed):
    ways = [copy_in_python]
    if native.library("copy_runs") is not None:
        ways.append(copy_with(built()))
    for copy in ways:
        copies_as_said(copy, cut(total, runs), cut(total, views), seed=seed)


@pytest.mark.parametrize("size", SIZES)
def test_blocks_of_one_size_go_where_they_belong(copy, size):
    copies_as_said(copy, [size] * 9, [size] * 9, seed=size)


def test_nothing_is_copied_into_nothing(copy):
    copy(memoryview(b""), ((), ()), [])
    copy(memoryview(b"bytes"), ((), ()), [memoryview(bytearray())])
    copies_as_said(copy, [5], [0, 0, 2, 0, 3, 0], seed=0)


def test_ten_thousand_runs_are_copied(copy):
    copies_as_said(copy, [7] * 10_000, [35] * 2_000, seed=1)


REFUSED = {
    "behind the memory": ((100,), (1,), (1,)),
    "over its end": ((0, 96), (4, 5), (9,)),
    "far away": ((2**64 - 1,), (2,), (2,)),
    "more than the views take": ((0, 10), (10, 10), (10, 9)),
    "less than the views take": ((0, 10), (10, 10), (10, 11)),
    "no room": ((0,), (1,), ()),
    "no run": ((), (), (1,)),
    "lengths that are one less": ((0, 1), (1,), (1,)),
    "offsets that are one less": ((0,), (1, 1), (1, 1)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_a_byte_is_copied(copy, case):
    offsets, lengths, rooms = REFUSED[case]
    room, views, _ = room_for(list(rooms), random.Random(2))
    before = bytes(room)
    with pytest.raises(ValueError, match="do not fit"):
        copy(memoryview(bytes(100)), (offsets, lengths), views)
    assert room == before


def test_memory_that_is_not_there_to_be_written_is_refused(copy):
    given_back = memoryview(bytearray(4))
    given_back.release()
    for view, error in ((memoryview(b"1234"), TypeError), (given_back, ValueError)):
        with pytest.raises(error):
            copy(memoryview(b"5678"), ((0,), (4,)), [view])


@pytest.mark.parametrize("views", [[b"12"], [bytearray(2), b"12"], [bytearray(2)]])
def test_an_error_keeps_no_memory_from_being_given_back(copy, views):
    memory = bytearray(b"12345678")
    source = memoryview(memory)
    targets = [memoryview(view) for view in views]
    with pytest.raises((ValueError, TypeError)) as error:
        copy(source, ((0, 1), (1, 20)), targets)
    source.release()
    memory.clear()  # BufferError if its bytes were still held
    assert error.value.__traceback__ is not None


def test_a_memory_that_was_given_back_is_refused(copy):
    source = memoryview(b"1234")
    source.release()
    with pytest.raises(ValueError, match="released"):
        copy(source, ((0,), (4,)), [memoryview(bytearray(4))])


def test_other_threads_run_python_while_c_copies():
    copy = copy_with(built())
    size = 64 << 20
    source, room = memoryview(b"\1" * size), bytearray(size)
    deadline = time.monotonic() + 60
    # One call writes the first byte long before the last. Who holds the interpreter's lock over
    # all of it shows nobody the time between: a try that misses it says nothing, one is enough.
    while True:
        room[0] = room[-1] = 0
        copier = threading.Thread(target=copy, args=(source, ((0,), (size,)), [memoryview(room)]))
        copier.start()
        while not room[0]:
            assert time.monotonic() < deadline
        was_under_way = not room[-1]
        copier.join(60)
        assert room[-1]
        if was_under_way:
            return
        assert time.monotonic() < deadline


def test_a_library_that_is_not_there_is_none_and_python_does_it():
    assert native.library("no_such_thing") is None
    assert copy_with(None) is copy_in_python

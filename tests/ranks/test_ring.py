"""The ring: one writer, many readers, bounded; between threads here, between processes in
test_instance."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest

from xpyd_worker.ranks.link.ring import (
    MAX_MESSAGE_BYTES,
    GivenUpError,
    NotReadError,
    RingError,
    RingFds,
    RingReader,
    RingWriter,
    make_ring,
)

SIZE = 4096
LONG_S = 60.0


@pytest.fixture
def fds() -> Iterator[RingFds]:
    made = make_ring(2, SIZE)
    yield made
    made.close()


def readers_of(fds: RingFds) -> list[RingReader]:
    return [RingReader(fds.of_reader(index)) for index in range(len(fds.come))]


def test_every_reader_gets_every_message_in_order(fds: RingFds) -> None:
    writer, readers = RingWriter(fds), readers_of(fds)
    sent = [b"", b"a", b"bc" * 100]
    for message in sent:
        writer.write(message, within_s=LONG_S)
    for reader in readers:
        assert [reader.read(LONG_S) for _ in sent] == sent
        assert reader.read(0) is None


def test_nothing_comes_in_time_when_nothing_was_written(fds: RingFds) -> None:
    assert RingReader(fds.of_reader(0)).read(0.01) is None


def test_lengths_of_all_kinds_go_round_the_ring_many_times(fds: RingFds) -> None:
    """Among them ones that do not fit into the ring, and cuts at its end at any byte."""
    numbers = random.Random(5)
    sent = [os.urandom(numbers.choice((0, 1, 7, 500, SIZE, 3 * SIZE))) for _ in range(300)]
    got: list[list[bytes | None]] = [[], []]

    def read(index: int, reader: RingReader) -> None:
        got[index] = [reader.read(LONG_S) for _ in sent]

    threads = [
        threading.Thread(target=read, args=(index, reader), daemon=True)
        for index, reader in enumerate(readers_of(fds))
    ]
    for thread in threads:
        thread.start()
    writer = RingWriter(fds)
    for message in sent:
        writer.write(message, within_s=LONG_S)
    for thread in threads:
        thread.join(LONG_S)
    assert got == [sent, sent]


def test_a_reader_that_does_not_read_is_named_when_the_ring_is_full(fds: RingFds) -> None:
    writer, (reader, _) = RingWriter(fds), readers_of(fds)
    for _ in range(4):
        writer.write(b"x" * 1000, within_s=0.01)
        assert reader.read(LONG_S) == b"x" * 1000
    with pytest.raises(NotReadError) as found:
        writer.write(b"x" * 1000, within_s=0.01)
    assert found.value.reader == 1


def test_who_waits_for_room_can_be_called_away(fds: RingFds) -> None:
    writer, gone = RingWriter(fds), os.eventfd(0)
    for _ in range(4):
        writer.write(b"x" * 1000, within_s=LONG_S, unless=gone)
    os.eventfd_write(gone, 1)
    with pytest.raises(GivenUpError):
        writer.write(b"x" * 1000, within_s=LONG_S, unless=gone)
    os.close(gone)


def test_what_was_not_read_is_not_written_over(fds: RingFds) -> None:
    writer, readers = RingWriter(fds), readers_of(fds)
    sent = [bytes([n]) * 1000 for n in range(4)]
    for message in sent:
        writer.write(message, within_s=0.01)
    with pytest.raises(NotReadError):
        writer.write(b"x" * 1000, within_s=0.01)
    assert [readers[1].read(0) for _ in sent] == sent


def test_too_long_a_message_is_refused_before_anything_is_written(fds: RingFds) -> None:
    writer, (reader, _) = RingWriter(fds), readers_of(fds)
    with pytest.raises(RingError, match="are allowed"):
        writer.write(bytes(MAX_MESSAGE_BYTES + 1), within_s=LONG_S)
    assert reader.read(0) is None


@pytest.mark.parametrize("length", [MAX_MESSAGE_BYTES + 1, SIZE])
def test_a_length_that_no_writer_writes_is_not_believed(fds: RingFds, length: int) -> None:
    reader = RingReader(fds.of_reader(0))
    os.pwrite(fds.memory, length.to_bytes(4, "little") + bytes(4), 0)
    os.eventfd_write(fds.come[0], 100)
    with pytest.raises(RingError, match="where none can be"):
        reader.read(0)


def test_who_reads_more_than_there_is_is_found_out(fds: RingFds) -> None:
    writer = RingWriter(fds)
    for counter in fds.taken:
        os.eventfd_write(counter, 10_000)
    for _ in range(4):
        writer.write(b"x" * 1000, within_s=0.01)
    with pytest.raises(RingError, match="has read more"):
        writer.write(b"x" * 1000, within_s=0.01)


def test_a_closed_ring_leaves_no_descriptor_open() -> None:
    made = make_ring(2, SIZE)
    assert len(made.all()) == 5
    made.close()
    for descriptor in made.all():
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)

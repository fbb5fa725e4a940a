"""Which bytes of a checkpoint are still to come, and which checksums they must have."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xpyd_worker.download.plan import Checksum, Digester, Part, RemoteFile, parts_of

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted), max_size=6)


@given(size=st.integers(0, 40), written=RANGES, part_bytes=st.integers(1, 50))
@example(size=40, written=[[0, 10]], part_bytes=50)  # an earlier run cut smaller parts
@example(size=40, written=[[0, 40]], part_bytes=7)  # ... or larger ones
def test_each_missing_byte_comes_once_however_an_earlier_run_cut_its_parts(
    size: int, written: list[list[int]], part_bytes: int
) -> None:
    file = RemoteFile("model.safetensors", size, "tag")
    have = [Part(file.name, "tag", begin, min(end, size)) for begin, end in written if begin < size]
    others = [Part(file.name, "older", 0, size), Part("config.json", "tag", 0, size)]
    found = parts_of(file, [*have, *others], part_bytes)
    coming = [at for part in found for at in range(part.begin, part.end)]
    there = {at for part in have for at in range(part.begin, part.end)}
    assert coming == sorted(set(range(size)) - there)
    assert all(0 < part.end - part.begin <= part_bytes for part in found)
    assert all((part.name, part.tag) == (file.name, "tag") for part in found)


CRC64NVME, CRC32C = ("crc64nvme", 0x9A6C9329AC4BC9B5, 64), ("crc32c", 0x82F63B78, 32)


def bit_by_bit(data: bytes, polynomial: int, bits: int) -> str:
    """The CRC as its definition has it."""
    value = (1 << bits) - 1
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (polynomial if value & 1 else 0)
    return f"{value ^ (1 << bits) - 1:0{bits // 4}x}"


@pytest.mark.parametrize(
    ("algorithm", "check"), [("crc64nvme", "ae8b14860a799888"), ("crc32c", "e3069283")]
)
def test_a_crc_of_nine_digits_is_what_its_standard_says(algorithm: Any, check: str) -> None:
    digester = Digester(RemoteFile("f", 9, "tag", Checksum(algorithm, check)))
    digester.update(b"123456789")
    assert digester.mismatch() == ""


@pytest.mark.parametrize("crc", [CRC64NVME, CRC32C], ids=["crc64nvme", "crc32c"])
@pytest.mark.parametrize("size", [0, 1, 9, 32767, 32768, 32769, 65536, 100_001])
def test_a_crc_is_right_however_the_bytes_come(crc: tuple[Any, int, int], size: int) -> None:
    algorithm, polynomial, bits = crc
    data = random.Random(size).randbytes(size)
    right = bit_by_bit(data, polynomial, bits)
    for cut in (1, size // 3, 32768, size):
        digester = Digester(RemoteFile("f", size, "tag", Checksum(algorithm, right)))
        digester.update(data[:cut])
        digester.update(data[cut:])
        assert digester.mismatch() == ""

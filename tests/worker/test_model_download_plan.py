"""Which bytes of a checkpoint are still to come: each missing one once, whatever is there."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from xpyd_worker.download.plan import Part, RemoteFile, parts_of

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

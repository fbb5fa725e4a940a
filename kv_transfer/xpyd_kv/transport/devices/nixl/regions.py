"""Registered memory as one row of bytes, how a frame's bytes are found in two of them, and REGION's
body. Pure.

P's row is what a SHARED frame's runs count in; D's row is where they go. Both rows are cut into
units of one size, so that NIXL can check and prepare them once and a frame names numbers only.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from operator import attrgetter
from typing import NamedTuple

from xpyd_core.errors import ProtocolError
from xpyd_kv.memory.device import DeviceView, View
from xpyd_kv.spans import Span, cut, join, locate
from xpyd_kv.transport.host.shared_memory import address_of

HOST = -1
"""`device` of memory that the CPU sees."""


class NixlRegion(NamedTuple):
    """`length` bytes from `address` on; of GPU `device`, or HOST."""

    address: int
    length: int
    device: int


class Row:
    """Regions one behind another. They do not overlap."""

    def __init__(self, regions: Sequence[NixlRegion]) -> None:
        self.regions = tuple(sorted(regions))
        self._starts = [region.address for region in self.regions]
        self._offsets = [0, *accumulate(region.length for region in self.regions)]
        self.size_bytes = self._offsets[-1]

    @property
    def devices(self) -> set[int]:
        """Where its regions are."""
        return {region.device for region in self.regions}

    def is_of_units(self, unit: int) -> bool:
        """Whether each region is whole units long."""
        return unit > 0 and all(not region.length % unit for region in self.regions)

    def offset_of(self, span: NixlRegion) -> int | None:
        """Where in the row these bytes are; None when some are not in it."""
        index = bisect_right(self._starts, span.address) - 1
        if index < 0:
            return None
        region = self.regions[index]
        inside = span.address - region.address
        if region.device != span.device or inside > region.length - span.length:
            return None
        return self._offsets[index] + inside

    def runs_of(self, spans: Iterable[NixlRegion], *, at_most: int) -> list[Span] | None:
        """Where these bytes are, neighbours joined; None when some are not in the row, or in more
        than `at_most` places."""
        offsets: list[int] = []
        lengths: list[int] = []
        for span in spans:
            if not span.length:
                continue
            offset = self.offset_of(span)
            if offset is None:
                return None
            offsets.append(offset)
            lengths.append(span.length)
        runs = join(offsets, lengths)
        return runs if len(runs) <= at_most else None

    def spans_of(self, runs: Iterable[Span]) -> list[NixlRegion]:
        """The addresses of runs that lie inside of the row."""
        spans: list[NixlRegion] = []
        for run in runs:
            for index, inside, length in locate(self._offsets, *run):
                region = self.regions[index]
                spans.append(NixlRegion(region.address + inside, length, region.device))
        return spans


def region_of(view: View) -> NixlRegion:
    """Where a view's bytes are. TypeError for a read-only memoryview."""
    if isinstance(view, DeviceView):
        return NixlRegion(view.address, view.length, view.device)
    if not len(view):
        return NixlRegion(0, 0, HOST)
    return NixlRegion(address_of(view), len(view), HOST)


def joined(regions: Iterable[NixlRegion]) -> list[NixlRegion]:
    """Join neighbouring regions; the bytes and their order stay."""
    found: list[NixlRegion] = []
    for device, group in groupby(regions, key=attrgetter("device")):
        its = list(group)
        spans = join((one.address for one in its), (one.length for one in its))
        found += [NixlRegion(*span, device) for span in spans]
    return found


def unit_numbers(places: Iterable[Span], unit: int) -> list[int] | None:
    """The numbers of all units that these places are made of, in order; None where one begins or
    ends inside of a unit."""
    numbers: list[int] = []
    for offset, length in places:
        if offset % unit or length % unit:
            return None
        numbers.extend(range(offset // unit, (offset + length) // unit))
    return numbers


def cuts(
    targets: Sequence[NixlRegion], sources: Sequence[NixlRegion]
) -> Iterator[tuple[NixlRegion, NixlRegion]]:
    """Two lists of equal length in all, cut where either is cut: where to, where from."""
    for piece in cut([one.length for one in targets], [one.length for one in sources]):
        yield (
            _part(targets[piece.target], piece.target_offset, piece.length),
            _part(sources[piece.source], piece.source_offset, piece.length),
        )


def _part(region: NixlRegion, offset: int, length: int) -> NixlRegion:
    return NixlRegion(region.address + offset, length, region.device)


_HEAD = struct.Struct("<II")
_REGION = struct.Struct("<QQi")
_MAX_UNIT_BYTES = 2**31 - 1
_MAX_ADDRESS = 2**63 - 1
_MAX_DEVICE = 1023


class Described(NamedTuple):
    """`unit_bytes`: one block of one layer. `metadata`: opaque, for the agent."""

    row: Row
    unit_bytes: int
    metadata: bytes


def pack(described: Described) -> bytes:
    """Encode a row, little-endian: u32 bytes of a unit, u32 number of regions; for each u64
    address, u64 length, i32 device (-1 the CPU's); then the metadata."""
    regions = described.row.regions
    head = _HEAD.pack(described.unit_bytes, len(regions))
    return head + b"".join(_REGION.pack(*region) for region in regions) + described.metadata


def unpack(body: bytes, size_bytes: int) -> Described:
    """Decode a row. ProtocolError for a body that lies, or a row of another size."""
    if len(body) < _HEAD.size:
        raise ProtocolError("REGION without its body")
    unit, count = _HEAD.unpack_from(body)
    end = _HEAD.size + count * _REGION.size
    if not 0 < unit <= _MAX_UNIT_BYTES or not count or end >= len(body):
        raise ProtocolError("REGION with an impossible unit or number of regions")
    regions = [NixlRegion(*fields) for fields in _REGION.iter_unpack(body[_HEAD.size : end])]
    if any(not _is_possible(region) for region in regions):
        raise ProtocolError("REGION with an impossible region")
    row = Row(regions)
    if row.size_bytes != size_bytes or len(row.devices) != 1:
        raise ProtocolError("REGION of another size than announced, or of two devices")
    return Described(row, unit, body[end:])


def _is_possible(region: NixlRegion) -> bool:
    fits = 0 < region.length <= _MAX_ADDRESS - region.address <= _MAX_ADDRESS
    return fits and HOST <= region.device <= _MAX_DEVICE

"""REGION's body where the transport is `nixl`: P's row, and NIXL's own description of it. Pure."""

from __future__ import annotations

import struct
from typing import NamedTuple

from xpyd_core.errors import ProtocolError
from xpyd_kv.transport.nixl.regions import HOST, Region, Row

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
    """As it travels, little-endian: u32 bytes of a unit, u32 number of regions; for each u64
    address, u64 length, i32 device (-1 the CPU's); then the metadata."""
    regions = described.row.regions
    head = _HEAD.pack(described.unit_bytes, len(regions))
    return head + b"".join(_REGION.pack(*region) for region in regions) + described.metadata


def unpack(body: bytes, size_bytes: int) -> Described:
    """Its opposite. ProtocolError for a body that lies, or a row of another size."""
    if len(body) < _HEAD.size:
        raise ProtocolError("REGION without its body")
    unit, count = _HEAD.unpack_from(body)
    end = _HEAD.size + count * _REGION.size
    if not 0 < unit <= _MAX_UNIT_BYTES or not count or end >= len(body):
        raise ProtocolError("REGION with an impossible unit or number of regions")
    regions = [Region(*fields) for fields in _REGION.iter_unpack(body[_HEAD.size : end])]
    if any(not _is_possible(region) for region in regions):
        raise ProtocolError("REGION with an impossible region")
    row = Row(regions)
    if row.size_bytes != size_bytes or len(row.devices) != 1:
        raise ProtocolError("REGION of another size than announced, or of two devices")
    return Described(row, unit, body[end:])


def _is_possible(region: Region) -> bool:
    fits = 0 < region.length <= _MAX_ADDRESS - region.address <= _MAX_ADDRESS
    return fits and HOST <= region.device <= _MAX_DEVICE

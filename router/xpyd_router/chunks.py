"""HTTP/1.1's chunk framing, as far as both sides of the router share it. Pure.

`upstream` reads chunks, `serving` writes them, and `requests.relay` passes whole ones on.
"""

from __future__ import annotations

KNOWN_LINES = 4096
CHUNK_LINES: tuple[bytes, ...] = tuple(b"%x\r\n" % size for size in range(KNOWN_LINES))
"""By a chunk's size: to look one up takes a tenth of the time that formatting takes."""
_LONGEST_OF_TWO_DIGITS = 255 + 6


def size_in(frame_bytes: int) -> int:
    """The payload's size in a frame that is one chunk of 16 to 4,095 bytes, which two or three
    digits tell. Of other frames it is wrong, and then not what their length line says.
    """
    return frame_bytes - 6 if frame_bytes <= _LONGEST_OF_TWO_DIGITS else frame_bytes - 7

"""How bytes come from beside the cache into its blocks, and back: at once on a CPU, by a stream of
its own on a GPU.

Of the process whose cache it is, on one thread of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from xpyd_kv.device.api import Device, Event, View, on_host


class Copier:
    """Copies within the memory of `device`, and between it and pinned memory; None: the host's."""

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self._stream = device.stream() if device is not None else None

    def copy(self, targets: Sequence[View], sources: Sequence[View]) -> Event | None:
        """Begin to copy the bytes of all sources, in order, to all targets, each source as long as
        some targets together; when that is through (None: it is). DeviceError."""
        if self._device is None or self._stream is None:
            _copy_now(on_host(targets), on_host(sources))
            return None
        # The blocks' last readers may still be under way on the model's stream.
        self._stream.wait(self._device.compute_stream().record())
        self._stream.copy(targets, sources)
        return self._stream.record()

    def close(self, deadline_s: float) -> bool:
        """Wait for what is under way and give the stream back; whether it ended in time."""
        if self._stream is None:
            return True
        has_ended = self._stream.record().wait(deadline_s)
        self._stream.close()
        return has_ended


def _copy_now(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    following = iter(targets)
    for source in sources:
        offset = 0
        while offset < len(source):
            target = next(following)
            target[:] = source[offset : offset + len(target)]
            offset += len(target)

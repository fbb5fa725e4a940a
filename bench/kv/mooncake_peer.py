"""Mooncake's transfer engine over TCP: P writes into D's registered memory, one descriptor for
each run, as many in one request as its queue takes."""

from __future__ import annotations

from typing import Any

from mooncake.engine import TransferEngine

from bench.kv.contender import Place
from bench.kv.shape import Case

_MOST = 1024
"""Descriptors of one request: of 16,384 some are refused, and the request fails."""


def _engine(place: Place) -> Any:
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("mooncake does not start")
    if engine.register_memory(place.arena.address, place.arena.array.nbytes):
        raise RuntimeError("mooncake does not take the memory")
    return engine


class MooncakeReceiver:
    def __init__(self, place: Place) -> None:
        self._ring = place.ring
        self._engine = _engine(place)
        port = self._engine.get_rpc_port()
        self.address = {"peer": f"127.0.0.1:{port}", "base": place.arena.address}

    def accept(self) -> None:
        """P looks it up."""

    def receive(self, case: Case) -> list[int]:
        """D does nothing: P writes."""
        return self._ring.take(case.blocks, case.layout)

    def close(self) -> None:
        """The process ends."""


class MooncakeSender:
    def __init__(self, place: Place, address: Any) -> None:
        self._place, self._base, self._peer = place, address["base"], address["peer"]
        self._engine = _engine(place)

    def send(self, case: Case) -> list[int]:
        ids = self._place.ring.take(case.blocks, case.layout)
        far = self._place.far_ring.take(case.blocks, case.layout)
        own, lengths = self._places(self._place.arena.address, ids, case)
        theirs, _ = self._places(self._base, far, case)
        for first in range(0, len(own), _MOST):
            part = slice(first, first + _MOST)
            if self._engine.batch_transfer_sync_write(
                self._peer, own[part], theirs[part], lengths[part]
            ):
                raise RuntimeError("mooncake: the transfer failed")
        return ids

    def _places(self, base: int, ids: list[int], case: Case) -> tuple[list[int], list[int]]:
        runs = self._place.arena.runs(ids, case.layout)
        return [base + offset for offset, _ in runs], [length for _, length in runs]

    def close(self) -> None:
        """The process ends."""


def make_receiver(place: Place) -> MooncakeReceiver:
    return MooncakeReceiver(place)


def make_sender(place: Place, address: Any) -> MooncakeSender:
    return MooncakeSender(place, address)

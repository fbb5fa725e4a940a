"""nixl with its UCX backend: P writes into D's registered memory, one descriptor for each run."""

from __future__ import annotations

import base64
import time
from typing import Any

from nixl._api import nixl_agent, nixl_agent_config

from bench.kv.contender import WAIT_S, Place
from bench.kv.shape import Case

_DEVICE = 0


def _agent(name: str, place: Place) -> Any:
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    whole = (place.arena.address, place.arena.array.nbytes, _DEVICE, "")
    agent.register_memory([whole], "DRAM")
    return agent


class NixlReceiver:
    def __init__(self, place: Place) -> None:
        self._ring = place.ring
        self._agent = _agent("D", place)
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self.address = {"metadata": metadata, "base": place.arena.address}

    def accept(self) -> None:
        """P reads the metadata."""

    def receive(self, case: Case) -> list[int]:
        """D does nothing: P writes."""
        return self._ring.take(case.blocks, case.layout)

    def close(self) -> None:
        """The process ends."""


class NixlSender:
    def __init__(self, place: Place, address: Any) -> None:
        self._place, self._base = place, address["base"]
        self._agent = _agent("P", place)
        self._peer = self._agent.add_remote_agent(base64.b64decode(address["metadata"]))

    def send(self, case: Case) -> list[int]:
        ids = self._place.ring.take(case.blocks, case.layout)
        far = self._place.far_ring.take(case.blocks, case.layout)
        own = self._descriptors(self._place.arena.address, ids, case)
        theirs = self._descriptors(self._base, far, case)
        handle = self._agent.initialize_xfer("WRITE", own, theirs, self._peer)
        state = self._agent.transfer(handle)
        deadline = time.monotonic() + WAIT_S
        while state == "PROC":
            if time.monotonic() > deadline:
                raise TimeoutError("nixl does not end")
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"nixl: {state}")
        return ids

    def _descriptors(self, base: int, ids: list[int], case: Case) -> Any:
        runs = self._place.arena.runs(ids, case.layout)
        places = [(base + offset, length, _DEVICE) for offset, length in runs]
        return self._agent.get_xfer_descs(places, "DRAM")

    def close(self) -> None:
        """The process ends."""


def make_receiver(place: Place) -> NixlReceiver:
    return NixlReceiver(place)


def make_sender(place: Place, address: Any) -> NixlSender:
    return NixlSender(place, address)

"""torch.distributed's gloo: send and recv of each layer, one tensor at a time.

It sends contiguous tensors only: paged blocks are gathered before and scattered behind.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.kv.contender import WAIT_S, Place
from bench.kv.shape import LAYERS, Case

_TIMEOUT = timedelta(seconds=WAIT_S)


class _Gloo:
    def __init__(self, place: Place) -> None:
        torch.set_num_threads(1)
        self._ring = place.ring
        # As words: byte by byte its index operations take four times as long.
        self._layers = torch.from_numpy(place.arena.array).view(torch.int64)
        self._byte = torch.zeros(1, dtype=torch.uint8)

    def _join(self, path: str, rank: int) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=_TIMEOUT
        )

    def close(self) -> None:
        dist.destroy_process_group()


class GlooReceiver(_Gloo):
    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.address = str(Path(place.folder) / "gloo")

    def accept(self) -> None:
        self._join(self.address, 1)

    def receive(self, case: Case) -> list[int]:
        ids = self._ring.take(case.blocks, case.layout)
        index = torch.tensor(ids)
        for layer in range(LAYERS):
            blocks = self._layers[layer]
            if case.layout == "whole":
                dist.recv(blocks[ids[0] : ids[0] + len(ids)], 0)
            else:
                staged = torch.empty((len(ids), blocks.shape[1]), dtype=blocks.dtype)
                dist.recv(staged, 0)
                blocks.index_copy_(0, index, staged)
        dist.send(self._byte, 0)
        return ids


class GlooSender(_Gloo):
    def __init__(self, place: Place, address: Any) -> None:
        super().__init__(place)
        self._join(address, 0)

    def send(self, case: Case) -> list[int]:
        ids = self._ring.take(case.blocks, case.layout)
        index = torch.tensor(ids)
        for layer in range(LAYERS):
            blocks = self._layers[layer]
            if case.layout == "whole":
                dist.send(blocks[ids[0] : ids[0] + len(ids)], 1)
            else:
                dist.send(blocks.index_select(0, index), 1)
        dist.recv(self._byte, 1)
        return ids


def make_receiver(place: Place) -> GlooReceiver:
    return GlooReceiver(place)


def make_sender(place: Place, address: Any) -> GlooSender:
    return GlooSender(place, address)

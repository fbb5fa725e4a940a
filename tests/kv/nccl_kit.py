"""NCCL for the transport's tests: the fake over fake GPUs, the library over real ones."""

from __future__ import annotations

from typing import Any

from tests.kv.gpu_kit import FakeGpus, Gpus
from tests.kv.nccl_fake import FakeNccl, World
from xpyd_kv.transport.devices.nccl.communicators import Communicators
from xpyd_kv.transport.devices.nccl.library import NcclLimits, load
from xpyd_kv.transport.devices.nccl.path import NcclPath


class NcclWorld:
    """Both sides' NCCL in one test, and what the worker would be told to end for."""

    def __init__(self, gpus: Gpus) -> None:
        self.gpus = gpus
        self.world = World(gpus.machine) if isinstance(gpus, FakeGpus) else None
        self.given_up: list[str] = []
        self.communicators: dict[str, Communicators] = {}

    def nccl(self, device: Any) -> Any:
        if self.world is None:
            return load(device.current)
        return FakeNccl(self.world, device)

    def path(self, role: str, *, unit_bytes: int, **limits: Any) -> NcclPath:
        device: Any = self.gpus.p if role == "P" else self.gpus.d
        limits_ = NcclLimits(**limits)
        made = Communicators(self.nccl(device), device, limits_, give_up=self.given_up.append)
        self.communicators[role] = made
        return NcclPath(made, unit_bytes=unit_bytes, lends=role == "P")

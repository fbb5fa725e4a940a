"""The KV cache's share of a GPU's memory, over a fake of the device's counters."""

from __future__ import annotations

import pytest

from xpyd_core.errors import UserError
from xpyd_worker.runner.gpu_memory import Profile, kv_cache_bytes, profile

GIB = 1 << 30


class Device:
    """80 GiB: 2 of others, 1 of workspaces, 16 of weights; a step takes 3 more, and 1 of what it
    freed stays with the allocator."""

    def __init__(self) -> None:
        self.tensors, self.cached, self.most = 16 * GIB, 5 * GIB, 40 * GIB

    def total(self) -> int:
        return 80 * GIB

    def free(self) -> int:
        return 77 * GIB - self.tensors - self.cached

    def reserved(self) -> int:
        return self.tensors + self.cached

    def release(self) -> None:
        self.cached, self.most = 0, self.tensors

    def peak(self) -> int:
        return self.most

    def step(self) -> None:
        self.most, self.cached = self.tensors + 3 * GIB, GIB


def test_a_profile_has_the_peak_of_the_step_and_not_what_came_before_it() -> None:
    device = Device()
    found = profile(device, 78 * GIB, device.step)
    assert found == Profile(total=80 * GIB, others=2 * GIB, tensors=19 * GIB, workspaces=GIB)
    assert device.cached == 0


@pytest.mark.parametrize(
    ("utilization", "graphs", "left"), [(0.9, 0, 52), (0.9, 2, 50), (0.5, 0, 20), (1.0, 0, 58)]
)
def test_kv_gets_what_is_left_of_the_share_and_never_what_others_have(
    utilization: float, graphs: int, left: int
) -> None:
    found = Profile(total=80 * GIB, others=2 * GIB, tensors=19 * GIB, workspaces=GIB)
    made = kv_cache_bytes(found, utilization=utilization, graphs=graphs * GIB)
    assert made == left * GIB


def test_a_share_that_the_model_fills_is_refused_with_the_sizes_and_the_fix() -> None:
    found = Profile(total=80 * GIB, others=2 * GIB, tensors=19 * GIB, workspaces=GIB)
    with pytest.raises(
        UserError, match=r"utilization 0\.25 is 20\.0 GiB.*need 19\.0 GiB.*Raise it"
    ):
        kv_cache_bytes(found, utilization=0.25, graphs=0)

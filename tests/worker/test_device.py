"""Which device is taken, in which dtype, and how long one is waited for."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.fake_gpu import FakeMark
from xpyd_core.errors import UserError, XpydError
from xpyd_worker.runner.device import DeviceLostError, choose_device, reach, resolve_gpu_dtype


def chosen(asked: str, *, devices: int, triton: bool = True) -> str:
    return str(choose_device(asked, cuda_devices=lambda: devices, has_triton=lambda: triton))


@pytest.mark.parametrize(
    ("asked", "devices", "triton", "device"),
    [
        ("auto", 0, True, "cpu"),
        ("auto", 2, False, "cpu"),
        ("auto", 2, True, "cuda:0"),
        ("cpu", 2, True, "cpu"),
        ("cuda", 2, True, "cuda:0"),
        ("cuda:1", 2, True, "cuda:1"),
    ],
)
def test_auto_takes_a_gpu_where_one_can_be_used(
    asked: str, devices: int, triton: bool, device: str
) -> None:
    assert chosen(asked, devices=devices, triton=triton) == device


@pytest.mark.parametrize(
    ("asked", "devices", "triton", "words"),
    [
        ("cuda", 0, True, r"--device cuda: torch .* finds no CUDA device here.*--device cpu"),
        ("cuda", 1, False, "--device cuda: triton is not installed"),
        ("cuda:1", 1, True, "--device cuda:1: there are 1 CUDA devices"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_with_the_reason(
    asked: str, devices: int, triton: bool, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        chosen(asked, devices=devices, triton=triton)


def test_on_this_machine_auto_finds_what_torch_finds() -> None:
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("asked", "stored", "capability", "dtype"),
    [
        ("auto", "bfloat16", (8, 0), torch.bfloat16),
        ("auto", "bfloat16", (7, 5), torch.float16),
        ("auto", "float16", (7, 0), torch.float16),
        ("auto", "float32", (9, 0), torch.float32),
        ("bfloat16", "float32", (9, 0), torch.bfloat16),
        ("float32", "bfloat16", (7, 5), torch.float32),
    ],
)
def test_a_gpu_takes_the_checkpoints_dtype_and_float16_where_it_has_no_bfloat16(
    asked: str, stored: str, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    assert resolve_gpu_dtype(asked, stored, capability=capability) == dtype


def test_bfloat16_is_refused_where_the_gpu_has_none() -> None:
    with pytest.raises(UserError, match=r"--dtype bfloat16: .* capability 7\.5 has none"):
        resolve_gpu_dtype("bfloat16", "bfloat16", capability=(7, 5))


class Time:
    """Sleeping is what makes it pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_mark_is_looked_at_until_it_is_reached() -> None:
    time, mark = Time(), FakeMark(looks=50)
    reach(mark, within_s=1.0, what="step 3", clock=lambda: time.now, sleep=time.sleep)
    assert mark.looks == 0
    assert 0 < time.now < 0.1


def test_a_device_that_does_not_answer_ends_the_engine() -> None:
    time = Time()
    with pytest.raises(DeviceLostError, match="step 3 was not done by the device within 2 s") as at:
        reach(
            FakeMark(looks=1 << 60),
            within_s=2.0,
            what="step 3",
            clock=lambda: time.now,
            sleep=lambda _: time.sleep(0.01),
        )
    assert time.now == pytest.approx(2.0, abs=0.1)
    assert not isinstance(at.value, XpydError)

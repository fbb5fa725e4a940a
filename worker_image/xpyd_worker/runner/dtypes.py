"""Which dtype the model and its KV cache run in."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from xpyd_core.errors import UserError
from xpyd_worker.runner.device import compute_capability
from xpyd_worker.system import cpu_flags

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Ampere's.
_LEAST_CAPABILITY_BFLOAT16 = (8, 0)
# The processor multiplies floats of this kind itself; without that float32 is several times faster
# for a prompt (float16 where only avx512_bf16 is there: 3.6 times).
_FAST_FLAGS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "amx_tile", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}


def resolve_dtype(requested: str, stored: str, *, is_fast: bool) -> torch.dtype:
    """The dtype for `--dtype requested`; `auto` is the checkpoint's, `stored`, widened to float32
    where the processor is not `is_fast` in it. Raises UserError for an unknown name."""
    if requested == "auto":
        return _DTYPES[stored] if is_fast else torch.float32
    if requested not in _DTYPES:
        raise UserError(f"--dtype: {requested!r}; one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[requested]


def resolve_gpu_dtype(requested: str, stored: str, *, capability: tuple[int, int]) -> torch.dtype:
    """The same on a GPU of this compute capability, where `auto` is the checkpoint's. Below 8.0
    there is no bfloat16: `auto` takes float16 instead, as vLLM does, and asking for it is refused.
    """
    found = resolve_dtype(requested, stored, is_fast=True)
    if found != torch.bfloat16 or capability >= _LEAST_CAPABILITY_BFLOAT16:
        return found
    have = ".".join(map(str, capability))
    if requested != "auto":
        raise UserError(
            f"--dtype bfloat16: a GPU of compute capability {have} has none (8.0 and newer do); "
            "use float16 or float32"
        )
    _log.warning(
        "the checkpoint is in bfloat16, which a GPU of compute capability %s has not: float16", have
    )
    return torch.float16


def cpu_is_fast_in(dtype: str, cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor multiplies `dtype` natively (false for 16 bits where the system does
    not say)."""
    if dtype not in _FAST_FLAGS:
        return True
    return not cpu_flags(cpu_info).isdisjoint(_FAST_FLAGS[dtype])


def cpu_dtype(requested: str, stored: str) -> torch.dtype:
    """Of weights and KV on this CPU, for `--dtype requested`."""
    return resolve_dtype(requested, stored, is_fast=cpu_is_fast_in(stored))


def gpu_dtype(requested: str, stored: str, device: torch.device) -> torch.dtype:
    """Of weights and KV on this GPU, for `--dtype requested`. The GPU is logged."""
    capability = compute_capability(device)
    _log.info(
        "device %s: %s, compute capability %d.%d",
        device,
        torch.cuda.get_device_name(device),
        *capability,
    )
    return resolve_gpu_dtype(requested, stored, capability=capability)


def dtype_name(dtype: torch.dtype) -> str:
    """As checkpoints call it."""
    return str(dtype).removeprefix("torch.")

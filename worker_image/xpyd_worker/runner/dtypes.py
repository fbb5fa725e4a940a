"""Which dtype the model and its KV cache run in."""

from __future__ import annotations

from pathlib import Path

import torch

from xpyd_core.errors import UserError
from xpyd_worker.cpu_flags import cpu_flags

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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


def cpu_is_fast_in(dtype: str, cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor multiplies `dtype` natively (false for 16 bits where the system does
    not say)."""
    if dtype not in _FAST_FLAGS:
        return True
    return not cpu_flags(cpu_info).isdisjoint(_FAST_FLAGS[dtype])

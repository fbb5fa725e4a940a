"""Which dtype the model and its KV cache run in."""

from __future__ import annotations

from pathlib import Path

import torch

from xpyd_core.errors import UserError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The processor multiplies 16-bit floats itself; without them float32 is several times faster.
_FAST_16_BIT_FLAGS = ("avx512_bf16", "amx_bf16", "amx_tile", "bf16")


def resolve_dtype(requested: str, stored: str, *, has_fast_16_bit: bool) -> torch.dtype:
    """The dtype for `--dtype requested`; `auto` is the checkpoint's, `stored`, widened to float32
    where the processor is slow in 16 bits. Raises UserError for an unknown name."""
    if requested == "auto":
        return _DTYPES[stored] if has_fast_16_bit else torch.float32
    if requested not in _DTYPES:
        raise UserError(f"--dtype: {requested!r}; one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[requested]


def cpu_has_fast_16_bit(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor multiplies bfloat16 natively (false where the system does not say)."""
    try:
        text = cpu_info.read_text(errors="replace")
    except OSError:
        return False
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not set(_FAST_16_BIT_FLAGS).isdisjoint(value.split())
    return False

"""The compiled operators: which variant this processor runs, and the types that cross over.

The installation builds a library for each level of the instruction set (hatch_build.py), where it
finds a compiler. Everything is by pointer: the caller must keep the tensors alive and contiguous.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from functools import cache
from pathlib import Path

import torch

from xpyd_worker.system import cpu_flags

_log = logging.getLogger(__name__)

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
"""The sizes of heads that attention.cpp has code for."""
LANES = 16
"""Sizes of norms and activations are multiples of it: whole vectors at any level (vec.h)."""
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# Levels of x86-64's psABI, best first, with the flags in /proc/cpuinfo that tell them apart.
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi2", "f16c", "fma"},
}


class Turn(ctypes.Structure):
    """elementwise.cpp's Turn."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "cos", "sin", "query_weight", "key_weight")),
        *((name, ctypes.c_void_p) for name in ("query", "cache", "slots")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "head_dim")),
        ("block_size", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


class AttentionArguments(ctypes.Structure):
    """The structure Attention of attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "cache", "out", "tables")),
        *((name, ctypes.c_void_p) for name in ("starts", "counts", "rows")),
        *((name, ctypes.c_int64) for name in ("sequences", "table_width", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "block_size", "window")),
        ("scale", ctypes.c_float),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The operators for this processor; None where none were built or none fits."""
    for level in levels():
        found = load(level)
        if found is not None:
            return found
    return None


def levels() -> list[str]:
    """Levels whose library this processor could run, best first."""
    machine = platform.machine()
    if machine != "x86_64":
        return [machine]
    flags = cpu_flags()
    return [level for level, needs in _LEVELS.items() if needs <= flags]


def load(level: str) -> ctypes.CDLL | None:
    """One level's library; None where it was not built or does not load. Its threads are torch's
    own: both use the one OpenMP library that torch has loaded."""
    path = Path(__file__).with_name(f"operators.{level}.so")
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        _log.debug("no compiled operators: %s", error)
        return None
    try:
        known = (found.xpyd_turn_bytes(), found.xpyd_attention_bytes())
        products = [found.xpyd_matvec_float]
    except AttributeError:
        known, products = None, []
    if known != (ctypes.sizeof(Turn), ctypes.sizeof(AttentionArguments)):
        _log.warning("%s is of other sources: run the installation again", path)
        return None
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    found.xpyd_norm.argtypes = (number, *(pointer,) * 4, size, size, ctypes.c_float, number)
    found.xpyd_silu_mul.argtypes = (number, pointer, pointer, size, size, number)
    found.xpyd_rotate.argtypes = (number, ctypes.POINTER(Turn), number)
    found.xpyd_attention.argtypes = (number, ctypes.POINTER(AttentionArguments), number)
    if hasattr(found, "xpyd_matvec_bfloat"):  # with AVX-512 alone
        products.append(found.xpyd_matvec_bfloat)
    for run in products:
        run.argtypes = (*(pointer,) * 4, *(size,) * 4, number)
    found.xpyd_norm.restype = found.xpyd_silu_mul.restype = found.xpyd_rotate.restype = None
    return found

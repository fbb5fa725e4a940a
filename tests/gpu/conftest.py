"""Kernels of the GPU path on two kinds of machine: through Triton's interpreter on a CPU, and on a
GPU, in the same tests. Imports only what a machine with a GPU has: torch, triton, numpy, pytest."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.language import standard
from triton.runtime.jit import JITFunction

# Products are fused into sums, as by default up to Triton 3.9, which warns of a change to come.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
PACKAGE = "xpyd_worker.kernels.gpu"
MODULES = (
    *("elementwise", "decode", "prefill", "experts", "sampling", "post_update"),
    "all_reduce",
    "kernels",
)


@dataclass(frozen=True)
class Kit:
    """One device, one dtype, and the package's modules for it."""

    device: torch.device
    dtype: torch.dtype
    gpu: Any

    @property
    def tolerance(self) -> float:
        """What sums of the size that the tests make may differ by."""
        return {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}[self.dtype]

    def close(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        """Equal to rounding; `wanted` may be in a wider dtype."""
        assert found.dtype == self.dtype
        assert found.shape == wanted.shape
        torch.testing.assert_close(
            found.float().cpu(),
            wanted.float().cpu(),
            rtol=self.tolerance,
            atol=self.tolerance,
        )

    def noise(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Normally distributed numbers, the same on each device."""
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return made.to(self.dtype).to(self.device)


@contextmanager
def interpreted_library() -> Iterator[None]:
    """Triton's own functions (tl.sum and its like) for the interpreter. They were decorated when
    triton was first imported, which was for a compiler unless TRITON_INTERPRET was set then.

    The interpreter also replaces the language's members at each call of a function by a function,
    which takes nearly all of its time, and does not put them back, so that nothing compiles any
    more: here it does so once for each module, and all is put back when the outermost ends.
    """
    # Imported by triton at the first launch, and then it wants the functions as they are now.
    importlib.import_module("triton.experimental.gluon")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    replace = interpreter._patch_lang
    running: dict[int, Any] = {}

    class Scope:
        def __init__(self, fn: Any) -> None:
            # A module's functions share what is replaced for them.
            self._module = id(fn.__globals__)
            self._is_first = self._module not in running
            if self._is_first:
                running[self._module] = replace(fn)

        def restore(self) -> None:
            # Those that came later found the language as this one had left it: they go first.
            while self._is_first and self._module in running:
                running.popitem()[1].restore()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", Scope)
        for name, value in list(vars(standard).items()):
            if isinstance(value, JITFunction):
                own = interpreter.InterpretedFunction(value.fn)
                patch.setattr(standard, name, own)
                if getattr(tl, name, None) is value:
                    patch.setattr(tl, name, own)
        yield
        while running:
            running.popitem()[1].restore()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter takes seconds for a case, and in 16 bits only rounding differs: of each test
    the first case runs in them, the others in `make soak` (and on a GPU in all dtypes)."""
    seen: set[str] = set()
    for item in items:
        name, _, case = item.nodeid.partition("[")
        if case.startswith("interpreted-float16"):
            if name in seen:
                item.add_marker(pytest.mark.soak)
            seen.add(name)


def interpreted() -> Any:
    """The package's modules once more, their kernels as functions of the interpreter: what is
    decorated while the knob is set is interpreted for good."""
    names = [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
    kept = {name: sys.modules.pop(name) for name in names}
    try:
        with knobs.runtime.scope():
            knobs.runtime.interpret = True
            return modules()
    finally:
        for name in [n for n in sys.modules if n == PACKAGE or n.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]
        sys.modules.update(kept)


def modules() -> Any:
    """The package's modules by their last names."""
    return SimpleNamespace(
        **{name: importlib.import_module(f"{PACKAGE}.{name}") for name in (*MODULES, "plan")}
    )


@pytest.fixture(scope="session")
def _packages() -> dict[str, Any]:
    return {}


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32), id="interpreted-float32"),
        # No bfloat16: the interpreter's arithmetic in it is silently wrong.
        pytest.param(("cpu", torch.float16), id="interpreted-float16"),
        *(
            pytest.param(("cuda", dtype), id=f"gpu-{name}", marks=pytest.mark.gpu)
            for name, dtype in (
                ("float32", torch.float32),
                ("float16", torch.float16),
                ("bfloat16", torch.bfloat16),
            )
        ),
    ]
)
def kit(request: pytest.FixtureRequest, _packages: dict[str, Any]) -> Iterator[Kit]:
    """Every device and dtype that this machine is asked for."""
    kind, dtype = request.param
    if kind not in _packages:
        _packages[kind] = interpreted() if kind == "cpu" else modules()
    library = interpreted_library() if kind == "cpu" else nullcontext()
    with library, torch.inference_mode():
        yield Kit(torch.device(kind), dtype, _packages[kind])

"""Every kernel through Triton's compiler for a GPU that is not there: what the interpreter lets
pass, the compiler may not. bfloat16, since that is what the interpreter cannot run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.gpu.conftest import modules
from xpyd_worker.kernels.api import KvShape, Span
from xpyd_worker.kernels.gpu.reduce_shape import MOST_RANKS, ReduceShape
from xpyd_worker.kernels.post_update import Sampled, make_fields

HOPPER = GPUTarget("cuda", 90, 32)
# Bytes that one program may have of a multiprocessor's shared memory, on an H100.
SHARED_BYTES = 227 * 1024
_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages")


class Compiling:
    """Stands for a kernel: a launch compiles what the arguments call for, and runs nothing."""

    def __init__(self, kernel: Any, made: dict[str, Any]) -> None:
        self._kernel, self._made = kernel, made

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(size > 0 for size in grid)
        return self._compile

    def _compile(self, *args: Any, **given: Any) -> None:
        options = {name: given.pop(name) for name in _OPTIONS if name in given}
        form = form_of(self._kernel, *args, **given)
        source = ASTSource(
            self._kernel, signature=form.signature, constexprs=form.constants, attrs=form.attrs
        )
        self._made[self._kernel.fn.__name__] = triton.compile(
            source, target=HOPPER, options=options
        )


@dataclass(frozen=True)
class Form:
    """What a launch tells the compiler; what compiled for one serves all that are equal."""

    signature: dict[str, str]
    constants: dict[tuple[int], Any]
    attrs: dict[tuple[int], list[list[Any]]]
    """Of addresses and sizes that 16 divides, or loads would be of single numbers, and nothing
    would be fetched ahead into shared memory."""


def form_of(kernel: Any, *args: Any, **given: Any) -> Form:
    """That of a launch."""
    bound = inspect.signature(kernel.fn).bind(*args, **given).arguments
    form = Form({}, {}, {})
    for index, param in enumerate(kernel.params):
        value, is_asked = bound[param.name], not param.do_not_specialize
        if param.is_constexpr or (is_asked and isinstance(value, int) and value == 1):
            form.signature[param.name] = "constexpr"
            form.constants[index,] = value
        else:
            form.signature[param.name] = _type(value)
            if is_asked and _is_aligned(value):
                form.attrs[index,] = [["tt.divisibility", 16]]
    return form


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _is_aligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Empty at first, and shared: what two tests launch in one form is compiled once."""
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, cache: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The package, and what its kernels became by name."""
    monkeypatch.setenv("TRITON_CACHE_DIR", cache)
    gpu, made = modules(), {}
    for module in vars(gpu).values():
        for name, value in list(vars(module).items()):
            # Those that are launched; the others are parts of them.
            if isinstance(value, triton.JITFunction) and "return" in value.fn.__annotations__:
                monkeypatch.setattr(module, name, Compiling(value, made))
    yield gpu, made
    for name, kernel in made.items():
        assert kernel.asm["cubin"], name
        assert kernel.metadata.shared <= SHARED_BYTES, name


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "dim", "window"),
    [
        (torch.bfloat16, 8, None),
        (torch.bfloat16, 128, 100),
        (torch.bfloat16, 256, None),
        (torch.float32, 96, 100),
        # Of sizes and types that one of those above has.
        pytest.param(torch.bfloat16, 64, None, marks=pytest.mark.soak),
        pytest.param(torch.bfloat16, 128, None, marks=pytest.mark.soak),
        pytest.param(torch.bfloat16, 192, None, marks=pytest.mark.soak),
        pytest.param(torch.float32, 8, None, marks=pytest.mark.soak),
        pytest.param(torch.float32, 256, None, marks=pytest.mark.soak),
    ],
)
@pytest.mark.long
def test_a_layer_compiles(
    compiled: tuple[Any, dict[str, Any]], dtype: torch.dtype, dim: int, window: int | None
) -> None:
    gpu, made = compiled
    shape = KvShape(2, dim, 16, dtype)
    kernels = gpu.kernels.TritonKernels(torch.device("cpu"))
    spans = [Span(2000, 1, range(126)), Span(5, 128, range(9))]
    plan = kernels.plan(spans, shape)
    x, weight = zeros(129, 1000, dtype=dtype), zeros(1000, dtype=dtype)
    kernels.add_rms_norm(x, x.clone(), weight, 1e-5)
    kernels.silu_mul(x)
    cache = zeros(200, 2, 16, 2 * dim, dtype=dtype)
    angles = zeros(129, dim // 2, dtype=torch.float32)
    norm = zeros(dim, dtype=dtype)
    qkv = zeros(129, 12, dim, dtype=dtype)
    query = kernels.rotate_and_store(qkv, (angles, angles), (norm, norm, 1e-5), cache, plan)
    kernels.attention(query, cache, plan, window)
    names = {"_rms_norm", "_silu_mul", "_rotate_and_store", "_decode", "_prefill"}
    assert names <= set(made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "dim", "splits", "dtype"),
    [
        (4, 128, 64, torch.float32),
        (32, 128, 8, torch.bfloat16),
        (64, 128, 1, torch.float32),
        (64, 256, 64, torch.bfloat16),
        pytest.param(4, 128, 64, torch.bfloat16, marks=pytest.mark.soak),
        pytest.param(32, 128, 8, torch.float32, marks=pytest.mark.soak),
        pytest.param(64, 128, 1, torch.bfloat16, marks=pytest.mark.soak),
        pytest.param(64, 256, 64, torch.float32, marks=pytest.mark.soak),
    ],
)
@pytest.mark.long
def test_a_decode_compiles_for_as_many_parts_and_heads_of_a_kv_head_as_there_are(
    compiled: tuple[Any, dict[str, Any]], group: int, dim: int, splits: int, dtype: torch.dtype
) -> None:
    gpu, made = compiled
    query, cache = zeros(4, 2 * group, dim, dtype=dtype), zeros(8, 2, 16, 2 * dim, dtype=dtype)
    tables, contexts = zeros(4, 16, dtype=torch.int32), zeros(4, dtype=torch.int32)
    gpu.decode.decode_attention(
        query, cache, tables, contexts, query.clone(), window=None, splits=splits
    )
    assert set(made) == ({"_decode"} if splits == 1 else {"_decode", "_put_together"})


@pytest.mark.slow
def test_the_decode_in_parts_and_the_draw_compile(compiled: tuple[Any, dict[str, Any]]) -> None:
    gpu, made = compiled
    query, cache = zeros(4, 8, 128), zeros(8, 2, 16, 256)
    tables, contexts = zeros(4, 16, dtype=torch.int32), zeros(4, dtype=torch.int32)
    gpu.decode.decode_attention(
        query, cache, tables, contexts, query.clone(), window=None, splits=8
    )
    params = gpu.sampling.DrawParams(
        temperature=zeros(4, dtype=torch.float32),
        top_k=zeros(4, dtype=torch.int32),
        top_p=zeros(4, dtype=torch.float64),
        min_p=zeros(4, dtype=torch.float32),
        uniform=zeros(4, dtype=torch.float64),
    )
    gpu.sampling.sample(zeros(4, 150_000, dtype=torch.float32), params)
    assert {"_decode", "_put_together", "_sample"} <= set(made)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 6])
def test_the_update_behind_a_step_compiles(
    compiled: tuple[Any, dict[str, Any]], width: int
) -> None:
    gpu, made = compiled
    fields = make_fields(8, 1000, pinned=False)
    counts = zeros(4, dtype=torch.int32)
    sampled = Sampled(zeros(4, width, dtype=torch.int64), counts, counts)
    numbers = zeros(4, dtype=torch.int64)
    gpu.post_update.post_update(fields, numbers, numbers, sampled)
    assert set(made) == {"_post_update"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (1, torch.bfloat16),
        (256, torch.float32),
        (4096, torch.bfloat16),
        pytest.param(1, torch.float32, marks=pytest.mark.soak),
        pytest.param(256, torch.bfloat16, marks=pytest.mark.soak),
        pytest.param(4096, torch.float32, marks=pytest.mark.soak),
    ],
)
@pytest.mark.long
def test_experts_compile_for_tiles_of_each_size(
    compiled: tuple[Any, dict[str, Any]], rows: int, dtype: torch.dtype
) -> None:
    gpu, made = compiled
    device = torch.device("meta")
    gate_up = torch.empty(8, 2 * 14336, 4096, dtype=dtype, device=device)
    down = torch.empty(8, 4096, 14336, dtype=dtype, device=device)
    x = torch.empty(rows, 4096, dtype=dtype, device=device)
    chosen = torch.empty(rows, 2, dtype=torch.int64, device=device)
    experts = gpu.experts.GroupedExperts(gate_up, down)
    experts(x, torch.empty(rows, 2, dtype=torch.float32, device=device), chosen)
    assert {"_fill_table", "_gate_up", "_down", "_add_up"} <= set(made)
    # Weights are fetched while the ones before are multiplied.
    assert "cp.async" in made["_gate_up"].asm["ptx"]
    assert "cp.async" in made["_down"].asm["ptx"]


@pytest.mark.parametrize(("experts", "per_token"), [(8, 1), (8, 2), (128, 8)])
def test_steps_of_other_sizes_run_what_was_compiled_for_tiles_of_the_same_size(
    monkeypatch: pytest.MonkeyPatch, experts: int, per_token: int
) -> None:
    found: dict[tuple[str, int], list[Form]] = {}

    class Seen:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self._see

        def _see(self, *args: Any, **given: Any) -> None:
            for name in _OPTIONS:
                given.pop(name, None)
            form = form_of(self._kernel, *args, **given)
            forms = found.setdefault((self._kernel.fn.__name__, given.get("rows", 0)), [])
            if form not in forms:
                forms.append(form)

    gpu = modules()
    for name in ("_fill_table", "_gate_up", "_down", "_add_up"):
        monkeypatch.setattr(gpu.experts, name, Seen(getattr(gpu.experts, name)))
    meta = torch.device("meta")
    gate_up, down = (
        torch.empty(experts, 192, 64, device=meta),
        torch.empty(experts, 64, 96, device=meta),
    )
    layer = gpu.experts.GroupedExperts(gate_up, down)
    for rows in (*range(1, 70), 128, 1000, 1024):
        chosen = torch.empty(rows, per_token, dtype=torch.int64, device=meta)
        layer(torch.empty(rows, 64, device=meta), torch.empty(rows, per_token, device=meta), chosen)
    # In float32 tiles have 16 or 32 rows.
    names = {(name, rows) for name in ("_fill_table", "_gate_up", "_down") for rows in (16, 32)}
    assert set(found) == names | {("_add_up", 0)}
    assert [key for key, forms in found.items() if len(forms) != 1] == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("ranks", "size_kib"), [(2, 8192), (4, 16), (4, 512), (6, 256), (8, 8192)])
@pytest.mark.long
def test_the_all_reduce_compiles_and_orders_what_other_gpus_see(
    compiled: tuple[Any, dict[str, Any]], ranks: int, size_kib: int, dtype: torch.dtype
) -> None:
    gpu, made = compiled
    x, shape = zeros(size_kib * 1024 // dtype.itemsize, dtype=dtype), ReduceShape()
    table = zeros(MOST_RANKS, dtype=torch.int64)
    gpu.all_reduce.all_reduce(x, table, rank=1, ranks=ranks, shape=shape)
    assert set(made) == {"_all_reduce"}
    ptx = made["_all_reduce"].asm["ptx"]
    meetings = 2 if shape.cut(x.numel(), dtype.itemsize, ranks).in_two else 1
    # Words go out behind all that was stored, and come in before what is read then.
    assert len(re.findall(r"atom\.global\.sys\.release\.exch\.b64", ptx)) == meetings
    assert len(re.findall(r"atom\.global\.sys\.acquire\.add\.u64", ptx)) == meetings
    # 16 bytes at once, of each rank.
    assert ptx.count("ld.global.v4.b32") >= ranks + 1
    assert "ld.global.b16" not in ptx

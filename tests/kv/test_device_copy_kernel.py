"""The kernel that copies many pieces: through Triton's interpreter, and compiled for a GPU."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from xpyd_kv.memory import copy_kernel
from xpyd_kv.spans import CopyRun, Span, copy_runs


@pytest.fixture(scope="module")
def interpreted():
    """The same module once more, its kernel as a function of the interpreter."""
    spec = importlib.util.spec_from_file_location("interpreted_copy_kernel", copy_kernel.__file__)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def copy(module, pieces):
    word = module.word_bytes(pieces)
    rows = module.rows_of(pieces, word)
    table = torch.tensor(rows, dtype=torch.int64)
    most = max(words for _, _, words in rows)
    module.launch(table, num_pieces=len(rows), most_words=most, word=word)
    return word


def noise(size, seed):
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(size)), dtype=torch.uint8)


@pytest.mark.parametrize(("unit", "word"), [(16, 8), (8, 8), (12, 4), (4, 4), (2, 1), (7, 1)])
def test_pieces_of_any_alignment_are_copied_as_integers_of_the_longest_word(
    interpreted, unit, word
):
    source, target = noise(1 << 14, 1), torch.zeros(1 << 14, dtype=torch.uint8)
    before = source.clone()
    order = list(range(200))
    random.Random(2).shuffle(order)
    pieces = [
        CopyRun(target.data_ptr() + to * unit * 2, source.data_ptr() + at * unit * 3, unit)
        for at, to in enumerate(order)
    ]
    assert copy(interpreted, pieces) == word
    wanted = torch.zeros_like(target)
    for at, to in enumerate(order):
        wanted[to * unit * 2 :][:unit] = source[at * unit * 3 :][:unit]
    assert torch.equal(target, wanted)
    assert torch.equal(source, before)


def test_a_piece_longer_than_one_program_and_a_short_one_in_one_launch(interpreted):
    size = interpreted.WORDS_PER_PROGRAM * 8 * 3 + 8
    source, target = noise(size + 8, 3), torch.zeros(size + 64, dtype=torch.uint8)
    at = target.data_ptr()
    copy(
        interpreted, [CopyRun(at + 32, source.data_ptr(), size), CopyRun(at, source.data_ptr(), 8)]
    )
    assert torch.equal(target[32:-32], source[:size])
    assert torch.equal(target[:8], source[:8])
    assert not target[8:32].any()
    assert not target[-32:].any()


def test_bit_patterns_that_floats_would_change_stay_as_they_are(interpreted):
    # Signalling NaN, minus zero, denormals: of bf16, fp16 and fp32.
    words = [0x7F81, 0x7FA0, 0x8000, 0x0001, 0xFFC1, 0x7C01, 0xFC01, 0x7F80] * 32
    source = torch.tensor(words, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    target = torch.zeros_like(source)
    half = len(source) // 2
    pieces = [
        CopyRun(target.data_ptr(), source.data_ptr() + half, half),
        CopyRun(target.data_ptr() + half, source.data_ptr(), half),
    ]
    copy(interpreted, pieces)
    assert torch.equal(target, torch.cat([source[half:], source[:half]]))


def test_a_piece_longer_than_a_launch_takes_is_refused():
    table = torch.zeros((1, 3), dtype=torch.int64)
    with pytest.raises(ValueError, match="at most"):
        copy_kernel.launch(table, num_pieces=1, most_words=copy_kernel.MAX_WORDS + 1, word=8)


@pytest.mark.parametrize("word", [tl.int64, tl.int32, tl.int8])
def test_the_kernel_compiles_for_a_gpu(word, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source = ASTSource(
        copy_kernel._copy_pieces,
        signature={"table": "*i64", "word": "constexpr", "words_per_program": "constexpr"},
        constexprs={(1,): word, (2,): copy_kernel.WORDS_PER_PROGRAM},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert f"st.global.b{word.primitive_bitwidth}" in compiled.asm["ptx"]
    assert compiled.asm["cubin"]


# --- copy_runs


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), max_size=12), st.lists(st.integers(1, 20), max_size=12))
def test_two_lists_of_pieces_are_cut_where_either_is_cut(sizes, cuts):
    total = sum(sizes)
    ends = sorted({min(total, sum(cuts[: i + 1])) for i in range(len(cuts))} | {0, total})
    source = bytes(range(256))[:total] if total <= 256 else random.Random(0).randbytes(total)
    # Sources lie 3 bytes apart, targets 5.
    memory, sources, at = bytearray(), [], 0
    for size in sizes:
        sources.append(Span(len(memory), size))
        memory += source[at : at + size] + b"\0\0\0"
        at += size
    targets, room = [], 0
    for first, end in itertools.pairwise(ends):
        targets.append(Span(room, end - first))
        room += end - first + 5
    landed = bytearray(room)
    for target, start, length in copy_runs(targets, sources):
        assert length > 0
        landed[target : target + length] = memory[start : start + length]
    assert b"".join(landed[span.start :][: span.length] for span in targets) == source


def test_neighbours_are_one_segment():
    spans = [Span(64 * block, 64) for block in (0, 1, 2, 5)]
    assert copy_runs([Span(1000, 256)], spans) == [CopyRun(1000, 0, 192), CopyRun(1192, 320, 64)]


def test_lists_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="differ in length"):
        copy_runs([Span(0, 3)], [Span(0, 4)])

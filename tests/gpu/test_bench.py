"""The benchmark of the kernels in its short form: it runs, compares, and writes where it should."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.gpu import __main__ as bench
from bench.gpu.measuring import agree
from bench.gpu.page import BEGIN, END
from tests.gpu.conftest import Kit


@pytest.fixture
def _interpreted(kit: Kit) -> None:
    if kit.device.type != "cpu" or kit.dtype != torch.float32:
        pytest.skip("the short form is for the interpreter")


@pytest.mark.usefixtures("_interpreted")
def test_the_short_form_compares_every_kernel_and_writes_the_page(
    kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    assert bench.main(["--smoke", "--output", str(tmp_path / "gpu.json")], gpu=kit.gpu) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made == json.loads((tmp_path / "gpu.json").read_text())
    assert made["wrong"] == []
    assert {row["kernel"] for row in made["cases"]} == {
        "decode attention", "prefill attention", "RMS norm", "SiLU-mul", "rotary and KV store",
        "greedy token", "draw, top-p", "experts",
    }  # fmt: skip
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| decode attention | 2 x 40 |" in text
    assert "| 2 x 20 | yes |" in text
    assert [row["graphs"] for row in made["steps"]] == [True, False]


@pytest.mark.usefixtures("_interpreted")
def test_the_short_form_writes_over_nothing_that_was_measured(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "KEPT", tmp_path / "gpu.json")
    assert bench.main(["--smoke"], gpu=kit.gpu) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_interpreted")
def test_a_kernel_that_is_wrong_is_named(kit: Kit, tmp_path: Path) -> None:
    broken = SimpleNamespace(**vars(kit.gpu))
    broken.elementwise = SimpleNamespace(
        rms_norm=lambda x, *_: x,
        silu_mul=broken.elementwise.silu_mul,
        rotate_and_store=broken.elementwise.rotate_and_store,
    )
    assert bench.main(["--smoke", "--output", str(tmp_path / "gpu.json")], gpu=broken) == 1
    made = json.loads((tmp_path / "gpu.json").read_text())
    assert made["wrong"] == ["RMS norm 2 x 64"]


def test_zeros_do_not_pass_for_what_attention_over_a_long_context_gives() -> None:
    # A mean over so many values has numbers below any fixed bound that 16 bits need.
    wanted = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)) / 32768**0.5
    assert agree(wanted.bfloat16(), wanted)
    assert not agree(torch.zeros_like(wanted), wanted)
    assert not agree(wanted * 1.2, wanted)
    assert not agree(wanted.index_fill(1, torch.tensor([7]), float("nan")), wanted)
    # A row of large numbers excuses no other.
    wanted[0] *= 1e4
    assert not agree(wanted * torch.tensor([1.0, 1.0, 0.0, 1.0])[:, None], wanted)


def test_tokens_agree_only_where_each_is_the_same() -> None:
    wanted = torch.tensor([100_000, 7])
    assert agree(wanted.int(), wanted)
    assert not agree(torch.tensor([100_001, 7]), wanted)

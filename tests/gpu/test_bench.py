"""The benchmark of the kernels in its short form: it runs, compares, and writes where it should."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu.bench.__main__ import main
from tests.gpu.bench.page import BEGIN, END
from tests.gpu.conftest import Kit


@pytest.fixture(autouse=True)
def _interpreted(kit: Kit) -> None:
    if kit.device.type != "cpu" or kit.dtype != torch.float32:
        pytest.skip("the short form is for the interpreter")


def test_the_short_form_compares_every_kernel_and_writes_the_page(
    kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    assert main(["--smoke", "--output", str(tmp_path / "gpu.json")], gpu=kit.gpu) == 0
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


def test_a_kernel_that_is_wrong_is_named(kit: Kit, tmp_path: Path) -> None:
    broken = SimpleNamespace(**vars(kit.gpu))
    broken.norm = SimpleNamespace(rms_norm=lambda x, *_: x)
    assert main(["--smoke", "--output", str(tmp_path / "gpu.json")], gpu=broken) == 1
    made = json.loads((tmp_path / "gpu.json").read_text())
    assert made["wrong"] == ["RMS norm 2 x 64"]

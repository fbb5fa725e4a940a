"""The worked example of docs/new-model.md is a family: its code is taken from the page and run."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.worker.runner_driver import Driver, make_runner, oracle_logits, poison, tiny_checkpoint
from xpyd_core.errors import UserError
from xpyd_worker.model import config, families, registry

PAGE = Path(__file__).parents[2] / "docs/new-model.md"


@pytest.fixture
def with_phi3(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's function, and its row of FAMILIES."""
    code = re.findall(r"^```python [^\n]*\n(def .*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(code) == 1
    # What families.py defines and imports, and what else of config.py the page needs.
    names: dict[str, Any] = {**vars(config), **vars(families)}
    exec(compile(code[0], PAGE, "exec"), names)
    assert len(names["FAMILIES"]) == 1
    monkeypatch.setattr(registry, "FAMILIES", (*families.FAMILIES, *names["FAMILIES"]))


@pytest.mark.usefixtures("with_phi3")
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 21}, {"tie_word_embeddings": True}])
def test_the_example_writes_what_transformers_writes(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    oracle = tiny_checkpoint(tmp_path / "model", "phi3", **changes)
    driver = Driver(make_runner(tmp_path / "model"))
    poison(driver.runner)
    rng = random.Random(1)
    batch = [driver.add([rng.randrange(307) for _ in range(length)]) for length in (1, 17, 60)]
    driver.run(batch, tokens=8, budget=40)
    for sequence in batch:
        best = oracle_logits(oracle, sequence.tokens[:-1]).argmax(-1)
        assert sequence.output == best[len(sequence.prompt) - 1 :].tolist()


@pytest.mark.usefixtures("with_phi3")
def test_the_example_refuses_the_long_context_models(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model", "phi3")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_type"] = "longrope"
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"rope_type is 'longrope'; supported: default"):
        registry.load_config(tmp_path / "model")


def test_families_are_read_without_torch() -> None:
    code = "import sys, xpyd_worker.model.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

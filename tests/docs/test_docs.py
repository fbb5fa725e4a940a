"""The code blocks of README and docs are run as written.

`sh` and `python` blocks of a page run in order, in one shell, from the root of the clone, with
.venv on the PATH and a state directory of their own. `yaml` and `json` blocks must parse, fleets must
load. `console` blocks show what commands print. A block that cannot run in a test says why behind its
language: ```` ```sh not-run: reason ````.
"""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from xpyd_operator.api import load_fleet

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGE_TIMEOUT_S = 240
_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.M | re.S)
KNOWN = {"sh", "python", "yaml", "json", "console", "text", "hex", ""}


@dataclass(frozen=True)
class Block:
    language: str
    note: str
    code: str


def _blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    for info, code in _FENCE.findall(page.read_text()):
        language, _, note = info.strip().partition(" ")
        found.append(Block(language, note, code))
    return found


def _script(blocks: list[Block]) -> str:
    parts = ["set -euo pipefail"]
    for block in blocks:
        if block.note.startswith("not-run: "):
            continue
        if block.language == "sh":
            parts.append(block.code)
        elif block.language == "python":
            parts.append(f"python - <<'END_OF_PYTHON'\n{block.code}END_OF_PYTHON")
    return "\n".join(parts)


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_every_block_has_a_known_language_and_a_reason_not_to_run(page: Path) -> None:
    for block in _blocks(page):
        assert block.language in KNOWN, block
        assert not block.note or re.fullmatch(r"not-run: .{5,}", block.note), block
        if block.language == "json":
            json.loads(block.code)
        if block.language == "yaml":
            for document in yaml.safe_load_all(block.code):
                assert document is not None


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_the_fleets_shown_are_accepted(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(_blocks(page)):
        if block.language == "yaml" and "kind: InferenceFleet" in block.code:
            file = tmp_path / f"{number}.yaml"
            file.write_text(block.code)
            assert load_fleet(file).metadata.name


RUNNABLE = [p for p in PAGES if len(_script(_blocks(p)).splitlines()) > 1]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=[str(p.relative_to(ROOT)) for p in RUNNABLE])
def test_the_commands_shown_run(page: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    done = subprocess.run(
        ["bash", "-c", _script(_blocks(page))],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PAGE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"

"""The clients of docs/agents.md, as the page shows them, against one P and one D."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agents.suites import is_installed, python
from tests.e2e.harness import Fleet

pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(not is_installed(), reason="run scripts/agent_suites.py first"),
]

PAGE = Path(__file__).parents[2] / "docs/agents.md"
SHOWN_AT = "http://127.0.0.1:10001"
CLIENT_S = 60.0


def shown() -> dict[str, str]:
    """The programs of the page's section, by the package that they import first."""
    section = PAGE.read_text().partition("\n## Clients\n")[2].partition("\n## ")[0]
    codes = re.findall(r"^```python[^\n]*\n(.*?)^```$", section, re.M | re.S)
    return {code.split()[1]: code for code in codes}


def _is_a_city(said: str) -> bool:
    return said.strip() in ("Paris", "Rome")


def _is_said_twice(said: str) -> bool:
    """By both APIs the same; LiteLLM itself says something between the two."""
    lines = [line for line in said.splitlines() if line]
    return len(lines) >= 2 and lines[0] == lines[-1]


PRINTS: dict[str, Callable[[str], bool]] = {
    "openai": lambda said: json.loads(said)["city"] in ("Paris", "Rome"),
    "anthropic": lambda said: int(said.split()[-1]) > 0 and len(said.split()) > 1,
    "langchain_openai": _is_a_city,
    "litellm": _is_said_twice,
}
"""What each prints where all went well."""


def test_the_page_shows_every_client_in_a_few_statements() -> None:
    assert {name: len(ast.parse(code).body) <= 6 for name, code in shown().items()} == (
        dict.fromkeys(PRINTS, True)
    )


@pytest.mark.parametrize("client", PRINTS)
def test_a_client_works_as_the_page_shows_it(pair: Fleet, client: str, tmp_path: Path) -> None:
    code = shown()[client]
    assert SHOWN_AT in code
    done = subprocess.run(
        [python("clients"), "-c", code.replace(SHOWN_AT, pair.router.url)],
        capture_output=True,
        text=True,
        timeout=CLIENT_S,
        cwd=tmp_path,
        # LiteLLM asks the network for prices unless told to take its own list.
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert PRINTS[client](done.stdout), done.stdout

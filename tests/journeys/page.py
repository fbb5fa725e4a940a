"""The tables of docs/architecture.md that the journeys fill: files in order, one sentence for each.

The sentence is the first of the module's docstring. `sums` is one cell of the table of figures.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from tests.journeys.trace import ROOT, Calls

PAGE = ROOT / "docs/architecture.md"


def first_sentence(file: str) -> str:
    """Of the module's docstring, as a table's cell."""
    text = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:])\s+(?=[A-Z`])", paragraph)[0].rstrip(".:")
    return sentence.replace("|", "\\|") + ("" if sentence.endswith("?") else ".")


def table(files: Iterable[str]) -> str:
    """The files of a journey, without the folder that repeats the package's name."""
    rows = ["", "| file | what it is for |", "|---|---|"]
    rows += [
        f"| [`{file.partition('/')[2]}`](../{file}) | {first_sentence(file)} |" for file in files
    ]
    return "\n".join(rows) + "\n\n"


def sums(files: dict[str, int], least: Calls) -> str:
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    return (
        f"{len(files)} files ({lines:,} lines), {least.functions} functions, {len(least):,} calls"
    )


def section(text: str, name: str) -> str:
    """What is between the page's marks of this name."""
    found = re.search(rf"<!-- {name} -->(.*?)<!-- end -->", text, re.S)
    assert found is not None, f"docs/architecture.md has no <!-- {name} --> ... <!-- end -->"
    return found[1]


def files_named(text: str, name: str) -> list[str]:
    """The files of a journey's table, relative to the tree."""
    return re.findall(r"\]\(\.\./([^)]+)\)", section(text, name))


def written(text: str, name: str, content: str) -> str:
    """The page with `content` between the marks."""
    old = f"<!-- {name} -->{section(text, name)}<!-- end -->"
    return text.replace(old, f"<!-- {name} -->{content}<!-- end -->")

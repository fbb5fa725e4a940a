"""docs/architecture.md names the files that the journeys cross, and no others."""

from __future__ import annotations

import re

import pytest

from tests.journeys.journeys import JOURNEYS
from tests.journeys.page import PAGE, files_named
from tests.journeys.trace import PACKAGES, ROOT, common


@pytest.mark.parametrize("name", JOURNEYS)
def test_the_page_names_the_files_of_a_journey(name: str) -> None:
    crossed, _ = common(JOURNEYS[name]())
    named = files_named(PAGE.read_text(), name)
    missing, extra = sorted(set(crossed) - set(named)), sorted(set(named) - set(crossed))
    assert (missing, extra) == ([], []), "`make journeys` writes the tables anew"


def test_the_glossarys_words_are_in_files_that_exist() -> None:
    text = PAGE.read_text().partition("## Glossary")[2]
    named = re.findall(r"`(xpyd_\w+/[^`]+)`", text)
    assert len(named) > 40
    gone = [file for file in named if not any((ROOT / p / file).is_file() for p in PACKAGES)]
    assert gone == []


def test_no_word_of_the_glossary_is_explained_twice() -> None:
    text = PAGE.read_text().partition("## Glossary")[2]
    words = re.findall(r"^\| ([^*|]+?) \| [^|]+ \| `", text, re.M)
    assert len(words) == len(set(words)) > 40

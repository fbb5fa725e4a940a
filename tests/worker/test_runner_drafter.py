"""Models that draft behind a real model's steps: no token changes, and good ones are accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.kit.threads import Ranks
from tests.worker.runner_driver import draft_source, make_runner, tiny_checkpoint
from tests.worker.test_runner_speculation import (
    FAMILIES,
    Steps,
    assert_alike,
    models,
    one_thread,
    requests,
    run,
)
from xpyd_core.parallel.ranks import Sizes

__all__ = ["models", "one_thread"]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that guesses nothing right."""
    folder = tmp_path_factory.mktemp("stranger")
    tiny_checkpoint(folder, "qwen3", num_hidden_layers=2, vocab_size=320)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_model_changes_no_token(
    family: str, models: Callable[[str], tuple[Path, Any]]
) -> None:
    """Of the model itself each greedy draft is accepted."""
    folder, _ = models(family)
    wanted = run(make_runner(folder), requests(), None)
    given, draft = draft_source(folder, folder)
    found = run(make_runner(folder, draft=draft), requests(), given)
    assert_alike(found, wanted)
    # Greedy: the first token, then steps of 4 tokens but where the answer ends.
    assert found.stats.spec_accepted_tokens > 50
    greedy = run(make_runner(folder, draft=draft), requests()[:1], given)
    assert greedy.stats.spec_accepted_tokens == greedy.stats.spec_draft_tokens > 12


def test_a_draft_model_that_guesses_wrong_changes_no_token(
    models: Callable[[str], tuple[Path, Any]], stranger: Path
) -> None:
    folder, _ = models("llama")
    wanted = run(make_runner(folder), requests(), None)
    given, draft = draft_source(folder, stranger)
    found = run(make_runner(folder, draft=draft), requests(), given)
    assert_alike(found, wanted)
    assert found.stats.spec_draft_tokens > 100
    assert found.stats.spec_accepted_tokens < found.stats.spec_draft_tokens / 3


@pytest.mark.parametrize("sizes", [Sizes(tensor=2), Sizes(pipeline=2)], ids=["TP2", "PP2"])
def test_so_it_does_over_ranks(sizes: Sizes, models: Callable[[str], tuple[Path, Any]]) -> None:
    folder, _ = models("llama")
    wanted = run(make_runner(folder), requests(matchers=False), None)
    given, draft = draft_source(folder, folder)
    ranks = Ranks(folder, sizes, blocks=128, draft=draft)
    try:
        found = run(Steps(ranks), requests(matchers=False), given)
    finally:
        ranks.close()
    assert found.ids == wanted.ids
    assert found.stats.spec_accepted_tokens > 50

"""Models that draft behind a real model's steps: what they draft, and that no token changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.ranks.kit.threads import Ranks
from tests.worker import test_eagle3, test_medusa
from tests.worker.runner_driver import draft_source, make_runner, tiny_checkpoint, with_params
from tests.worker.test_runner_speculation import (
    FAMILIES,
    Steps,
    assert_alike,
    assert_distributed,
    models,
    one_thread,
    requests,
    run,
)
from xpyd_core.errors import UserError
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.config import WorkerConfig
from xpyd_worker.engine.request import EngineRequest
from xpyd_worker.engine.speculation import Method, SpeculativeConfig
from xpyd_worker.model.registry import load_config
from xpyd_worker.runner.drafter import Computed
from xpyd_worker.runner.load_draft import _kernels, open_draft
from xpyd_worker.runner.model_drafter import ModelDrafter
from xpyd_worker.runner.runner import ModelRunner

__all__ = ["models", "one_thread"]

METHODS: tuple[Method, ...] = ("draft_model", "eagle3", "medusa")
FEW = 2
"""Tokens that heads guess and answers have: so a guess is often right."""
Reference = Callable[[Sequence[int], int], list[int]]
"""Tokens and how many more -> what is drafted behind them."""


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model that guesses nothing right, and its oracle."""
    folder = tmp_path_factory.mktemp("stranger")
    return folder, tiny_checkpoint(folder, "qwen3", num_hidden_layers=2, vocab_size=320)


def eagle3_head(folder: Path) -> test_eagle3.Head:
    head = test_eagle3.Head(test_eagle3.AUTHORS | {"draft_vocab_size": FEW}, (2, 1, 0))
    head.write(folder)
    return head


def medusa_heads(folder: Path, rows: int = FEW) -> test_medusa.Heads:
    heads = test_medusa.Heads(test_medusa.VLLM | {"truncated_vocab_size": FEW}, rows=rows)
    heads.write(folder)
    return heads


def drafted_by(
    method: Method, folder: Path, oracle: Any, stranger: tuple[Path, Any]
) -> tuple[Path, list[int], Reference]:
    """Where what drafts is, the tokens that it guesses, and what it is to draft: by its published
    formulas over transformers' states, of the whole text at once."""
    if method == "draft_model":

        def by_model(tokens: Sequence[int], count: int) -> list[int]:
            known = list(tokens)
            for _ in range(count):
                logits = stranger[1](torch.tensor([known])).logits[0, -1]
                known.append(int(logits[: oracle.config.vocab_size].argmax()))
            return known[len(tokens) :]

        return stranger[0], list(range(1, 300)), by_model

    def states(tokens: Sequence[int]) -> Any:
        """Of all positions but the last, which no step has computed yet."""
        return oracle.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)

    if method == "medusa":
        heads = medusa_heads(folder)

        def by_heads(tokens: Sequence[int], count: int) -> list[int]:
            return heads.best(states(tokens).last_hidden_state[0, -1:], count)[0].tolist()

        return folder, heads.tensors["token_map"].tolist(), by_heads
    head = eagle3_head(folder)
    reference = test_eagle3.Reference(head, oracle.model.embed_tokens.weight)

    def by_head(tokens: Sequence[int], count: int) -> list[int]:
        found = states(tokens).hidden_states
        hidden: Tensor = reference.project(torch.cat([found[n][0] for n in head.features], dim=-1))
        ids = list(tokens[1:])
        for _ in range(count):
            out = reference.run(torch.tensor(ids), hidden)
            ids.append(int(reference.best(out[-1])))
            hidden = torch.cat((hidden, out[-1:]))
        return ids[len(tokens) - 1 :]

    return folder, (head.tensors["d2t"] + torch.arange(FEW)).tolist(), by_head


class Watched:
    """A drafter whose drafts are compared."""

    def __init__(self, runner: ModelRunner, reference: Reference) -> None:
        assert runner._drafter is not None
        self._drafter, self._reference = runner._drafter, reference
        self.weight_bytes, self.cache_bytes, self.seen = 0, 0, 0
        runner._drafter = self

    def note(self, step: Computed) -> bool:
        return self._drafter.note(step)

    def propose(self, step: Computed) -> dict[int, tuple[int, ...]]:
        found = self._drafter.propose(step)
        asked = {rows.sequence.seq_id for rows in step.rows if rows.sequence.propose}
        assert found.keys() == asked
        for rows in step.rows:
            one = rows.sequence
            if one.propose:
                assert one.known is not None
                drawn = [sample.token_id for sample in step.samples[one.seq_id]]
                tokens = [*one.known.prompt, *one.known.output, *drawn]
                assert list(found[one.seq_id]) == self._reference(tokens, one.propose)
                self.seen += 1
        return found


@pytest.mark.parametrize("method", METHODS)
def test_each_method_drafts_what_it_drafts_over_the_whole_text(
    method: Method, models: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """Chunked prompts, drafts of which none, some and all tokens are accepted, several requests.
    The draft model is the model itself."""
    folder, oracle = models("llama")
    draft, few, reference = drafted_by(method, tmp_path, oracle, (folder, oracle))
    given, source = draft_source(folder, draft, method)
    runner = make_runner(folder, blocks=128, draft=source)
    watched = Watched(runner, reference)
    asked = [
        EngineRequest(
            *(f"r{n}", f"r{n}", tuple((7 * n + 3 * i) % 300 + 1 for i in range(3 + 11 * n))),
            with_params(
                max_tokens=20,
                ignore_eos=True,
                allowed_token_ids=tuple(sorted(few)),
                temperature=0.3 if method == "draft_model" else 20.0,
                seed=n,
            ),
        )
        for n in range(6)
    ]
    found = run(runner, asked, given, budget=32)
    assert watched.seen > 30
    # Among them whole drafts.
    assert set(found.stats.spec_accepted_at) == {0, 1, 2}
    wanted = run(make_runner(folder, blocks=128), asked, None, budget=32)
    assert found.ids == wanted.ids


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
    assert found.stats.spec_accepted_tokens > 30
    greedy = run(make_runner(folder, draft=draft), requests()[:1], given)
    assert greedy.stats.spec_accepted_tokens == greedy.stats.spec_draft_tokens >= 12


@pytest.mark.parametrize("method", METHODS)
def test_what_guesses_wrong_changes_no_token(
    method: Method,
    models: Callable[[str], tuple[Path, Any]],
    stranger: tuple[Path, Any],
    tmp_path: Path,
) -> None:
    """Every sampling option, grammars, and choices that fork; with a prefix that is found."""
    folder, oracle = models("llama")
    wanted = run(make_runner(folder), requests(), None)
    draft, _, _ = drafted_by(method, tmp_path, oracle, stranger)
    given, source = draft_source(folder, draft, method)
    runner = make_runner(folder, draft=source)
    found = run(runner, requests(), given)
    assert_alike(found, wanted)
    assert found.stats.spec_draft_tokens > 100
    assert found.stats.spec_accepted_tokens < found.stats.spec_draft_tokens / 3
    again = run(runner, [*requests(), *requests()[:3]][len(requests()) :], given)
    assert again.ids == {key: ids for key, ids in wanted.ids.items() if key in again.ids}
    if isinstance(runner._drafter, ModelDrafter):
        assert_bounded(runner._drafter)


def assert_bounded(drafter: ModelDrafter) -> None:
    """All its blocks are those of the sequences that it still follows."""
    pool = drafter._pool
    held = {block for one in drafter._followed.values() for block in one.blocks}
    assert pool.num_free == pool.num_blocks - len(held)
    for seq_id in list(drafter._followed):
        drafter._forget(seq_id)
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sizes", [Sizes(tensor=2), Sizes(pipeline=2)], ids=["TP2", "PP2"])
def test_so_it_does_over_ranks(
    sizes: Sizes,
    method: Method,
    models: Callable[[str], tuple[Path, Any]],
    stranger: tuple[Path, Any],
    tmp_path: Path,
) -> None:
    """One rank drafts what one rank alone drafts; of a model itself all is right."""
    folder, oracle = models("llama")
    draft = folder
    if method != "draft_model":
        draft, _, _ = drafted_by(method, tmp_path, oracle, stranger)
    given, source = draft_source(folder, draft, method)
    alone = run(make_runner(folder, blocks=256, draft=source), requests(matchers=False), given)
    ranks = Ranks(folder, sizes, blocks=256, draft=source)
    try:
        found = run(Steps(ranks), requests(matchers=False), given)
    finally:
        ranks.close()
    assert found.ids == alone.ids
    assert found.stats.spec_draft_tokens == alone.stats.spec_draft_tokens
    assert found.stats.spec_accepted_tokens == alone.stats.spec_accepted_tokens
    assert found.stats.spec_draft_tokens > 100


@pytest.mark.parametrize("method", METHODS)
def test_sampled_tokens_are_distributed_as_the_model_s(
    method: Method, models: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, oracle = models("llama")
    draft, few, _ = drafted_by(method, tmp_path, oracle, (folder, oracle))
    given, source = draft_source(folder, draft, method)
    some = tuple(few if method != "draft_model" else range(3, 9))
    found = assert_distributed(oracle, make_runner(folder, draft=source), some, given)
    assert method == "draft_model" or found.stats.spec_accepted_tokens > 50


def test_a_draft_s_cache_is_shared_by_requests_of_one_salt(
    models: Callable[[str], tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = models("llama")
    given, source = draft_source(folder, folder)
    runner = make_runner(folder, draft=source)
    drafter = runner._drafter
    assert isinstance(drafter, ModelDrafter)
    rows: list[int] = []
    inner = drafter._model.run

    def counted(token_ids: Tensor, *rest: Any) -> Tensor:
        rows.append(len(token_ids))
        return inner(token_ids, *rest)

    monkeypatch.setattr(drafter._model, "run", counted)

    def most_rows(salt: bytes) -> int:
        """Of a request's first drafts: the prompt's that were not found."""
        rows.clear()
        # Each engine counts its sequences from 0.
        for seq_id in list(drafter._followed):
            drafter._forget(seq_id)
        params = with_params(max_tokens=4)
        prompt = tuple(range(1, 51))
        run(runner, [EngineRequest("r", "r", prompt, params, cache_salt=salt)], given)
        return max(rows)

    assert [most_rows(salt) for salt in (b"", b"", b"a", b"a", b"b")] == [51, 3, 51, 3, 51]


def test_a_drafter_forgets_whom_it_has_no_room_for(
    models: Callable[[str], tuple[Path, Any]],
) -> None:
    """A cache of few blocks, and a memory of two sequences."""
    folder, _ = models("llama")
    given, source = draft_source(folder, folder)
    runner = make_runner(folder, draft=source)
    wanted = run(make_runner(folder), requests(), None)
    drafter = runner._drafter
    assert isinstance(drafter, ModelDrafter)
    drafter._most = 2
    taken = drafter._pool.allocate(drafter._pool.num_free - 5)
    found = run(runner, requests(), given)
    assert_alike(found, wanted)
    assert found.stats.spec_draft_tokens > 0
    assert taken is not None
    drafter._pool.release(taken)
    assert len(drafter._followed) <= 2
    assert_bounded(drafter)


def test_medusa_heads_over_all_tokens_are_loaded_for_those_of_the_draft(
    models: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """As they are published where a vocabulary is truncated later."""
    folder, _ = models("llama")
    medusa_heads(tmp_path, rows=test_medusa.VOCAB)
    given, source = draft_source(folder, tmp_path, "medusa")
    runner = make_runner(folder, draft=source)
    head = 2 * 64 * 64 + FEW * 64
    assert runner.draft_bytes == 3 * 4 * head
    found = run(runner, requests(), given)
    assert_alike(found, run(make_runner(folder), requests(), None))
    assert found.stats.spec_draft_tokens > 100


def test_what_eagle_loads_is_counted(
    models: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """Its embedding too, where the head has one."""
    folder, _ = models("llama")
    own = test_eagle3.Head(test_eagle3.AUTHORS | {"draft_vocab_size": FEW}, (2, 1, 0))
    own.write(tmp_path)
    _, source = draft_source(folder, tmp_path, "eagle3")
    shared = make_runner(folder, draft=source).draft_weight_bytes
    own.tensors["embed_tokens.weight"] = torch.randn(307, 64)
    save_file(own.tensors, tmp_path / "model.safetensors")
    _, source = draft_source(folder, tmp_path, "eagle3")
    assert make_runner(folder, draft=source).draft_weight_bytes == shared + 307 * 64 * 4


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), MemoryError("x")])
def test_a_drafter_that_fails_ends_no_request_and_is_asked_no_more(
    error: Exception,
    models: Callable[[str], tuple[Path, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, _ = models("llama")
    given, source = draft_source(folder, folder)
    runner = make_runner(folder, draft=source)
    asked = 0

    class Failing:
        weight_bytes = cache_bytes = 0

        def note(self, step: Computed) -> bool:
            return True

        def propose(self, step: Computed) -> dict[int, tuple[int, ...]]:
            nonlocal asked
            asked += 1
            if asked == 3:
                raise error
            return {}

    runner._drafter = Failing()
    found = run(runner, requests(), given)
    assert_alike(found, run(make_runner(folder), requests(), None))
    assert asked == 3
    assert not runner.drafts
    (record,) = [one for one in caplog.records if "no model drafts from here on" in one.message]
    assert record.exc_info is not None


def test_a_prefill_instance_loads_nothing_that_drafts(
    models: Callable[[str], tuple[Path, Any]],
) -> None:
    folder, _ = models("llama")
    given = SpeculativeConfig(method="draft_model", num_speculative_tokens=3, model=str(folder))
    for role, loads in (("Prefill", False), ("Decode", True)):
        config = WorkerConfig(str(folder), role=role, speculative=given)
        assert (open_draft(config, load_config(folder), folder) is not None) == loads
        assert (config.drafts is not None) == loads


def test_a_draft_with_heads_that_no_gpu_takes_is_refused(
    models: Callable[[str], tuple[Path, Any]],
) -> None:
    folder, _ = models("llama")
    wide = replace(load_config(folder), head_dim=512)
    with pytest.raises(UserError, match="head_dim: 512; on a GPU"):
        _kernels(wide, cast("Any", object()))


def test_what_is_wrong_is_said_with_the_model_as_it_was_given(
    models: Callable[[str], tuple[Path, Any]],
) -> None:
    folder, _ = models("llama")
    given = SpeculativeConfig(num_speculative_tokens=3, method="medusa", model="ftp://lab/heads")
    config = WorkerConfig(str(folder), speculative=given)
    with pytest.raises(UserError, match="--speculative-config: ftp://lab/heads: "):
        open_draft(config, load_config(folder), folder)


def test_what_does_not_fit_the_model_is_refused(
    models: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, _ = models("llama")
    tiny_checkpoint(tmp_path / "other", "llama", vocab_size=5000)
    with pytest.raises(
        UserError, match=r"--speculative-config: .*vocab_size: 5000, the model has 307"
    ):
        draft_source(folder, tmp_path / "other")
    with pytest.raises(UserError, match=r"--speculative-config: .*is not a folder"):
        draft_source(folder, tmp_path / "none")
    with pytest.raises(UserError, match=r"--speculative-config: .*architectures"):
        draft_source(folder, models("qwen3")[0], "eagle3")

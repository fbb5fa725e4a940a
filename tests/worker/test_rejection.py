"""The rule by which a draft is accepted: the distribution that comes of it is the model's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from xpyd_worker.engine.request import SamplingParams
from xpyd_worker.runner.rejection import against_draft, count_standing
from xpyd_worker.runner.sampler import distribution, uniform

DRAWS = 40_000
VOCAB = 12


def draw(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def chi_square_is_small(found: Tensor, expected: Tensor) -> bool:
    """Of counts against probabilities: below the value that one in a million exceeds, by Wilson and
    Hilferty's approximation."""
    has_chance = expected > 0
    assert not found[~has_chance].any(), "what the model never draws was drawn"
    wanted = expected[has_chance].double() * found.sum()
    value = float(((found[has_chance] - wanted) ** 2 / wanted).sum())
    free = int(has_chance.sum()) - 1
    if not free:
        return True
    bound = free * (1 - 2 / (9 * free) + 4.75 * math.sqrt(2 / (9 * free))) ** 3
    return value < bound


def test_the_article_s_numbers_come_out() -> None:
    """Article fact 26: of (.5, .3, .2) and (.2, .6, .2) 0.7 is accepted, the rest is the first
    token, and the whole is the model's."""
    model, draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.6, 0.2])
    tokens = torch.arange(3)
    each = against_draft(model.expand(3, 3), tokens, draft.expand(3, 3))
    accepted = each.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(accepted, torch.tensor([1.0, 0.5, 1.0]))
    assert float(accepted @ draft) == pytest.approx(0.7)
    # Where it is rejected: the second token alone, of which half is left, all on the first.
    torch.testing.assert_close(each[1], torch.tensor([0.5, 0.5, 0.0]))
    torch.testing.assert_close(draft @ each, model)


def test_of_a_draft_without_chance_the_rule_is_a_draw_from_the_model() -> None:
    generator = torch.Generator().manual_seed(1)
    model = torch.rand(5, VOCAB, generator=generator).softmax(-1)
    tokens = torch.tensor([0, 3, 3, 7, 11])
    certain = torch.nn.functional.one_hot(tokens, VOCAB).float()
    torch.testing.assert_close(against_draft(model, tokens), model)
    torch.testing.assert_close(against_draft(model, tokens, certain), model)


def test_two_equal_distributions_accept_every_draft() -> None:
    model = torch.tensor([[0.5, 0.25, 0.25]]).expand(3, 3)
    tokens = torch.arange(3)
    torch.testing.assert_close(against_draft(model, tokens, model), torch.eye(3))


def sampled(rows: int, *, temperature: float = 0.7, top_p: float = 0.9) -> tuple[Tensor, Tensor]:
    """What a model draws from at this temperature and top_p, and another's drafts, alike rows."""
    generator = torch.Generator().manual_seed(3)
    params = SamplingParams(max_tokens=1, seed=0, temperature=temperature, top_p=top_p)
    logits = 1.5 * torch.randn(2, VOCAB, generator=generator)
    found = distribution(logits, logits.amax(-1, keepdim=True), [params, params])
    found /= found.sum(-1, keepdim=True)
    return found[0].expand(rows, VOCAB), found[1].expand(rows, VOCAB)


@pytest.mark.parametrize("is_certain", [False, True])
def test_what_comes_of_drafts_is_distributed_as_the_model(is_certain: bool) -> None:
    model, draft = sampled(DRAWS)
    generator = torch.Generator().manual_seed(5)
    if is_certain:
        tokens = torch.full((DRAWS,), int(model[0].argmax()))
        drawn = draw(against_draft(model, tokens), generator)
    else:
        tokens = draw(draft, generator)
        drawn = draw(against_draft(model, tokens, draft), generator)
    is_accepted = count_standing(drawn[:, None].repeat(1, 2), tokens[:, None]) == 2
    assert 0.1 < float(is_accepted.float().mean()) < 0.95
    assert chi_square_is_small(drawn.bincount(minlength=VOCAB), model[0])


def test_a_rule_that_draws_anew_from_the_model_would_be_seen() -> None:
    """The usual mistake: what is rejected comes from the model, not from what is left of it."""
    model, draft = sampled(DRAWS)
    generator = torch.Generator().manual_seed(5)
    tokens = draw(draft, generator)
    ratio = (model / draft).gather(1, tokens[:, None])[:, 0]
    accepted = torch.rand(DRAWS, generator=generator) < ratio
    wrong = torch.where(accepted, tokens, draw(model, generator))
    assert not chi_square_is_small(wrong.bincount(minlength=VOCAB), model[0])


def test_the_sampler_s_numbers_draw_it_as_well() -> None:
    """By inverse CDF with the random numbers of many seeds, as a step draws."""
    model, _ = sampled(1)
    numbers = torch.tensor([uniform(seed, 0, 4) for seed in range(DRAWS)], dtype=torch.float64)
    reached = against_draft(model, torch.tensor([2]))[0].double().cumsum(0)
    drawn = torch.searchsorted(reached / reached[-1], numbers, right=True).clamp(max=VOCAB - 1)
    assert chi_square_is_small(drawn.bincount(minlength=VOCAB), model[0])


@pytest.mark.parametrize(
    ("drawn", "drafted", "standing"),
    [
        ([5, 6, 7, 8], [5, 6, 7], 4),
        ([5, 6, 9, 8], [5, 6, 7], 3),
        ([5, 9, 7, 8], [5, 6, 7], 2),
        ([9, 6, 7, 8], [5, 6, 7], 1),
        # Fewer drafts than others of the step have.
        ([5, 6, 6, 6], [5, -1, -1], 2),
        # No token came of the model's numbers, and none was drafted.
        ([5, -1, -1, -1], [5, -1, -1], 2),
    ],
)
def test_tokens_stand_up_to_the_first_that_was_not_drafted(
    drawn: list[int], drafted: list[int], standing: int
) -> None:
    rows = torch.tensor([drawn, [1, 2, 3, 4]])
    drafts = torch.tensor([drafted, [1, 2, 3]])
    assert count_standing(rows, drafts).tolist() == [standing, 4]

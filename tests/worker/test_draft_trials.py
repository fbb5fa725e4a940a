"""When drafts are tried, and when not: new sequences, steps without room, models without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.worker.test_speculation import ARTICLE
from xpyd_worker.engine.speculation import SequenceDraft, Speculation, SpeculativeConfig

TEXT = [1, 2, 3] * 4
OF_A_MODEL = SpeculativeConfig(method="draft_model", model="m", num_speculative_tokens=3)


def measured(
    config: SpeculativeConfig = ARTICLE, *, waits: bool = False, draft_s: float = 0.012
) -> Speculation:
    """One whose steps with one draft token take so long, and 10 ms without."""
    speculation = Speculation(config, waits=waits)
    for _ in range(3):
        speculation.measured(0.010, decodes=1, draft_tokens=0)
    speculation.measured(draft_s, decodes=1, draft_tokens=1)
    assert speculation.room(1, 100) == 50
    return speculation


def tried(speculation: Speculation, *, accepted: int, drafted: int = 3) -> SequenceDraft:
    """A sequence with a trial."""
    draft = speculation.begin()
    assert speculation.propose(draft, TEXT, 3)
    for _ in range(4):
        speculation.verified(draft, accepted=accepted, drafted=drafted, tokens=20, decodes=1)
    return draft


def test_now_and_then_a_new_one_tries_although_others_drafts_did_not_pay() -> None:
    """Those that end before their rest does would never try again."""
    speculation = measured()
    assert not tried(speculation, accepted=0).is_on(20)
    begun = [bool(speculation.propose(speculation.begin(), TEXT, 3)) for _ in range(32)]
    assert begun == [*[False] * 15, True] * 2
    for _ in range(20):
        speculation.verified(speculation.begin(), accepted=3, drafted=3, tokens=20, decodes=1)
    assert all(speculation.propose(speculation.begin(), TEXT, 3) for _ in range(5))


def test_a_new_one_is_judged_by_as_many_tokens_as_are_drafted() -> None:
    """Three heads draft three tokens, however many they may."""
    speculation = measured(replace(ARTICLE, num_speculative_tokens=16))
    assert tried(speculation, accepted=1).is_on(20)
    assert speculation.propose(speculation.begin(), TEXT, 3)


def test_a_model_drafts_no_more_than_a_step_has_room_for() -> None:
    speculation = measured(OF_A_MODEL)
    draft = speculation.begin()
    assert speculation.wanted(draft, 10, 40) == 3
    # It is of all sequences.
    assert speculation.room(1, 10) == 5
    assert [speculation.wanted(speculation.begin(), 10, 40) for _ in range(3)] == [3, 2, 0]
    assert speculation.room(1, 5) == 2
    assert speculation.wanted(draft, 10, 40) == 2
    assert speculation.room(1, 1) == 0
    assert speculation.wanted(draft, 10, 40) == 0


def test_a_model_whose_drafts_are_not_verified_rests() -> None:
    """Such as where there are no blocks for them: its time would be lost, and never judged."""
    speculation = measured(OF_A_MODEL)
    draft, text = speculation.begin(), list(TEXT)
    for step in range(40):
        speculation.room(1, 100)
        if not speculation.wanted(draft, len(text), 40):
            assert step == 17
            break
        text.append(step)
        speculation.drafted(draft, len(text), (7, 8))
        speculation.propose(draft, text, 3)
    else:
        raise AssertionError("it never rests")
    assert draft.resume_at == len(text) + 64


def test_one_whose_drafts_are_verified_now_and_then_goes_on() -> None:
    speculation = measured(OF_A_MODEL)
    draft, text = speculation.begin(), list(TEXT)
    for step in range(100):
        speculation.room(1, 100)
        assert speculation.wanted(draft, len(text), 40)
        text.append(step)
        speculation.drafted(draft, len(text), (7, 8))
        assert speculation.propose(draft, text, 3)
        if not step % 8:
            speculation.verified(draft, accepted=2, drafted=2, tokens=len(text), decodes=1)


def test_a_model_may_be_taking_in_a_long_prompt() -> None:
    speculation = measured(OF_A_MODEL, waits=True)
    draft, text = speculation.begin(), [1] * 8192
    for _ in range(40):
        speculation.room(1, 100)
        assert speculation.wanted(draft, len(text), 40)
        assert speculation.propose(draft, text, 3) == ()
        text.append(1)
    assert draft.is_on(len(text))


# --- drafts that are not all alike


def goes_on(drafts: Sequence[tuple[int, int]]) -> bool:
    """Whether a sequence still has drafts behind these, (accepted, drafted) each."""
    # A draft token costs three tenths of a step: a trial's must be accepted to three eighths.
    speculation = measured(replace(ARTICLE, num_speculative_tokens=16), draft_s=0.013)
    draft = speculation.begin()
    for accepted, drafted in drafts:
        if not draft.is_on(100):
            return False
        speculation.verified(draft, accepted=accepted, drafted=drafted, tokens=100, decodes=1)
    return draft.is_on(100)


@pytest.mark.parametrize(
    ("accepted", "passes"),
    [
        ([0, 3, 3, 3], True),
        ([0, 0, 3, 3], True),
        ([3, 1, 1, 0], True),
        ([3, 1, 0, 0], False),
        ([0, 0, 1, 3], False),
    ],
)
def test_each_draft_of_a_trial_counts_as_much(accepted: list[int], passes: bool) -> None:
    """Four drafts of 3 tokens cost 3.6 steps, and must bring 1.25 times that."""
    assert goes_on([(count, 3) for count in accepted]) == passes


@pytest.mark.parametrize(
    ("drafts", "passes"),
    [
        ([(3, 16), (3, 16), (3, 16), (1, 1)], False),
        ([*[(2, 2)] * 20, (12, 16)], True),
    ],
)
def test_a_draft_counts_with_its_own_length(drafts: list[tuple[int, int]], passes: bool) -> None:
    assert goes_on(drafts) == passes

"""Which earlier tokens reach the executor: all of them where a draw reads them, else none."""

from __future__ import annotations

import pytest

from tests.worker.engine_driver import EngineDriver, make_request, prompt_of
from xpyd_worker.engine.executor import KnownTokens


def known_of(driver: EngineDriver, request_id: str) -> list[KnownTokens | None]:
    """What stood in the steps in which the request drew a token, in order."""
    return [
        sequence.known
        for step in driver.executor.steps
        for sequence in step.sequences
        if sequence.log_id == request_id and sequence.samples
    ]


def test_a_request_without_penalties_sends_its_tokens_along_in_no_step():
    driver = EngineDriver()
    driver.submit(make_request("a", prompt_of(6), logit_bias=((1, 2.0),), min_p=0.5, top_k=3))
    driver.run()
    assert set(known_of(driver, "a")) == {None}


@pytest.mark.parametrize(
    "option",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 1.0},
        {"frequency_penalty": -1.0},
        {"bad_words": ((5, 6),)},
    ],
)
def test_prompt_and_output_grow_by_what_was_drawn(option: dict[str, object]):
    driver = EngineDriver(seqs=2, budget=4)
    request = driver.submit(make_request("a", prompt_of(10), ignore_eos=True, **option))
    driver.run()
    tokens = driver.tokens("a")
    expected = [KnownTokens(request.prompt, tuple(tokens[:k])) for k in range(len(tokens))]
    assert known_of(driver, "a") == expected
    first = known_of(driver, "a")[0]
    assert first is not None
    assert first.prompt is request.prompt


def test_ids_to_continue_from_are_output():
    driver = EngineDriver()
    request = make_request(
        "a", prompt_of(6), n=2, continue_from=((7, 8), (9,)), presence_penalty=1.0, max_tokens=3
    )
    driver.submit(request)
    driver.run()
    outputs = {known.output for known in known_of(driver, "a") if known is not None}
    assert (7, 8) in outputs
    assert (9,) in outputs
    assert () not in outputs


def test_a_preempted_sequence_keeps_its_output():
    driver = EngineDriver(blocks=6, budget=64)
    for name, first in (("old", 1), ("new", 9)):
        driver.submit(
            make_request(
                name, prompt_of(7, first), max_tokens=12, ignore_eos=True, frequency_penalty=1.0
            )
        )
    driver.run()
    assert driver.core.stats().preemptions > 0
    for name in ("old", "new"):
        tokens = driver.tokens(name)
        outputs = [known.output for known in known_of(driver, name) if known is not None]
        assert outputs == [tuple(tokens[:k]) for k in range(len(tokens))]

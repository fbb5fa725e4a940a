"""The user's SamplingParams: vLLM's names and defaults, the HTTP API's rules."""

from __future__ import annotations

import numpy
import pytest

from xpyd_core.errors import UserError
from xpyd_worker import SamplingParams


def test_defaults_are_those_of_the_http_api_and_sixteen_tokens() -> None:
    options = SamplingParams().options()
    assert (options.n, options.temperature, options.top_p, options.top_k) == (1, 1.0, 1.0, 0)
    assert (options.max_tokens, options.min_tokens, options.seed) == (16, 0, None)
    assert SamplingParams(max_tokens=None).options().max_tokens is None


def test_what_is_given_arrives() -> None:
    params = SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=11,
        stop="x",
        stop_token_ids=(4, 5),
        max_tokens=9,
        min_tokens=2,
        logprobs=3,
        ignore_eos=True,
    )
    options = params.options()
    assert (options.n, options.temperature, options.top_p, options.top_k) == (2, 0.5, 0.9, 7)
    assert (options.seed, options.stop, options.stop_token_ids) == (11, ("x",), (4, 5))
    assert (options.max_tokens, options.min_tokens, options.logprobs) == (9, 2, 3)
    assert options.ignore_eos
    assert SamplingParams(stop=("a", "b")).options().stop == ("a", "b")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_k", -2),
        ("seed", "one"),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("repetition_penalty", "high"),
        ("logit_bias", {5: "much"}),
        ("logit_bias", {5: float("inf")}),
        ("logit_bias", {5: 10**400}),
        ("temperature", 10**400),
        pytest.param("temperature", -(10**5000), id="temperature of 5001 digits"),
        ("top_p", float("inf")),
        pytest.param("n", 10**5000, id="n of 5001 digits"),
        ("stop", "\ud800"),
        ("stop", ["a", "\udfff"]),
        ("bad_words", ["\ud83d"]),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"^{name}: "):
        SamplingParams(**{name: value})  # pyright: ignore[reportArgumentType]


def test_numbers_of_numpy_are_numbers() -> None:
    # The checks below are silenced: users pass what the signature does not name.
    params = SamplingParams(seed=numpy.int64(3), temperature=numpy.float32(0.5))  # pyright: ignore[reportArgumentType]
    assert (params.options().seed, params.options().temperature) == (3, 0.5)
    with pytest.raises(UserError, match=r"^stop: object is no value of JSON"):
        SamplingParams(stop=[object()])  # pyright: ignore[reportArgumentType]

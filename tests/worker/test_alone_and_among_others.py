"""A request gets the same tokens alone and among others: few rows and many go
through different code, which must round alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpyd_worker import LLM, SamplingParams
from xpyd_worker.runner.device import cpu_is_fast_in
from xpyd_worker.system import cpu_flags

MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
PROMPT = "San Francisco is a"
OTHERS = ["Paris is the", "What does", "A list of", "The river", "Water boils at", "In Python"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_draws_the_same_tokens_alone_and_among_others(
    temperature: float, dtype: str
) -> None:
    if not cpu_is_fast_in(dtype):
        pytest.skip("float32 is what runs here")
    if dtype == "bfloat16" and "amx_bf16" in cpu_flags():
        pytest.skip("how oneDNN sums few and many rows with AMX was never seen")
    llm = LLM(str(MODEL), dtype=dtype, threads=1, enable_prefix_caching=False)
    try:
        options = [
            SamplingParams(max_tokens=50, temperature=temperature, seed=seed, ignore_eos=True)
            for seed in range(7)
        ]
        alone = [llm.generate([PROMPT], one, use_tqdm=False)[0] for one in options]
        for one, expected in zip(options, alone, strict=True):
            others = [option for option in options if option is not one]
            among = llm.generate([PROMPT, *OTHERS], [one, *others], use_tqdm=False)[0]
            assert among.outputs[0].token_ids == expected.outputs[0].token_ids
    finally:
        llm.close()

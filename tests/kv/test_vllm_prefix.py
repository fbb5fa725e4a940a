"""Our connector in a fake of vLLM's engine: prompts that share blocks of a prefix cache."""

import time

import pytest

from tests.kv.pods import until
from tests.kv.test_vllm_connector import BUFFER, POOL, alone, assert_all_is_back, prompt, serve
from tests.kv.vllm_engine import pair
from tests.kv.vllm_fakes import FakeRequest, ids


@pytest.mark.parametrize("store", [{}, BUFFER, POOL], ids=["blocks", "buffer", "pool"])
def test_prefixes_of_both_sides_are_not_moved_again(store):
    with pair({"chunk": 50}, store) as (p, d):
        shared = prompt(67)
        assert serve(p, d, [*shared, 1, 2]).external == 69
        again = serve(p, d, [*shared, *prompt(40, 5)])
        # 64 tokens are in whole blocks of D's own cache.
        assert again.external == 107 - 64
        assert_all_is_back(p, d)


@pytest.mark.parametrize("mode", ["put_async", "put", "get"])
def test_blocks_that_another_prompt_computes_in_the_same_step_are_sent_when_they_are_written(mode):
    """vLLM's prefix cache has blocks from when they are scheduled."""
    with pair({"mode": mode}, {"caches": False, **POOL}) as (p, d):
        shared = prompt(80)
        prompts = [[*shared, *prompt(9 + 8 * n, n)] for n in range(4)]
        names = [ids(p, d) for _ in prompts]
        firsts = [p.add(FakeRequest(n[0], t)) for n, t in zip(names, prompts, strict=True)]
        sending = [*p.scheduler._half._sendings.values()]

        def after_the_grants():
            """Whatever may leave has left."""
            if mode != "get":
                states = p.scheduler._half._producer.status
                until(lambda: all(states(one.key).state == "granted" for one in sending), "grants")
            for _ in range(20):
                for engine in (p, d):
                    engine.ranks[0][1]._rank._turns.give(is_moving=True)
                time.sleep(0.005)

        p.before_forward = after_the_grants
        p.step()
        assert [first.answer for first in firsts] == [*map(alone, prompts)]
        for (_, name), tokens in zip(names, prompts, strict=True):
            second = d.add(FakeRequest(name, tokens))
            d.run(p, until=lambda second=second: second.answer is not None)
            assert (second.answer, second.external) == (alone(tokens), len(tokens))
        assert_all_is_back(p, d)

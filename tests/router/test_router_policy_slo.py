"""SloAware: who is expected to meet the objectives, with how much room; who is unknown."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from tests.router.choosing import Bench, key_of
from tests.router.simulated import Simulation, Speed
from tests.router.test_router_policy_prefix import ask
from xpyd_core.messages import Heartbeat
from xpyd_router.policy.base import Slo, Want
from xpyd_router.policy.pairs import Alone

FAST_P, SLOW_P = Speed(0.01, 1 / 20000), Speed(0.01, 1 / 5000)
FAST_D, SLOW_D = Speed(0.008, 0.0004), Speed(0.018, 0.002)
SLO = Slo(ttft_s=0.5, itl_s=0.03)


def met(done: list, slo: Slo = SLO) -> float:
    """The part of the requests that met both objectives."""
    assert slo.ttft_s is not None
    assert slo.itl_s is not None
    return sum(d.ttft_s <= slo.ttft_s and d.itl_s <= slo.itl_s for d in done) / len(done)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_of_a_slow_and_a_fast_engine_on_each_side_more_objectives_are_met(seed: int) -> None:
    found = {
        policy: met(
            Simulation([FAST_P, SLOW_P], [FAST_D, SLOW_D], policy, 8.0, 300, SLO, seed=seed).run()
        )
        for policy in ("SloAware", "LeastLoaded")
    }
    assert found["SloAware"] > 0.93
    assert found["LeastLoaded"] < found["SloAware"] - 0.1


def test_equal_engines_share_evenly() -> None:
    done = Simulation([FAST_P] * 2, [FAST_D] * 2, "SloAware", 10.0, 200, SLO).run()
    for tally in (Counter(d.prefill for d in done), Counter(d.decode for d in done)):
        assert min(tally.values()) > 70
    assert met(done) > 0.97


def test_without_objectives_the_expected_time_is_least() -> None:
    fleet = [FAST_P, SLOW_P], [FAST_D, SLOW_D]
    ours = Simulation(*fleet, "SloAware", 8.0, 200).run()
    others = Simulation(*fleet, "LeastLoaded", 8.0, 200).run()

    def total_s(done: list) -> float:
        return sum(d.ttft_s for d in done), sum(d.itl_s for d in done)

    for our_s, other_s in zip(total_s(ours), total_s(others), strict=True):
        assert our_s < 0.8 * other_s


class Known(Bench):
    """A bench whose instances are known: Ps by base and rate, Ds by the gap of one and of more."""

    def __init__(self, ps: list[tuple[float, float]], ds: list[tuple[float, float]], a: int = 0):
        super().__init__(len(ps), len(ds), "SloAware", a=a)
        for beats, figures in ((self.p, ps), (self.d, ds)):
            for one, (base, slope) in zip(beats, figures, strict=True):
                self.learn(one, base, slope)

    def learn(self, one: Heartbeat, base: float, slope: float) -> None:
        pace = self.load(one).pace
        line, xs = (pace.gap, (1, 40)) if one.type == "D" else (pace.first, (100, 9000))
        for x in xs * 20:
            line.observe(x, base + slope * x)


def want(prompt: int = 500, ttft_s: float | None = None, itl_s: float | None = None) -> Want:
    return Want("m", prompt_tokens=prompt, output_tokens=100, slo=Slo(ttft_s, itl_s))


def test_a_long_prompt_goes_to_the_only_p_that_meets_its_objective() -> None:
    bench = Known([(0.0, 1 / 20000), (0.0, 1 / 2000)], [(0.01, 0.001)])
    bench.load(bench.p[0]).begin(4000)
    assert {bench.p_index(want(500, 0.5)) for _ in range(4)} == {1}
    assert {bench.p_index(want(2000, 0.5)) for _ in range(4)} == {0}
    # What is left of the objective counts: half of it was waited away.
    assert {bench.p_index(want(500, 0.24)) for _ in range(4)} == {0}


def test_the_one_that_used_least_of_its_room_is_taken() -> None:
    """Not the fastest, and not the one with least to do."""
    bench = Known([(0.0, 1 / 20000), (0.0, 1 / 5000)], [(0.01, 0.001)])
    fast, slow = (bench.load(one) for one in bench.p)
    fast.begin(2000)  # of about 9,500 that it may have before a prompt of 500
    slow.begin(200)  # of about 2,000
    assert {bench.p_index(want(500, 0.5)) for _ in range(4)} == {1}
    slow.begin(400)
    assert {bench.p_index(want(500, 0.5)) for _ in range(4)} == {0}


def test_a_slow_d_with_more_of_its_room_left_is_taken_before_a_fast_one() -> None:
    bench = Known([(0.0, 1 / 5000)], [(0.010, 0.001), (0.020, 0.002)])
    for _ in range(8):
        bench.load(bench.d[0]).begin(0)  # of 18 more that it may have
    assert {bench.d_index(want(itl_s=0.030)) for _ in range(4)} == {1}
    assert {bench.d_index(want()) for _ in range(4)} == {0}


def test_idle_ones_are_all_unused_and_the_fastest_is_taken() -> None:
    bench = Known([(0.0, 1 / 5000), (0.0, 1 / 20000)], [(0.02, 0.001), (0.01, 0.001)])
    assert {bench.p_index(want(500, 0.5, 0.05)) for _ in range(4)} == {1}
    assert {bench.d_index(want(500, 0.5, 0.05)) for _ in range(4)} == {1}


def test_a_d_is_filled_up_to_its_objective_and_no_further() -> None:
    bench = Known([(0.0, 1 / 5000)], [(0.010, 0.001), (0.020, 0.002)])
    placed: Counter[int] = Counter()
    for _ in range(24):
        place = bench.d_index(want(itl_s=0.030))
        placed[place] += 1
        bench.load(bench.d[place]).begin(0)
    # They would meet it with 20 and with 5.
    assert placed == {0: 19, 1: 5} or placed == {0: 20, 1: 4}


def test_the_request_itself_counts_in_the_gap_that_is_expected() -> None:
    bench = Known([(0.0, 1 / 5000)], [(0.010, 0.010), (0.020, 0.002)])
    for one in bench.d:
        bench.load(one).begin(0)  # with this request 0.030 and 0.024 s
    assert {bench.d_index(want(itl_s=0.025)) for _ in range(4)} == {1}


def test_an_aggregated_instance_has_as_little_room_as_the_scarcer_of_both() -> None:
    bench = Bench(0, 0, "SloAware", a=2)
    for one in bench.a:
        pace = bench.load(one).pace
        for x in (1, 40) * 20:
            pace.first.observe(100 * x, 0.1 * x)
            pace.gap.observe(x, 0.010 + 0.0001 * x)
    bench.load(bench.a[0]).begin(800)  # of its time to the first token it has used most
    for _ in range(4):
        bench.load(bench.a[1]).begin(75)  # of both about a third
    asked = want(100, 1.0, 0.0111)
    assert {bench.alone(asked).instance.beat for _ in range(4)} == {bench.a[1]}


def test_where_nobody_meets_it_the_least_late_is_taken() -> None:
    bench = Known([(0.0, 1 / 4000), (0.0, 1 / 5000)], [(0.050, 0.001), (0.040, 0.001)])
    assert {bench.p_index(want(8000, 0.5)) for _ in range(4)} == {1}
    assert {bench.p_index(want(8000, -3.0)) for _ in range(4)} == {1}
    assert {bench.d_index(want(itl_s=0.020)) for _ in range(4)} == {1}


def test_without_an_objective_on_a_side_its_fastest_is_taken() -> None:
    bench = Known([(0.0, 1 / 5000), (0.0, 1 / 9000)], [(0.020, 0.001), (0.010, 0.001)])
    bench.load(bench.p[1]).begin(300)
    assert {bench.p_index(want(500, None, 0.05)) for _ in range(4)} == {1}
    bench.load(bench.p[1]).begin(300)
    assert {bench.p_index(want(500, None, 0.05)) for _ in range(4)} == {0}
    assert {bench.d_index(want(500, 0.5, None)) for _ in range(4)} == {1}


def test_an_unknown_instance_gets_one_request_at_a_time() -> None:
    bench = Bench(3, 3, "SloAware")
    for one in (bench.p[0], bench.d[0]):
        Known.learn(bench, one, 0.001, 0.00001)  # pyright: ignore[reportArgumentType] - a Bench
    order: list[tuple[int, int]] = []
    for _ in range(6):
        order.append((bench.p_index(want(500, 0.5, 0.05)), bench.d_index(want(500, 0.5, 0.05))))
        bench.load(bench.p[order[-1][0]]).begin(500)
        bench.load(bench.d[order[-1][1]]).begin(500)
    assert {place for place, _ in order[:2]} == {place for _, place in order[:2]} == {1, 2}
    assert order[2:] == [(0, 0)] * 4


def test_where_all_are_unknown_the_least_loaded_is_taken() -> None:
    bench = Bench(2, 2, "SloAware")
    for one, times in ((bench.p[0], 2), (bench.p[1], 1), (bench.d[0], 1), (bench.d[1], 2)):
        for _ in range(times):
            bench.load(one).begin(500)
    assert bench.p_index(want(500, 0.5)) == 1
    assert bench.d_index(want(500, 0.5)) == 0


def test_who_seemed_slow_is_tried_again_after_a_while() -> None:
    bench = Known([(0.0, 1 / 9000)], [(0.010, 0.0), (0.500, 0.0)])
    chosen: list[int] = []
    for _ in range(1000):
        pair = bench.pair(want(itl_s=0.02))
        bench.policy.placed(pair, want())
        chosen.append(bench.d.index(pair.decode.beat))
    # Each request is placed on a P and on a D: a policy of its own for each.
    assert 5 <= chosen.count(1) <= 15
    bench.load(bench.d[1]).begin(10)
    assert {bench.d_index(want(itl_s=0.02)) for _ in range(300)} == {0}


def test_a_second_try_is_no_experiment() -> None:
    bench = Known([(0.0, 1 / 9000)], [(0.010, 0.0), (0.500, 0.0), (0.010, 0.0)])
    for _ in range(400):
        again = replace(want(itl_s=0.02), exclude=frozenset({key_of(bench.d[2])}))
        pair = bench.pair(again)
        bench.policy.placed(pair, again)
        assert pair.decode.beat == bench.d[0]


def test_who_has_hardly_any_kv_blocks_left_is_spared() -> None:
    bench = Known([(0.0, 1 / 9000)], [(0.010, 0.001), (0.020, 0.001)])
    for slo in (Slo(None, 0.05), Slo()):
        for free, place in ((50, 1), (500, 0)):
            beat = replace(bench.d[0], free_blocks=free, total_blocks=1000)
            bench.loads.take(key_of(beat), beat)
            assert {bench.d_index(Want("m", slo=slo)) for _ in range(4)} == {place}


def test_who_starts_slowly_gets_less() -> None:
    bench = Known([(0.0, 1 / 9000), (0.0, 1 / 9000)], [(0.010, 0.001), (0.010, 0.001)])
    for one in (bench.p[0], bench.d[0]):
        bench.load(one).weight = 0.25
    placed: Counter[str] = Counter()
    for _ in range(24):
        choice = bench.pair(want(100, 5.0, 0.2))
        for one in choice:
            bench.load(one.beat).begin(100)
            placed[one.key.http] += 1
    for light, full in (bench.p, bench.d):
        assert placed[light.http_address] < 0.5 * placed[full.http_address]


def test_what_a_cache_has_of_the_prompt_takes_no_time() -> None:
    bench = Known([(0.0, 1 / 4000), (0.0, 1 / 4000)], [(0.010, 0.001)])
    prompt = ask("a" * 8)
    first = bench.pair(prompt)
    assert bench.policy.placed(first, prompt) == prompt.prompt_tokens
    assert {bench.pair(prompt).prefill.key for _ in range(4)} == {first.prefill.key}
    assert bench.policy.placed(first, prompt) == 1
    bench.policy.forget(first.prefill.key)
    assert bench.policy.placed(first, prompt) == prompt.prompt_tokens


def test_an_aggregated_instance_is_judged_by_both_times() -> None:
    bench = Bench(0, 0, "SloAware", a=2)
    for one, first, gap in ((bench.a[0], 1 / 9000, 0.030), (bench.a[1], 1 / 1000, 0.010)):
        pace = bench.load(one).pace
        for x in (1, 40) * 20:
            pace.first.observe(100 * x, 100 * x * first)
            pace.gap.observe(x, gap + 0.0001 * x)

    def chosen(asked: Want) -> set[Heartbeat]:
        choices = [bench.policy.pick(bench.snapshot, asked) for _ in range(4)]
        return {one.instance.beat for one in choices if isinstance(one, Alone)}

    assert chosen(want(500, 0.1, None)) == {bench.a[0]}
    assert chosen(want(500, None, 0.02)) == {bench.a[1]}
    assert chosen(want(500, 0.1, 0.02)) == {bench.a[1]}  # 0.4 s late, else 1 s
    assert chosen(want(1500, 0.1, 0.02)) == {bench.a[0]}  # 1.1 s late, else 1.4 s
    assert chosen(want(500)) == {bench.a[1]}  # 1.5 s, else 3 s
    assert chosen(Want("m", prompt_tokens=500, output_tokens=5)) == {bench.a[0]}


def test_an_aggregated_instance_of_which_half_is_known_is_unknown() -> None:
    bench = Bench(0, 0, "SloAware", a=2)
    for one in bench.a:
        bench.load(one).pace.gap.observe(1, 0.01)
    bench.load(bench.a[0]).pace.first.observe(500, 0.1)
    assert {bench.alone(want(500, 0.5)).instance.beat for _ in range(4)} == {bench.a[1]}

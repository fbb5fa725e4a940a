"""/metrics: histograms, sums, gauges, the names that others read."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.worker.engine_driver import make_request
from tests.worker.server_fakes import Running, ScriptedEngine, say, serving
from tests.worker.test_engine_core import WAIT_S, Live
from xpyd_worker.engine.request import EngineStats, summed
from xpyd_worker.server.telemetry.metrics import kv_usage

PATH = "/v1/completions"
Values = dict[str, float]


async def scraped(server: Running) -> Values:
    """Samples without labels, and of those with labels the ones by `le`."""
    text = (await server.client.get("/metrics")).text
    found: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def test_latencies_of_finished_requests_obey_their_identities() -> None:
    engine = ScriptedEngine(say("hello world", eos=False), step_s=0.001)
    async with serving(engine) as server:
        for max_tokens in (1, 4, 7):
            await server.post(PATH, {"prompt": "prompt", "max_tokens": max_tokens})
        found = await scraped(server)
        prefix = "xpyd_engine_"
        ttft, e2e = found[f"{prefix}ttft_seconds_sum"], found[f"{prefix}e2e_seconds_sum"]
        assert e2e - ttft > 0
        assert abs(e2e - ttft - found[f"{prefix}itl_seconds_sum"]) < 1e-9
        counts = {
            name: found[f"{prefix}{name}_count"]
            for name in ("ttft_seconds", "e2e_seconds", "itl_seconds", "tpot_seconds")
        }
        assert counts == {
            "ttft_seconds": 3,
            "e2e_seconds": 3,
            "itl_seconds": 3 + 6,
            "tpot_seconds": 2,
        }
        assert found[f"{prefix}prompt_tokens_total"] == 18
        assert found[f"{prefix}output_tokens_total"] == 12
        assert found[f"{prefix}request_output_tokens_sum"] == 12
        assert found[f"{prefix}request_output_tokens_bucket{{le=1.0}}"] == 1
        assert found[f"{prefix}request_output_tokens_bucket{{le=4.0}}"] == 2
        assert found[f"{prefix}request_prompt_tokens_count"] == 3


async def test_a_request_that_a_stop_string_ends_is_a_whole_one() -> None:
    """It is not the client that left: the engine counts it as stopped, and it has an E2E."""

    engine = ScriptedEngine(say("hello world, on and on"))
    async with serving(engine) as server:
        body = {"prompt": "hi", "max_tokens": 20, "stop": "o"}
        assert (await server.post(PATH, body)).json()["choices"][0]["text"] == "hell"
        found = await scraped(server)
        assert found["xpyd_engine_e2e_seconds_count"] == 1
        assert [choices for _, choices in engine.aborted] == [(0,)]


def test_the_engine_counts_choices_that_a_stop_string_ended_as_stopped() -> None:
    live = Live()
    live.engine.submit(make_request("r", [3, 4, 5]))
    live.engine.turn()
    live.engine.abort("r", (0,))
    live.engine.turn()
    assert live.engine.stats().finished == {"stop": 1}
    assert live.pool.num_free == 64


async def test_vllms_gauges_stand_where_schedulers_look_for_them() -> None:
    async with serving() as server:
        found = await scraped(server)
        assert found["vllm:num_requests_running{model_name=fake}"] == 0
        assert found["vllm:num_requests_waiting{model_name=fake}"] == 0
        assert abs(found["vllm:kv_cache_usage_perc{model_name=fake}"] - 0.3) < 1e-9
        info = "vllm:cache_config_info{block_size=16,model_name=fake,num_gpu_blocks=10}"
        assert found[info] == 1
        assert sum(name.startswith("vllm:") for name in found) == 4


def test_kv_usage_is_a_share_of_0_to_1() -> None:
    assert kv_usage(EngineStats(blocks_total=10, blocks_free=10)) == 0
    assert kv_usage(EngineStats(blocks_total=10, blocks_free=0)) == 1
    assert kv_usage(EngineStats()) == 0


async def test_the_process_and_its_load_are_shown() -> None:
    async with serving() as server:
        found = await scraped(server)
        assert found["xpyd_engine_load_seconds"] == 0.5
        for name in ("process_resident_memory_bytes", "process_start_time_seconds"):
            assert found[name] > 0


def test_each_step_counts_its_tokens_and_sequences() -> None:
    live = Live()
    live.engine.start()
    live.engine.submit(make_request("r", [3, 4, 5], max_tokens=4))
    assert not live.last("r").error
    live.engine.stop(WAIT_S)
    steps = live.engine.stats().steps
    forwards = live.engine.stats().forwards
    assert steps.seconds.count == steps.tokens.count == steps.sequences.count == forwards
    assert steps.tokens.sum == 3 + forwards - 1
    assert steps.sequences.sum == forwards


def test_outputs_say_when_their_request_left_the_queue() -> None:
    live = Live()
    begun = live.engine._clock()
    live.engine.start()
    live.engine.submit(make_request("r", [3, 4, 5]))
    started_s = live.last("r").started_s
    assert started_s is not None
    assert begun <= started_s <= live.engine._clock()
    live.engine.stop(WAIT_S)


def test_sums_have_every_counter_and_distribution() -> None:
    one, other = EngineStats(forwards=3, running=1), EngineStats(forwards=4, running=2)
    one.kv_recomputed["gone"] = 1
    other.kv_recomputed |= {"gone": 2, "late": 5}
    one.steps.tokens.observe(8)
    other.steps.tokens.observe(30)
    total = summed([one, other])
    assert (total.forwards, total.running) == (7, 3)
    assert total.kv_recomputed == {"gone": 3, "late": 5}
    assert (total.steps.tokens.count, total.steps.tokens.sum) == (2, 38)
    assert one.steps.tokens.count == 1

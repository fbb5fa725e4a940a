"""The engine between requests and the transfer library: when it offers, waits, adopts, gives up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.worker.engine_driver import (
    EngineDriver,
    StepFailed,
    make_request,
    prompt_of,
    prompt_that_draws,
)
from tests.worker.engine_fakes import BLOCK, EOS, kv_of
from tests.worker.transfer_fakes import FakeConsumer, FakeProducer
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.connector.contact import UNVERIFIED
from xpyd_worker.engine.request import EngineRequest, ReceiveFrom, SendTo

KEY = TransferKey("a" * 32, 0)
PEER = Address("127.0.0.1", 21001)


def sending(**driver: Any) -> tuple[EngineDriver, FakeProducer]:
    made = EngineDriver(sends=True, **driver)
    assert made.producer is not None
    return made, made.producer


def receiving(**driver: Any) -> tuple[EngineDriver, FakeConsumer]:
    made = EngineDriver(receives=True, **driver)
    assert made.consumer is not None
    return made, made.consumer


def to_send(
    name: str, prompt: list[int], *, key: TransferKey = KEY, cancel: bool = True, **more: Any
) -> EngineRequest:
    transfer = SendTo(key, PEER, len(prompt), cancel)
    return make_request(name, prompt, transfer=transfer, **more)


def to_receive(
    name: str, prompt: list[int], *, key: TransferKey = KEY, wait_s: float = 5.0, **more: Any
) -> EngineRequest:
    return make_request(name, prompt, transfer=ReceiveFrom(key, wait_s), **more)


# --- P


def test_p_offers_with_the_first_chunk_and_stages_each_before_its_forward():
    driver, producer = sending(budget=8)
    driver.submit(to_send("a", prompt_of(18), max_tokens=1))
    staged_at_forward: list[int] = []
    driver.executor.during = lambda step: staged_at_forward.append(producer.offers[KEY].staged)
    driver.run()
    assert [call[0] for call in producer.calls] == ["offer", "stage", "stage", "stage"]
    assert producer.calls[0] == ("offer", KEY, 18, 18)
    assert staged_at_forward == [8, 16, 18]
    assert producer.layers == [0, 1] * 3
    report = driver.outputs["a"][-1].transfer
    assert report is not None
    assert (report.state, report.decode_incarnation) == ("granted", "d-1")
    driver.assert_all_blocks_free()


def test_a_second_request_of_the_same_id_runs_without_a_transfer():
    driver, producer = sending(budget=8)
    driver.submit(to_send("a", prompt_of(18), max_tokens=1))
    driver.submit(to_send("again", prompt_of(18), max_tokens=1))
    driver.run()
    assert [call[0] for call in producer.calls].count("offer") == 1
    reports = [driver.outputs[name][-1].transfer for name in ("a", "again")]
    assert [report and report.state for report in reports] == ["granted", "none"]
    driver.assert_all_blocks_free()


def test_p_does_not_offer_while_the_request_queues():
    driver, producer = sending(seqs=1, budget=4)
    driver.submit(make_request("first", prompt_of(9), max_tokens=3, ignore_eos=True))
    driver.submit(to_send("a", prompt_of(5), max_tokens=1))
    driver.turns(3)
    assert producer.calls == []
    driver.run()
    assert producer.calls[0][0] == "offer"


def test_p_sends_what_its_prefix_cache_holds_before_the_forward():
    driver, producer = sending()
    driver.submit(make_request("a", prompt_of(2 * BLOCK + 1), max_tokens=1))
    driver.run()
    driver.submit(to_send("b", prompt_of(2 * BLOCK + 3), max_tokens=1))
    driver.run()
    assert producer.calls[1:] == [("cached", KEY, 2 * BLOCK), ("stage", KEY, 2 * BLOCK + 3)]


def test_p_offers_the_ids_to_continue_from_behind_the_prompt():
    driver, producer = sending()
    prompt = prompt_of(5)
    driver.submit(to_send("a", prompt, continue_from=((4, 9),), max_tokens=3))
    driver.run()
    assert producer.calls[:2] == [("offer", KEY, 7, 5), ("stage", KEY, 7)]


def test_p_sends_nothing_behind_the_offered_tokens():
    driver, producer = sending()
    driver.submit(to_send("a", prompt_of(5), n=2, max_tokens=6, ignore_eos=True))
    driver.run()
    assert [call[0] for call in producer.calls] == ["offer", "stage"]
    driver.assert_as_alone("a")


def test_p_cancels_when_all_choices_ended_at_their_first_token():
    driver, producer = sending()
    driver.submit(to_send("a", prompt_that_draws(EOS), max_tokens=1))
    driver.run()
    assert producer.calls[-1] == ("cancel", KEY, "stopped")
    report = driver.outputs["a"][-1].transfer
    assert report is not None
    assert report.state == "none"


def test_p_never_cancels_for_a_router_that_did_not_ask_for_it():
    driver, producer = sending()
    driver.submit(to_send("a", prompt_that_draws(EOS), max_tokens=1, cancel=False))
    driver.run()
    assert [call[0] for call in producer.calls] == ["offer", "stage"]


def test_p_cancels_when_the_server_finds_a_stop_string_in_every_first_token():
    driver, producer = sending()
    driver.submit(to_send("a", prompt_of(6), n=2, max_tokens=1, ignore_eos=True))
    driver.run()
    driver.core.abort("a", (0,))
    driver.run()
    assert producer.offers[KEY].state == "granted"
    driver.core.abort("a", (1,))
    driver.run()
    assert producer.calls[-1] == ("cancel", KEY, "stopped")


@pytest.mark.parametrize("choices", [None, (0,)])
def test_p_cancels_the_transfer_of_an_aborted_prompt(choices: tuple[int, ...] | None):
    driver, producer = sending(budget=8)
    driver.submit(to_send("a", prompt_of(18), max_tokens=1, cancel=False))
    driver.turns(1)
    driver.core.abort("a", choices)
    driver.run()
    assert producer.calls[-1] == ("cancel", KEY, "aborted")
    driver.run()
    driver.assert_all_blocks_free()


def test_p_reports_none_for_a_request_that_was_never_offered():
    driver, producer = sending()
    driver.submit(to_send("a", prompt_of(5), continue_from=((EOS,),), max_tokens=2))
    driver.run()
    report = driver.outputs["a"][-1].transfer
    assert report is not None
    assert report.state == "none"
    assert producer.calls == []


def test_p_preempted_in_prefill_cancels_and_offers_again_when_nothing_is_in_flight():
    driver, producer = sending(blocks=9, budget=4, seqs=4, linger=5)
    driver.submit(make_request("old", prompt_of(4), max_tokens=12, ignore_eos=True))
    driver.turns(1)
    # It takes the last seven blocks for nine steps of three tokens; "old" needs one in the fifth.
    driver.submit(to_send("a", prompt_of(27, 5), max_tokens=1))
    driver.run()
    kinds = [call[0] for call in producer.calls]
    assert kinds.count("offer") == 2
    again = kinds.index("offer", 1)
    assert producer.calls[again - 1] == ("cancel", KEY, "preempted")
    assert kinds[1 : again - 1] == ["stage"] * (again - 2)
    for name in ("old", "a"):
        driver.assert_as_alone(name)
    driver.run()
    driver.assert_all_blocks_free()


def test_a_failed_step_fails_its_requests_and_their_transfers_and_no_others():
    driver, producer = sending(budget=8)
    driver.submit(to_send("a", prompt_of(18), max_tokens=1))
    driver.turns(1)
    driver.submit(make_request("b", prompt_of(5), max_tokens=3))
    driver.executor.fail_with = StepFailed("no luck")
    driver.run()
    last = driver.outputs["a"][-1]
    assert (last.finished, last.error_kind) == (True, "internal")
    assert "no luck" in last.error
    assert producer.offers[KEY].state == "none"
    driver.assert_as_alone("b")
    driver.run()
    driver.assert_all_blocks_free()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_kv_of_a_step_that_a_defect_ends_is_cancelled(depth: int):
    """At depth 1 it ends while it is launched, at depth 2 while it is waited for."""
    driver, producer = sending(budget=8, depth=depth)
    driver.submit(to_send("a", prompt_of(5), max_tokens=1))
    driver.executor.fail_with = RuntimeError("a defect")
    with pytest.raises(RuntimeError, match="a defect"):
        driver.run()
    assert ("cancel", KEY, "failed") in producer.calls


def test_a_request_that_fails_while_its_kv_is_under_way_cancels_it():
    driver, producer = sending(linger=9)
    driver.submit(to_send("a", prompt_of(5), max_tokens=4, ignore_eos=True))
    driver.turns(1)
    driver.executor.fail_with = StepFailed("no luck")
    driver.run()
    assert producer.calls[-1] == ("cancel", KEY, "failed")
    driver.assert_all_blocks_free()


# --- D


@pytest.mark.parametrize("where", ["direct", "buffer", "deferred"])
@pytest.mark.parametrize("length", [4 * BLOCK, 4 * BLOCK + 1, 5 * BLOCK - 1])
def test_d_computes_one_prompt_token_at_most_of_a_landed_prompt(where: str, length: int):
    driver, consumer = receiving()
    prompt = prompt_of(length)
    consumer.arrive(KEY, prompt, where)
    consumer.land(KEY)
    driver.submit(to_receive("a", prompt, max_tokens=5))
    driver.run()
    consumer.land(KEY)
    driver.run()
    assert driver.core.stats().prompt_tokens_computed == 1
    assert driver.outputs["a"][0].received_tokens == length
    driver.assert_as_alone("a")
    driver.assert_all_blocks_free()


def test_d_computes_no_prompt_token_when_it_has_ps_first_token():
    driver, consumer = receiving()
    prompt = prompt_of(9)
    consumer.arrive(KEY, prompt, "direct")
    consumer.land(KEY)
    driver.submit(to_receive("a", prompt, continue_from=((4,),), max_tokens=5))
    driver.run()
    assert driver.core.stats().prompt_tokens_computed == 0
    driver.assert_as_alone("a")


@pytest.mark.parametrize("length", [2 * BLOCK, 2 * BLOCK + 1])
def test_d_forks_n_choices_from_one_landed_prompt(length: int):
    driver, consumer = receiving(budget=64)
    prompt = prompt_of(length)
    consumer.arrive(KEY, prompt, "direct")
    consumer.land(KEY)
    ids = ((4,), (9,), (2,))
    driver.submit(to_receive("a", prompt, n=3, continue_from=ids, max_tokens=7, ignore_eos=True))
    driver.turns(1)
    (step,) = driver.executor.steps
    assert [len(s.token_ids) for s in step.sequences] == [1, 1, 1]
    assert len(step.block_copies) == (2 if length % BLOCK else 0)
    driver.run()
    assert driver.core.stats().prompt_tokens_computed == 0
    driver.assert_as_alone("a")
    driver.assert_all_blocks_free()


def test_d_says_how_many_may_still_start_when_it_asks_for_kv():
    driver, consumer = receiving(seqs=2)
    driver.submit(make_request("old", prompt_of(3), max_tokens=3, ignore_eos=True))
    driver.turns(1)
    driver.submit(to_receive("a", prompt_of(9)))
    driver.turns(1)
    assert consumer.seats == [(KEY, 1)]
    driver.run()
    assert driver.finished("old")
    assert consumer.seats[-1] == (KEY, 2)


def test_d_pulls_nothing_into_blocks_that_one_before_could_not_be_pulled_into():
    driver, consumer = receiving(seqs=2)
    keys = [TransferKey(letter * 32, 0) for letter in "abc"]
    consumer.crowded.add(keys[1])
    for key in keys:
        driver.submit(to_receive(key.uuid[0], prompt_of(9), key=key))
    driver.turns(1)
    assert consumer.seats == list(zip(keys, (2, 2, 0), strict=True))


def test_d_lets_others_run_while_one_waits_for_its_kv():
    driver, _consumer = receiving()
    driver.submit(to_receive("a", prompt_of(9)))
    driver.submit(make_request("b", prompt_of(5, 3), max_tokens=3))
    driver.run()
    assert driver.finished("b")
    assert not driver.finished("a")
    assert not driver.core.is_idle()


def test_d_computes_the_prompt_itself_when_the_kv_is_late():
    driver, consumer = receiving()
    driver.submit(to_receive("a", prompt_of(9), wait_s=5.0))
    driver.run()
    assert driver.executor.steps == []
    driver.now += 5.0
    driver.run()
    assert driver.core.stats().kv_recomputed == {"late": 1}
    assert driver.core.stats().kv_recomputed_tokens == {"late": 9}
    driver.assert_as_alone("a")
    assert not consumer.expected


@pytest.mark.parametrize(
    ("reason", "recompute"), [(UNVERIFIED, True), (UNVERIFIED, False), ("died", True)]
)
def test_d_keeps_what_it_computed_of_a_prompt_until_that_is_compared(reason: str, recompute: bool):
    driver, consumer = receiving(recompute=recompute, seqs=4, budget=4)
    consumer.compares[KEY] = 9
    consumer.arrive(KEY, prompt_of(9), "buffer")
    consumer.fail(KEY, reason)
    driver.submit(to_receive("a", prompt_of(9)))
    driver.run()
    driver.assert_as_alone("a")
    if reason == UNVERIFIED:
        [(blocks, release)] = consumer.computed_blocks.values()
        kept = [driver.executor.slot(blocks, position) for position in range(9)]
        assert kept == kv_of(prompt_of(9))
        assert driver.pool.num_free == driver.pool.num_blocks - len(blocks)
        release()
    assert bool(consumer.computed_blocks) == (reason == UNVERIFIED)
    driver.assert_all_blocks_free()


def test_d_may_be_told_to_fail_instead_of_recomputing():
    driver, consumer = receiving(recompute=False)
    consumer.arrive(KEY, prompt_of(9), "direct")
    consumer.fail(KEY, "died")
    driver.submit(to_receive("a", prompt_of(9)))
    driver.run()
    last = driver.outputs["a"][-1]
    assert (last.finished, last.error_kind) == (True, "kv_failed")
    assert "died" in last.error
    assert last.kv == "failed; reason=died"
    driver.assert_all_blocks_free()


def test_kv_that_was_never_sent_is_recomputed_at_once_and_counted():
    driver, _ = receiving()
    driver.submit(replace(make_request("a", prompt_of(9)), kv_missing="not_sent"))
    driver.run()
    assert driver.core.stats().kv_recomputed == {"not_sent": 1}
    driver.assert_as_alone("a")


def test_kv_that_was_never_sent_fails_the_request_where_recompute_is_off():
    driver, _ = receiving(recompute=False)
    driver.submit(replace(make_request("a", prompt_of(9)), kv_missing="not_sent"))
    driver.run()
    last = driver.outputs["a"][-1]
    assert (last.finished, last.error_kind) == (True, "kv_failed")
    assert last.kv == "failed; reason=not_sent"
    assert driver.executor.steps == []


def test_d_preempted_after_adoption_recomputes_and_never_asks_again():
    driver, consumer = receiving(blocks=7, budget=64)
    driver.submit(make_request("old", prompt_of(7, 5), max_tokens=14, ignore_eos=True))
    driver.turns(1)
    prompt = prompt_of(11)
    consumer.arrive(KEY, prompt, "direct")
    consumer.land(KEY)
    driver.submit(to_receive("a", prompt, max_tokens=12, ignore_eos=True))
    driver.run()
    assert driver.core.stats().kv_recomputed == {"preempted": 1}
    for name in ("old", "a"):
        driver.assert_as_alone(name)
    driver.assert_all_blocks_free()


@pytest.mark.parametrize("choices", [None, (0,)])
@pytest.mark.parametrize("landed", [True, False])
def test_d_frees_the_kv_of_a_request_aborted_in_the_queue(
    landed: bool, choices: tuple[int, ...] | None
):
    driver, consumer = receiving()
    prompt = prompt_of(9)
    driver.submit(to_receive("a", prompt))
    driver.run()
    consumer.arrive(KEY, prompt, "direct")
    if landed:
        consumer.land(KEY)
    driver.core.abort("a", choices)
    driver.run()
    assert consumer.calls[-1] == ("forget", KEY)
    driver.assert_all_blocks_free()


def test_d_forgets_the_kv_of_a_request_that_it_refuses_or_that_ended():
    driver, consumer = receiving(blocks=8)
    driver.submit(to_receive("a", prompt_of(9), max_tokens=100))
    driver.submit(to_receive("b", prompt_of(9), key=TransferKey("b" * 32, 0), max_tokens=0))
    driver.run()
    assert not consumer.expected
    assert [call[0] for call in consumer.calls] == ["expect", "forget"] * 2


def test_d_refuses_no_request_whose_kv_it_granted():
    driver, consumer = receiving(max_waiting=1)
    driver.submit(make_request("first", prompt_of(5, 4)))
    consumer.arrive(KEY, prompt_of(9), "direct")
    consumer.land(KEY)
    driver.submit(to_receive("a", prompt_of(9)))
    driver.submit(to_receive("b", prompt_of(9), key=TransferKey("b" * 32, 0)))
    driver.run()
    driver.assert_as_alone("a")
    assert driver.outputs["b"][-1].error_kind == "busy"


def test_landed_kv_behind_a_request_without_blocks_gets_through():
    driver, consumer = receiving(blocks=6)
    prompt = prompt_of(11)
    consumer.arrive(KEY, prompt, "direct")
    consumer.land(KEY)
    driver.submit(make_request("big", prompt_of(17, 5), max_tokens=3))
    driver.submit(to_receive("a", prompt, max_tokens=3))
    driver.run()
    assert driver.executor.steps[0].sequences[0].log_id == "a"
    for name in ("big", "a"):
        driver.assert_as_alone(name)


def test_offers_do_not_starve_the_first_in_the_queue():
    driver, consumer = receiving(blocks=8)
    driver.submit(make_request("old", prompt_of(15), max_tokens=6, ignore_eos=True))
    driver.turns(1)
    driver.submit(make_request("big", prompt_of(22, 5), max_tokens=3))
    driver.turns(1)
    consumer.arrive(KEY, prompt_of(9), "direct")
    assert consumer.arrivals[KEY].where == "deferred"
    driver.run()
    assert driver.finished("big")


def test_when_nobody_runs_what_landed_goes_before_a_request_it_keeps_blocks_from():
    driver, consumer = receiving(blocks=6)
    prefix = prompt_of(2 * BLOCK)
    driver.submit(make_request("first", [*prefix, 3], max_tokens=1))
    driver.run()
    # It pins two cached blocks and takes the third only when it starts; "big" needs five.
    consumer.arrive(KEY, [*prefix, 9, 8, 7], "buffer")
    consumer.land(KEY)
    driver.submit(make_request("big", prompt_of(17, 20), max_tokens=3))
    driver.submit(to_receive("a", [*prefix, 9, 8, 7], max_tokens=3))
    driver.run()
    for name in ("big", "a"):
        driver.assert_as_alone(name)
    driver.assert_all_blocks_free()


def test_blocks_freed_while_the_queue_is_gone_through_let_its_first_start():
    driver, consumer = receiving(blocks=6)
    consumer.arrive(KEY, prompt_of(9, 30), "direct")
    consumer.land(KEY)
    driver.submit(make_request("big", prompt_of(17, 20), max_tokens=3))
    # Its KV is another prompt's; refusing it frees the blocks that "big" waits for.
    driver.submit(to_receive("a", prompt_of(9), max_tokens=3))
    driver.run()
    assert driver.core.stats().kv_recomputed == {"other_prompt": 1}
    for name in ("big", "a"):
        driver.assert_as_alone(name)


def test_kv_release_reaches_the_consumer():
    driver, consumer = receiving()
    consumer.arrive(KEY, prompt_of(9), "direct")
    driver.core.kv_release(KEY.uuid)
    driver.run()
    driver.assert_all_blocks_free()
    assert driver.core.kv_offered(KEY) is not None


def test_prompt_scores_are_computed_here_whatever_lands():
    driver, consumer = receiving()
    prompt = prompt_of(9)
    consumer.arrive(KEY, prompt, "direct")
    consumer.land(KEY)
    driver.submit(to_receive("a", prompt, prompt_logprobs=0, max_tokens=2))
    driver.run()
    assert len(driver.outputs["a"][0].prompt_logprobs or ()) == 9
    assert driver.core.stats().kv_recomputed == {"prompt_logprobs": 1}
    driver.assert_as_alone("a")
    driver.assert_all_blocks_free()

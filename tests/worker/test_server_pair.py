"""What P answers to the router, and how D goes on from it: continuation, transfers, usage."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.worker.server_fakes import EOS, Running, ScriptedEngine, say, serving
from xpyd_core.blocks import prompt_digest
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.values import OfferedPrompt
from xpyd_worker.engine.request import ReceiveFrom, SendTo, TransferReport
from xpyd_worker.server.service import KvPlace

UUID = "93923d63113b4b338973f24d19d4bf11"
PAIR = f"___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_{UUID}"
PATH = "/v1/completions"


async def ask(server: Running, body: Any, request_id: str = PAIR) -> Any:
    answer = await server.client.post(PATH, json=body, headers={"X-Request-Id": request_id})
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        return [
            json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")
        ]
    return answer.json()


def to_p(prompt: Any = "hi", client_max_tokens: int | None = 10, **fields: Any) -> Any:
    params = {"seed": 3, "client_max_tokens": client_max_tokens}
    return {
        "prompt": prompt,
        "max_tokens": 1,
        "return_token_ids": True,
        "kv_transfer_params": params,
        **fields,
    }


def to_d(continue_from: Any, emit_from: Any = None, prompt: Any = "hi", **fields: Any) -> Any:
    params = {
        "seed": 3,
        "continue_from": continue_from,
        "emit_from": emit_from or [0] * len(continue_from),
        "response_id": "cmpl-router",
        "created": 5,
        **fields.pop("params", {}),
    }
    return {"prompt": prompt, "kv_transfer_params": params, **fields}


# --- P


async def test_p_sends_each_prompts_kv_to_the_d_of_the_id() -> None:
    async with serving(role="Prefill") as server:
        answer = await ask(server, to_p(["hi", "yo!"]))
        first, second = (r.transfer for r in server.engine.requests)
        peer = Address("10.0.1.3", 22001)
        assert first == SendTo(TransferKey(UUID, 0), peer, 2, cancel_when_done=True)
        assert second == SendTo(TransferKey(UUID, 1), peer, 3, cancel_when_done=True)
        assert [r.log_id for r in server.engine.requests] == [UUID, UUID]
        assert answer["kv_transfer_params"] == {
            "transfer": ["granted", "granted"],
            "reason": ["", ""],
            "decode_incarnation": "d-inc",
            "prompt_digest": [prompt_digest(list(b"hi")), prompt_digest(list(b"yo!"))],
        }
        choice = answer["choices"][0]
        assert (choice["text"], choice["token_ids"]) == ("h", [ord("h")])
        assert choice["finish_reason"] == "length"
        assert UUID not in answer["id"]
        assert "10.0.1" not in answer["id"]


async def test_without_our_routers_word_p_never_cancels() -> None:
    async with serving(role="Prefill") as server:
        await ask(server, {"prompt": "hi", "max_tokens": 1})
        transfer = server.engine.requests[0].transfer
        assert isinstance(transfer, SendTo)
        assert not transfer.cancel_when_done


@pytest.mark.parametrize("peer", ["name:22001", "10.0.1.3:80"])
async def test_an_address_that_must_not_be_dialled_makes_no_transfer(peer: str) -> None:
    async with serving(role="Prefill") as server:
        request_id = f"___prefill_addr_10.0.1.2:21001___decode_addr_{peer}_{UUID}"
        answer = await ask(server, to_p(), request_id)
        assert answer["kv_transfer_params"]["transfer"] == ["none"]
        assert server.engine.requests[0].transfer is None


@pytest.mark.parametrize("role", ["Prefill", "Decode", "Aggregated"])
async def test_a_bare_uuid_runs_alone_on_every_role(role: str) -> None:
    async with serving(role=role) as server:
        answer = await ask(server, {"prompt": "hi", "max_tokens": 1}, UUID)
        assert server.engine.requests[0].transfer is None
        assert server.engine.requests[0].log_id == UUID
        assert "kv_transfer_params" not in answer


async def test_p_holds_back_what_may_still_change() -> None:
    async with serving(ScriptedEngine(say("é")), role="Prefill") as server:
        assert (await ask(server, to_p()))["choices"][0]["text"] == ""
        alone = await ask(server, {"prompt": "hi", "max_tokens": 1}, UUID)
        assert alone["choices"][0]["text"] == "\ufffd"
    async with serving(ScriptedEngine(say("stay")), role="Prefill") as server:
        assert (await ask(server, to_p(stop="stop")))["choices"][0]["text"] == ""


async def test_p_says_that_a_choice_ended_at_its_first_token() -> None:
    async with serving(ScriptedEngine(say("")), role="Prefill") as server:
        assert (await ask(server, to_p()))["choices"][0]["finish_reason"] == "stop"
    async with serving(ScriptedEngine(say("X")), role="Prefill") as server:
        answer = await ask(server, to_p(stop=["X"]))
        choice = answer["choices"][0]
        assert (choice["finish_reason"], choice["text"]) == ("stop", "")
        # The engine takes it for a length end that goes on at D; this says that it does not.
        request_id = server.engine.requests[0].request_id
        assert server.engine.aborted == [(request_id, (0,))]


async def test_p_continues_behind_the_ids_it_is_given() -> None:
    async with serving(role="Prefill") as server:
        body = to_p(max_tokens=4)
        body["kv_transfer_params"]["continue_from"] = [list(b"hel")]
        answer = await ask(server, body)
        assert answer["choices"][0]["token_ids"] == [ord("l")]
        assert answer["choices"][0]["text"] == "l"
        assert server.engine.requests[0].continue_from == (tuple(b"hel"),)
        # The digest is the prompt's alone.
        assert answer["kv_transfer_params"]["prompt_digest"] == [prompt_digest(list(b"hi"))]


async def test_p_checks_the_clients_own_limit_before_it_computes() -> None:
    async with serving(role="Prefill", max_model_len=20) as server:
        answer = await server.client.post(
            PATH, json=to_p(client_max_tokens=19), headers={"X-Request-Id": PAIR}
        )
        assert answer.status_code == 400
        assert "maximum context length is 20 tokens" in answer.text
        assert server.engine.requests == []
        await ask(server, to_p(client_max_tokens=18))
        await ask(server, to_p(client_max_tokens=None))


# --- D


async def test_d_waits_for_the_kv_and_answers_all_of_it() -> None:
    async with serving(role="Decode") as server:
        answer = await ask(server, to_d([[ord("h")]]))
        key, peer = TransferKey(UUID, 0), Address("10.0.1.2", 21001)
        assert server.engine.requests[0].transfer == ReceiveFrom(key, 1.5, peer)
        assert answer["choices"][0]["text"] == "hello world"
        assert (answer["id"], answer["created"]) == ("cmpl-router", 5)
        assert answer["usage"]["completion_tokens"] == 12
        assert "token_ids" not in answer["choices"][0]


@pytest.mark.parametrize(
    ("params", "missing"),
    [
        ({}, ""),
        ({"transfer": ["granted"], "decode_incarnation": "my-inc"}, ""),
        ({"transfer": ["pending"], "decode_incarnation": ""}, ""),
        ({"transfer": ["none"]}, "not_sent"),
        ({"transfer": ["granted"], "decode_incarnation": "another"}, "restarted"),
    ],
)
async def test_d_waits_only_for_kv_that_can_come_and_says_what_is_missing(
    params: Any, missing: str
) -> None:
    async with serving(role="Decode") as server:
        await ask(server, to_d([[ord("h")]], params=params))
        request = server.engine.requests[0]
        assert (request.transfer is None) == bool(missing)
        assert request.kv_missing == missing


async def test_a_foreign_router_needs_no_kv_params() -> None:
    async with serving(role="Decode") as server:
        answer = await ask(server, {"prompt": "hi", "kv_transfer_params": None})
        assert answer["choices"][0]["text"] == "hello world"
        assert isinstance(server.engine.requests[0].transfer, ReceiveFrom)


@pytest.mark.parametrize("text", ["hello", "é中!", "say stops", "aXb"])
async def test_streams_of_p_and_d_together_are_the_whole_text(text: str) -> None:
    """Wherever the hand-over falls, P's text and D's make what one instance gives."""

    stop = ["stop!", "X"]
    ids = list(text.encode())
    async with (
        serving(ScriptedEngine(say(text))) as alone,
        serving(ScriptedEngine(say(text)), role="Prefill") as p,
        serving(ScriptedEngine(say(text)), role="Decode") as d,
    ):
        whole = (await ask(alone, {"prompt": "hi", "stop": stop}))["choices"][0]["text"]
        for k in range(1, len(ids)):
            body = to_p(stop=stop, max_tokens=k)
            body["kv_transfer_params"]["continue_from"] = [ids[: k - 1]]
            before = (await ask(p, body))["choices"][0]
            if before["finish_reason"] == "stop":
                break
            rest, again = "", ""
            for chunk in await ask(d, to_d([ids[:k]], [k], stop=stop, stream=True)):
                rest += chunk["choices"][0]["text"]
            for chunk in await ask(d, to_d([ids[:k]], [k - 1], stop=stop, stream=True)):
                again += chunk["choices"][0]["text"]
            assert whole.endswith(rest)
            assert again == before["text"] + rest


async def test_d_streams_one_chunk_per_step_with_ids_and_no_role() -> None:
    async with serving(ScriptedEngine(say("aé")), role="Decode") as server:
        chunks = await ask(server, to_d([[ord("a")]], [1], stream=True))
        choices = [c["choices"][0] for c in chunks]
        assert [c["token_ids"] for c in choices] == [[0xC3], [0xA9], [EOS]]
        assert [c["text"] for c in choices] == ["", "é", ""]
        answer = await server.client.post(
            "/v1/chat/completions",
            json={**to_d([[ord("a")]], [1]), "messages": [{"role": "user", "content": "x"}]}
            | {"stream": True},
            headers={"X-Request-Id": PAIR},
        )
        first = json.loads(answer.text.split("\n")[0][6:])
        assert "role" not in first["choices"][0]["delta"]
        assert first["choices"][0]["token_ids"] == [0xC3]


async def test_choices_that_ended_in_their_ids_end_at_once() -> None:
    async with serving(ScriptedEngine(say("abc")), role="Decode") as server:
        body = to_d([[EOS], [ord("a")], [ord("a"), ord("X")], [ord("a")] * 4], n=4, stop="X")
        body["max_tokens"] = 4
        choices = (await ask(server, body))["choices"]
        assert [c["text"] for c in choices] == ["", "abc", "a", "aaaa"]
        assert [c["finish_reason"] for c in choices] == ["stop", "stop", "stop", "length"]
        assert [choices for _, choices in server.engine.aborted] == [(2,)]


async def test_a_prompt_whose_choices_all_ended_in_a_stop_string_is_given_up() -> None:
    async with serving(role="Decode") as server:
        answer = await ask(server, to_d([[ord("X")]], stop="X"))
        assert answer["choices"][0]["finish_reason"] == "stop"
        # Ending all its choices frees the KV that waits for it.
        assert server.engine.aborted == [(server.engine.requests[0].request_id, (0,))]


async def test_d_takes_the_offered_ids_where_the_digest_agrees() -> None:
    offered = OfferedPrompt((5, 6, 7, 8), prompt_tokens=3)

    async with serving(role="Decode") as server:
        server.engine.offers[TransferKey(UUID, 0)] = offered
        digest = prompt_digest((5, 6, 7))
        await ask(server, to_d([[1]], params={"prompt_digest": [digest]}))
        await ask(server, to_d([[1]], params={"prompt_digest": ["0" * 64]}))
        await ask(server, to_d([[1]]))
        prompts = [r.prompt for r in server.engine.requests]
        assert prompts == [(5, 6, 7), tuple(b"hi"), tuple(b"hi")]


async def test_ps_logprobs_stand_in_front_of_ds() -> None:
    async with serving(role="Prefill") as server:
        first = (await ask(server, to_p(logprobs=1)))["choices"][0]["logprobs"]
    async with serving(role="Decode") as server:
        body = to_d([[ord("h")]], logprobs=1, max_tokens=3, params={"first_logprobs": [first]})
        logprobs = (await ask(server, body))["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["h", "e", "l"]
        assert logprobs["text_offset"] == [0, 1, 2]
        body = to_d([[ord("h")]], [1], logprobs=1, max_tokens=3, stream=True)
        parts = [c["choices"][0]["logprobs"] for c in await ask(server, body)]
        assert [o for part in parts for o in part["text_offset"]] == [1, 2]


async def test_a_continuation_draws_with_the_routers_seed() -> None:
    async with serving(role="Decode") as server:
        await ask(server, to_d([[1]]))
        assert server.engine.requests[0].sampling.seed == 3


async def test_scoring_the_prompt_never_waits_for_kv() -> None:
    async with serving(role="Decode") as server:
        await ask(server, {"prompt": "hi", "echo": True, "logprobs": 0, "max_tokens": 1})
        assert server.engine.requests[0].transfer is None


async def test_a_transfer_that_failed_is_reported() -> None:
    engine = ScriptedEngine(report=TransferReport("none", reason="auth"))
    async with serving(engine, role="Prefill") as server:
        params = (await ask(server, to_p()))["kv_transfer_params"]
        assert (params["transfer"], params["decode_incarnation"]) == (["none"], "")
        assert params["reason"] == ["auth"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["moved", "recomputed; reason=no_offer"])
async def test_d_says_in_a_header_what_became_of_the_kv(said: str, stream: bool) -> None:
    async with serving(ScriptedEngine(kv=said), role="Decode") as server:
        body = to_d([[ord("h")]], [1], stream=stream)
        answer = await server.client.post(PATH, json=body, headers={"X-Request-Id": PAIR})
        assert answer.headers["X-Xpyd-Kv"] == said
        service = server.api.service
        assert service is not None
        [peer] = service.kv_peers.latest()
        assert peer.peer == "10.0.1.2:21001"
        assert (peer.moved, peer.failed) == ((1, {}) if said == "moved" else (0, {"no_offer": 1}))
        alone = await server.client.post(PATH, json=body, headers={"X-Request-Id": UUID})
        assert "X-Xpyd-Kv" not in alone.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_d_says_in_a_header_why_a_request_failed_for_its_kv(stream: bool) -> None:
    said = "failed; reason=no_offer"
    engine = ScriptedEngine(error="the KV", error_kind="kv_failed", kv=said)
    async with serving(engine, role="Decode") as server:
        body, headers = to_d([[ord("h")]], [1], stream=stream), {"X-Request-Id": PAIR}
        answer = await server.client.post(PATH, json=body, headers=headers)
        assert (answer.status_code, answer.headers["X-Xpyd-Kv"]) == (503, said)
        assert answer.json()["error"]["code"] == "kv_transfer_failed"
        assert answer.headers["Retry-After"] == "1"
        service = server.api.service
        assert service is not None
        [peer] = service.kv_peers.latest()
        assert (peer.peer, peer.failed) == ("10.0.1.2:21001", {"no_offer": 1})
        engine.error_kind, engine.kv = "busy", ""
        answer = await server.client.post(PATH, json=body, headers=headers)
        assert answer.status_code == 503
        assert "X-Xpyd-Kv" not in answer.headers


async def test_d_says_that_one_of_several_prompts_was_computed_here() -> None:
    said = {0: "moved", 1: "recomputed; reason=timeout"}
    async with serving(ScriptedEngine(kv=said), role="Decode") as server:
        body = {"prompt": ["hi", "yo"]}
        answer = await server.client.post(PATH, json=body, headers={"X-Request-Id": PAIR})
        assert answer.headers["X-Xpyd-Kv"] == "recomputed; reason=timeout"


async def test_d_says_that_a_pair_id_was_not_signed_by_its_key() -> None:
    async with serving(role="Decode", signed_by=(b"0123456789abcdef",)) as server:
        answer = await server.client.post(
            PATH, json={"prompt": "hi"}, headers={"X-Request-Id": PAIR, "X-Xpyd-Pair-Mac": "00"}
        )
        assert answer.headers["X-Xpyd-Kv"] == "recomputed; reason=unsigned"


async def test_ds_whole_chat_has_the_prompts_ids_and_its_stream_does_not_repeat_them() -> None:
    async with serving(role="Decode") as server:
        body = to_d([[ord("a")]], return_token_ids=True)
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "x"}]
        post, headers = server.client.post, {"X-Request-Id": PAIR}
        whole = (await post("/v1/chat/completions", json=body, headers=headers)).json()
        assert whole["prompt_token_ids"] == list(b"user:x\n")
        body["stream"] = True
        body["kv_transfer_params"]["emit_from"] = [1]
        streamed = await post("/v1/chat/completions", json=body, headers=headers)
        assert "prompt_token_ids" not in streamed.text


async def test_min_tokens_beyond_the_context_end_with_it_once_the_first_token_is_out() -> None:
    async with serving(role="Decode") as server:
        body = to_d([[ord("a")]], min_tokens=10**6)
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "x"}]
        headers = {"X-Request-Id": PAIR}
        answer = await server.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200
        sampling = server.engine.requests[0].sampling
        assert sampling.min_tokens == sampling.max_tokens


async def test_an_answer_to_a_bare_uuid_carries_it_for_the_router_to_replace() -> None:
    async with serving(role="Decode") as server:
        answer = await ask(server, {"prompt": "hi", "max_tokens": 2}, request_id=UUID)
        assert answer["id"] == f"cmpl-{UUID}"


@pytest.mark.parametrize(("context", "status"), [(20, 200), (11, 400)])
async def test_p_refuses_what_its_d_has_no_room_for(context: int, status: int) -> None:
    async with serving(role="Prefill") as server:
        body = to_p("hi", client_max_tokens=10)
        body["kv_transfer_params"]["max_model_len"] = context
        answer = await server.client.post(PATH, json=body, headers={"X-Request-Id": PAIR})
        assert answer.status_code == status, answer.text


async def test_text_offsets_of_a_p_that_continues_begin_behind_what_was_sent() -> None:
    async with serving(role="Prefill") as server:
        body = to_p("hi", max_tokens=3, logprobs=0)
        body["kv_transfer_params"]["continue_from"] = [[ord("a"), ord("b")]]
        answer = await ask(server, body)
        assert answer["choices"][0]["logprobs"]["text_offset"] == [2]


# --- replicas

PLACES = [
    KvPlace(Address("10.0.1.3", 22001), "inc-0"),
    KvPlace(Address("10.0.1.3", 22003), "inc-1"),
]
SECOND = PAIR.replace(":22001", ":22003")


async def post(server: Running, request_id: str, header: str | None = None, **params: Any) -> Any:
    headers = {"X-Request-Id": request_id}
    if header is not None:
        headers["X-data-parallel-rank"] = header
    body = to_d([[5]], params=params)
    answer = await server.client.post(PATH, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return server.engine.requests[-1]


async def test_a_pairs_kv_address_names_the_replica_and_the_header_where_there_is_none() -> None:
    async with serving(role="Decode", replicas=2, kv_places=PLACES) as server:
        for header in (None, "0", "1"):
            assert (await post(server, PAIR, header)).replica == 0, "its KV goes there"
            assert (await post(server, SECOND, header)).replica == 1
        assert (await post(server, "alone", "1")).replica == 1
        assert (await post(server, "alone")).replica is None
    mine = [KvPlace(Address("10.0.1.2", port)) for port in (21003, 21001)]
    async with serving(role="Prefill", replicas=2, kv_places=mine) as server:
        assert (await post(server, PAIR, "0")).replica == 1


async def test_a_request_does_not_wait_for_kv_that_went_to_no_replica_or_an_earlier_start() -> None:
    async with serving(role="Decode", replicas=2, kv_places=PLACES) as server:
        found = await post(server, SECOND, decode_incarnation="inc-1")
        assert (found.kv_missing, type(found.transfer)) == ("", ReceiveFrom)
        found = await post(server, SECOND, decode_incarnation="inc-0")
        assert (found.kv_missing, found.transfer) == ("restarted", None)
        found = await post(server, PAIR.replace(":22001", ":22005"), "1")
        assert (found.kv_missing, found.transfer, found.replica) == ("address", None, 1)

"""What D serves alone although a P is there, because the pair cannot name its KV."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from aiohttp import web

from tests.router.fakes import answer, fleet
from tests.router.test_router_dialects import expected, nixl_pair
from tests.router.vllm_engines import compact


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["one", "two"]},
        {"prompt": [[1, 2], [3]]},
        {"n": 2},
        {"use_beam_search": True},
        {"prompt_embeds": "two"},
        {"prompt": None, "prompt_embeds": ["one", "two"]},
    ],
    ids=["two prompts", "two of ids", "two choices", "beams", "and embeddings", "two embeddings"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_has_several_sequences_runs_on_d_alone(
    body: dict[str, Any], stream: bool
) -> None:
    async with fleet() as fleet_:
        (p, _), (d, _), pinned = await nixl_pair(fleet_)
        async with await fleet_.post(max_tokens=3, stream=stream, **body) as response:
            assert response.status == 200
            text = await response.text()
        assert (p.calls, len(d.calls), pinned) == ([], 1, {})
        if body.get("prompt") == ["one", "two"] and not stream:
            texts = [choice["text"] for choice in orjson.loads(text)["choices"]]
            assert texts == [expected("one", 3), expected("two", 3)]
        assert fleet_.metric("xpyd_router_releases_total", result="leased") == 0
        counted = {"prefill": "", "decode": d.beat.http_address, "outcome": "alone"}
        assert fleet_.metric("xpyd_router_kv_outcomes_total", cause="several", **counted) == 1


@pytest.mark.parametrize("dialect", ["nixl", "pair-id"])
@pytest.mark.parametrize(
    ("member", "is_several"),
    [
        (r'"prompt\u005fembeds": "two"', True),
        (r'"prompt_embed\u0073": ["two"]', True),
        ('"prompt_embeds": null', False),
        ('"user": "prompt_embeds"', False),
        (r'"use\u005fbeam_search": true', True),
        ('"use_beam_search": 1', True),
        ('"truncate_prompt_tokens": -1', None),
        (r'"truncate_prompt_tokens": "\u002d1"', None),
        ('"truncate_prompt_tokens": 1', False),
        ('"truncate_prompt_tokens": null', False),
        ('"use_beam_search": false', False),
    ],
)
async def test_a_member_counts_by_its_name_however_that_is_written(
    dialect: str, member: str, is_several: bool | None
) -> None:
    """None: NixlConnector takes KV of another prompt for D's; xpyd's connector compares them."""
    if is_several is None:
        is_several = dialect == "nixl"
    async with fleet() as fleet_:
        (p, _), (d, _), _ = await nixl_pair(fleet_, dialect=dialect)
        text = '{"model": "m", "prompt": "one", "max_tokens": 3, ' + member + "}"
        async with fleet_.http.post(f"{fleet_.base}/v1/completions", data=text) as response:
            assert response.status == 200
            await response.read()
        assert (len(p.calls), len(d.calls)) == (not is_several, 1)


@pytest.mark.parametrize(
    ("content", "is_media"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:x"}}], True),
        ([{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}], True),
        ([{"video_url": {"url": "x"}}], True),
        ([{"type": "text", "text": '{"type": "image_url", "image_url": 1}'}], False),
        ('"image_url"', False),
    ],
    ids=str,
)
async def test_chats_with_media_run_on_d_alone_where_the_connector_sends_nothing_of_them(
    content: Any, is_media: bool
) -> None:
    for dialect, alone in (("pair-id", is_media), ("nixl", False)):
        async with fleet() as fleet_:
            (p, _), (d, _), _ = await nixl_pair(fleet_, dialect=dialect)
            p.script = answer(200, {"choices": [], "kv_transfer_params": None})
            d.script = answer(200, {"choices": []})
            messages = [{"role": "user", "content": content}]
            tools = [{"type": "function", "function": {"name": "image_url"}}]
            await fleet_.json("chat/completions", messages=messages, tools=tools)
            assert (len(p.calls), len(d.calls)) == (not alone, 1)


@pytest.mark.parametrize("dialect", ["nixl", "nixl-push", "pair-id"])
@pytest.mark.parametrize(
    ("body", "of_p"),
    [
        ({"echo": True}, 0),
        ({"prompt_logprobs": 1}, 0),
        ({"logprobs": 2}, 1),
        ({"best_of": 2}, 1),
        ({"prompt_embeds": "AA"}, 0),
        ({"n": 2}, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_needs_the_prompt_computed_by_one_engine_runs_on_d(
    dialect: str, body: dict[str, Any], of_p: int, stream: bool
) -> None:
    """vLLM's completions know no best_of: a field that is ignored."""
    async with fleet() as fleet_:
        (p, _), (d, _), pinned = await nixl_pair(fleet_, dialect=dialect)
        async with await fleet_.post(max_tokens=3, stream=stream, **body) as response:
            assert response.status == 200
            await response.read()
        assert (len(p.calls), len(d.calls), pinned) == (of_p, 1, {})


async def test_clients_do_not_learn_where_a_d_keeps_kv() -> None:
    """As in NixlConnector's bidirectional mode."""
    async with fleet() as fleet_:
        _, (d, _), _ = await nixl_pair(fleet_)
        text = '"kv_transfer_params":{"remote_host":"10.0.0.9"}'
        body = {"id": "x", "choices": [{"text": text}], "usage": None}
        for said in ({"remote_host": "10.0.0.9", "remote_port": 5600}, None):
            d.script = compact_answer({**body, "kv_transfer_params": said})
            whole = await fleet_.json(prompt="one", max_tokens=3)
            assert whole.pop("kv_transfer_params", None) is None
            assert whole["choices"] == body["choices"]


def compact_answer(body: dict[str, Any]) -> Any:
    """A script that answers as vLLM writes JSON."""

    async def script(*_: Any) -> web.Response:
        return web.json_response(body, dumps=compact)

    return script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("of_vllm", ["P", "D"])
async def test_what_one_of_a_mixed_pair_cannot_name_runs_on_d_alone(
    of_vllm: str, stream: bool
) -> None:
    async with fleet(kv_insecure=True) as fleet_:
        said: dict[str, Any] = {"dialect": "pair-id", "continuation": 0}
        p = await fleet_.engine("P", **(said if of_vllm == "P" else {}))
        d = await fleet_.engine("D", **(said if of_vllm == "D" else {}))
        async with await fleet_.post(max_tokens=3, n=2, stream=stream) as response:
            assert response.status == 200
            await response.read()
        assert (len(p.calls), len(d.calls)) == (0, 1)
        counted = {"prefill": "", "decode": d.beat.instance, "outcome": "alone"}
        assert fleet_.metric("xpyd_router_kv_outcomes_total", cause="several", **counted) == 1
        async with await fleet_.post(max_tokens=3, stream=stream) as response:
            assert response.status == 200
        assert len(p.calls) == 1, "of one choice both take part"

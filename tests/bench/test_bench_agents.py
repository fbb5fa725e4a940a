"""The benchmark of what agents need: schemas, bodies, and that figures are what they say."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jsonschema_rs
import pytest

from bench.agents.bystanders import Beside
from bench.agents.report import BEGIN, OURS, VLLM, Found, reason, report, with_measured
from bench.agents.schemas import bad_ones, renamed, shapes
from bench.agents.structured import Answer, Asked, ask, ending
from bench.agents.translated import APIS, CASES, Case, Cost, body
from bench.report import END
from xpyd_router.request.client_request import parse_request
from xpyd_router.translations.messages import Messages
from xpyd_router.translations.responses import Responses


def _answer(factor: float, *, tokens: int = 17, finish: str = "stop") -> Answer:
    at_s = [factor * (0.1 + 0.01 * n) for n in range(tokens)]
    return Answer(200, "", "{}", finish, tokens, at_s[-1], at_s)


def _asked(who: str, factor: float, number: int = 0) -> Asked:
    plain = _answer(1.0, finish="length")
    return Asked(who, "easy-0", "easy", number, _answer(2 * factor), _answer(factor), plain)


def _found(*asked: Asked) -> Found:
    found = Found(list(asked))
    found.valid = [True for _ in found.whole()]
    return found


def _made(found: Found) -> dict:
    return report(found, [replace(shapes()[0], name="easy-0", group="easy")], "demo", 1)


def _ratios(made: dict) -> dict:
    return {(one["name"], one["contender"]): one for one in made["ratios"]}


def test_schemas_are_the_same_in_each_run_and_no_two_alike() -> None:
    texts = [json.dumps(shape.schema) for shape in shapes()]
    assert texts == [json.dumps(shape.schema) for shape in shapes()]
    assert len(set(texts)) == len(texts) >= 40
    assert len({shape.group for shape in shapes()}) == 7


def test_schemas_are_schemas() -> None:
    for shape in shapes():
        assert jsonschema_rs.meta.is_valid(shape.schema), shape.name


def test_a_renamed_schema_is_another_text_and_takes_the_same_values() -> None:
    shape = shapes()[0]
    other = renamed(shape.schema, "again")
    assert json.dumps(other) != json.dumps(shape.schema)
    assert {**other, "title": None} == {**shape.schema, "title": None}


def test_bad_ones_of_another_round_are_new() -> None:
    first, second = bad_ones(0), bad_ones(1)
    assert first.keys() == second.keys()
    same = [name for name in first if first[name] == second[name]]
    assert same == ["300 deep", "wrong tool"]  # which are refused before anything is compiled


@pytest.mark.parametrize("case", [one for one in CASES if one.wire == "xpyd"], ids=str)
def test_the_apis_ask_for_the_same_chat(case: Case) -> None:
    chat = json.loads(body("chat", case))
    parse_request("chat/completions", body("chat", case))
    for translation in (
        Messages().read(body("messages", case)),
        Responses(None, lambda: 0.0).read(body("responses", case)),
    ):
        made = json.loads(translation.chat.raw)
        assert len(made["messages"]) == len(chat["messages"])
        texts = [json.dumps(one["messages"]).count("the file") for one in (made, chat)]
        assert texts[0] == texts[1]
        assert len(made.get("tools", [])) == len(chat.get("tools", []))
        assert made.get("stream", False) == chat["stream"]


def test_a_ratio_is_of_the_answer_and_the_plain_one_beside_it() -> None:
    ratios = _ratios(_made(_found(_asked(OURS, 1.5), _asked(VLLM, 3.0))))
    assert ratios["TTFT, new schema to none", OURS]["median"] == 3.0
    assert ratios["TTFT, known schema to none", VLLM]["median"] == 3.0
    itl = ratios["ITL, schema to none", OURS]
    assert (itl["median"], itl["holds"]) == (1.5, False)
    assert ratios["ITL under a schema, ours to vLLM's", OURS]["median"] == 0.5


def test_a_short_answer_has_no_time_between_tokens() -> None:
    assert _answer(1.0, tokens=3).itl_s is None
    assert _answer(1.0).itl_s == pytest.approx(0.01)


def test_only_what_ended_by_itself_is_judged() -> None:
    one = replace(_asked(OURS, 1.0), new=_answer(1.0, finish="length"))
    refused = replace(one, new=Answer(400, '{"error":{}}'), again=Answer(400, "{}"), plain=None)
    found = _found(one, replace(refused, shape="easy-1"))
    said = _made(found)["answers"][OURS]
    assert (said["ended"], said["valid"], said["answers"]["cut"]) == (1, 1, 1)
    assert (said["schemas"], said["compiledShare"]) == (2, 0.5)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("response_format.json_schema.schema.a.b.not: this keyword is not supported", "not"),
        ("f: oneOf constraints are not supported. Enable 'coerce", "oneOf"),
        ("f: at most 64 schemas inside each other", "at most 64 schemas inside each other"),
        ("plain", "plain"),
    ],
)
def test_a_refusal_is_counted_by_its_keyword(message: str, expected: str) -> None:
    assert reason(json.dumps({"error": {"message": message}})) == expected
    assert reason("no json") == "no json"


def test_bystanders_are_set_against_the_same_round() -> None:
    found = _found(_asked(OURS, 1.0))
    found.beside[OURS] = [
        Beside("none", 0, [0.01] * 100, {}),
        Beside("harmless", 0, [0.02] * 100, {"regex": _answer(1.0)}),
        Beside("bad", 0, [0.03] * 100, {"regex": Answer(400, "{}", total_s=1.5)}),
    ]
    made = _made(found)
    name = "ITL p99 of plain streams, beside bad schemas to"
    assert _ratios(made)[f"{name} harmless ones", OURS]["median"] == 1.5
    assert _ratios(made)[f"{name} nobody", OURS]["median"] == 3.0
    said = made["bad"][OURS]["answers"]["regex"]
    assert (said["endings"], said["longestS"], said["holds"]) == ({"refused": 1}, 1.5, False)


def test_the_page_has_each_part_and_its_frame_stays() -> None:
    found = _found(_asked(OURS, 1.0), _asked(VLLM, 2.0))
    found.costs = [
        Cost(case.name, api, 0, 1e-3 * (1 + n)) for case in CASES for n, api in enumerate(APIS)
    ]
    found.beside[OURS] = [Beside("bad", 0, [0.01] * 9, {"regex": _answer(1.0)})]
    page = with_measured(f"above\n{BEGIN}before now\n{END}below\n", _made(found))
    assert page.startswith("above\n")
    assert page.endswith("below\n")
    assert "before now" not in page
    assert (
        "| short whole, xpyd | 1,000 | 2,000 | 3,000 | 2.0 (2.0 to 2.0) | 3.0 (3.0 to 3.0) |"
        in page
    )
    assert "| ended, and valid | 2 of 2 | 2 of 2 |" in page
    assert "| regex | whole 1 |" in page


class _Handler(BaseHTTPRequestHandler):
    """Answers a stream; to `refuse` a 400."""

    def log_message(self, *args: object) -> None:
        """Nothing."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked.get("refuse"):
            self._send(400, b'{"error":{"message":"f.not: this keyword is not supported"}}')
            return
        texts = [{"role": "assistant", "content": ""}, {"content": '{"a"'}, {"content": ":1}"}]
        chunks: list[dict] = [{"choices": [{"delta": one}]} for one in texts]
        chunks += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}]
        chunks += [{"choices": [], "usage": {"completion_tokens": 5}}]
        lines = [f"data: {json.dumps(one)}\n\n" for one in chunks]
        self._send(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _send(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_an_answer_has_its_text_its_tokens_and_its_end(port: int) -> None:
    answer = ask(port, {})
    assert (answer.text, answer.tokens, ending(answer)) == ('{"a":1}', 5, "whole")
    assert len(answer.at_s) == 2


def test_a_refused_schema_is_an_answer_too(port: int) -> None:
    answer = ask(port, {"refuse": True})
    assert ending(answer) == "refused"
    assert reason(answer.error) == "not"

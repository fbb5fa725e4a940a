"""A stream piece by piece: what the client gets of it, and what is noted for who goes on."""

from __future__ import annotations

from typing import Any, cast

import orjson
import pytest

from tests.router.fakes import sse
from tests.router.test_router_blame import view_of
from tests.router.test_router_request_state import request_state
from xpyd_router.access_log import Trace
from xpyd_router.errors import CallFailed
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.policy.pairs import Alone
from xpyd_router.request.answers import DONE, MAX_EVENT_BYTES
from xpyd_router.request.attempt import Attempt
from xpyd_router.request.relay import ClientStream, Relay
from xpyd_router.request.state import RequestState, Sent

UUID, PUBLIC = "0123456789abcdef" * 2, "fedcba9876543210" * 2


class Client:
    """Takes what the stream writes; no frames."""

    write_frame = None

    def __init__(self) -> None:
        self.got = b""
        self.has_end = False

    def start(self, status: int, headers: Any) -> None:
        assert status == 200

    def write(self, data: bytes) -> None:
        self.got += data

    def end(self) -> None:
        self.has_end = True


class Figures:
    """Counts as an engine's call does."""

    def __init__(self) -> None:
        self.chunks = self.size_bytes = self.interruptions = 0

    def streamed(self, chunks: int, size_bytes: int) -> None:
        self.chunks += chunks
        self.size_bytes += size_bytes

    def interrupted(self) -> None:
        self.interruptions += 1


class Stream:
    """A relay between an engine and a client, both the test."""

    def __init__(self, sent: Sent | None, **fields: Any) -> None:
        self.client, self.instance_metrics = Client(), Figures()
        self.request_state: RequestState = request_state(sent, stream=True, **fields)
        unused = cast(Any, None)
        attempt = Attempt(
            Alone(view_of("A").instances[0]), key=b"", uuid=UUID, public=PUBLIC, forwarded="",
            loads=LoadTable(), fleet=unused, upstream=unused, instance_metrics=unused,
        )  # fmt: skip
        attempt.running = cast(Any, self.instance_metrics)
        stream = ClientStream(cast(Any, self.client), (), Trace("completions", 0.0), lambda: 0.0)
        self.relay = Relay(self.request_state, attempt, stream, sent=sent)

    def feed(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.relay.feed(piece)


def chunk(*choices: dict[str, Any], **fields: Any) -> bytes:
    return sse({"id": f"cmpl-{PUBLIC}", "choices": list(choices), **fields})


def choice(ids: list[int], text: str = "x", finish: str | None = None, index: int = 0) -> Any:
    return {"index": index, "text": text, "finish_reason": finish, "token_ids": ids}


def sent(choices: int = 1) -> Sent:
    return Sent([[] for _ in range(choices)], "k", {}, "m")


def texts(data: bytes) -> list[tuple[int, str, str | None]]:
    events = data.removesuffix(DONE).split(b"\n\n")[:-1]
    choices = [one for event in events for one in orjson.loads(event[6:])["choices"]]
    assert not any("token_ids" in one for one in choices)
    return [(one["index"], one["text"], one["finish_reason"]) for one in choices]


def test_the_tokens_of_each_chunk_are_noted_and_the_last_one_ends_its_choice() -> None:
    had = sent()
    stream = Stream(had)
    stream.feed(chunk(choice([1])), chunk(choice([2, 3])), chunk(choice([4], "y", "length")))
    assert (had.token_ids, had.ended, had.is_over) == ([[1, 2, 3, 4]], {0}, True)
    assert texts(stream.client.got) == [(0, "x", None), (0, "x", None), (0, "y", "length")]


@pytest.mark.parametrize("shows_ids", [False, True])
def test_what_an_engine_says_of_reasoning_is_noted_and_not_passed_on(shows_ids: bool) -> None:
    had = sent()
    stream = Stream(had, return_token_ids=shows_ids)
    stream.feed(chunk(choice([1])), chunk({**choice([2], "y", "stop"), "reasoning_tokens": 1}))
    assert had.reasoning == {0: 1}
    assert b"reasoning_tokens" not in stream.client.got
    assert (b"token_ids" in stream.client.got) is shows_ids


def test_who_goes_on_behind_the_end_of_a_choice_says_nothing_more_of_it() -> None:
    had = sent(2)
    stream = Stream(had, n=2)
    stream.feed(
        chunk(choice([1]), choice([9], index=1)),
        chunk(choice([2], "y", "stop")),
        chunk(choice([], "", "stop"), choice([8], index=1)),
        chunk(choice([], "", "stop")),
    )
    assert (had.token_ids, had.ended) == ([[1, 2], [9, 8]], {0})
    assert stream.client.got.count(b"data: ") == 3
    assert texts(stream.client.got) == [
        (0, "x", None), (1, "x", None), (0, "y", "stop"), (1, "x", None)
    ]  # fmt: skip


def test_a_choice_that_stands_twice_in_a_chunk_is_noted_twice() -> None:
    had = sent()
    stream = Stream(had)
    stream.feed(chunk(choice([1])), chunk(choice([2]), choice([3])))
    assert had.token_ids == [[1, 2, 3]]
    assert texts(stream.client.got) == [(0, "x", None)] * 3


def test_token_ids_within_a_text_are_text() -> None:
    had, said = sent(), ',"token_ids":[5]'
    stream = Stream(had)
    stream.feed(chunk(choice([1], said)), chunk(choice([2], said)))
    assert had.token_ids == [[1, 2]]
    assert texts(stream.client.got) == [(0, said, None)] * 2


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("choices", [1, 2])
def test_any_cut_is_the_same_to_the_client_and_in_the_figures(size: int, choices: int) -> None:
    had = sent(choices)
    stream = Stream(had, n=choices)
    events = [chunk(choice([n], f"t{n} ", index=n % choices)) for n in range(6)]
    data = b"".join([*events, DONE])
    stream.feed(*(data[at : at + size] for at in range(0, len(data), size)))
    assert stream.relay.is_done
    assert stream.client.has_end
    assert stream.client.got.endswith(DONE)
    assert [text for _, text, _ in texts(stream.client.got)] == [f"t{n} " for n in range(6)]
    assert had.token_ids == ([[0, 2, 4], [1, 3, 5]] if choices == 2 else [[*range(6)]])
    assert (stream.instance_metrics.chunks, stream.instance_metrics.size_bytes) == (6, len(data))


def test_each_event_alone_is_counted_with_all_its_bytes() -> None:
    stream = Stream(sent())
    events = [chunk(choice([n])) for n in range(4)]
    stream.feed(*events, DONE)
    size_bytes = sum(map(len, events)) + len(DONE)
    assert (stream.instance_metrics.chunks, stream.instance_metrics.size_bytes) == (4, size_bytes)


def test_the_internal_id_is_replaced_wherever_it_stands() -> None:
    stream = Stream(sent())
    stream.feed(
        *(chunk(choice([n])).replace(PUBLIC.encode(), UUID.encode()) for n in range(3)),
        chunk(choice([3], f"at {UUID}")).replace(PUBLIC.encode(), UUID.encode()),
        sse({"id": f"chatcmpl-longer-{UUID}", "choices": [choice([4])]}),
        chunk(choice([5])),
    )
    assert UUID.encode() not in stream.client.got
    assert stream.client.got.count(PUBLIC.encode()) == 7


def test_nothing_comes_behind_the_end() -> None:
    stream = Stream(sent())
    stream.feed(chunk(choice([1])), DONE + chunk(choice([2])), chunk(choice([3])), DONE)
    assert texts(stream.client.got) == [(0, "x", None)]
    assert stream.client.got.count(DONE) == 1


def test_what_came_before_a_failure_is_sent_as_it_is_noted() -> None:
    had = sent()
    stream = Stream(had)
    failed = sse({"error": {"message": "out of memory", "type": "server_error"}})
    with pytest.raises(CallFailed) as raised:
        stream.feed(chunk(choice([1])), chunk(choice([2])) + failed)
    assert raised.value.cause == "status"
    assert had.token_ids == [[1, 2]]
    assert texts(stream.client.got) == [(0, "x", None)] * 2


def test_an_error_that_nobody_can_go_on_behind_is_the_clients_last_event() -> None:
    stream = Stream(None)
    failed = sse({"error": {"message": "out of memory", "type": "server_error"}})
    stream.feed(sse({"id": "u", "choices": [{"index": 0, "text": "x"}]}), failed)
    assert stream.client.got.endswith(failed)
    assert stream.client.has_end


def test_an_error_event_is_cleared_of_the_internal_id_and_of_addresses() -> None:
    stream = Stream(None)
    instance = view_of("A").instances[0]
    said = f"{UUID}: {instance.http} lost {instance.kv}"
    failed = sse({"error": {"message": said, "type": "server_error"}})
    stream.feed(sse({"id": "u", "choices": [{"index": 0, "text": "x"}]}), failed)
    cleared = sse({"error": {"message": f"{PUBLIC}: engine lost engine", "type": "server_error"}})
    assert stream.client.got.endswith(cleared)


def test_an_error_before_anything_came_is_tried_elsewhere() -> None:
    stream = Stream(None)
    with pytest.raises(CallFailed):
        stream.feed(sse({"error": {"message": "x", "code": "kv_transfer_failed"}}))
    assert not stream.client.got


def test_an_event_without_an_end_fails_the_call() -> None:
    stream = Stream(sent())
    with pytest.raises(CallFailed, match="too_large"):
        stream.feed(b"data: ", b"x" * MAX_EVENT_BYTES)


def test_a_client_that_did_not_read_is_noted() -> None:
    stream = Stream(sent())
    stream.feed(chunk(choice([1])))
    stream.relay.interrupted()
    assert stream.request_state.was_interrupted
    assert stream.instance_metrics.interruptions == 1


def test_the_chunk_that_counts_is_known_to_be_sent() -> None:
    had = sent()
    stream = Stream(had)
    usage = chunk(usage={"prompt_tokens": 5})
    stream.feed(chunk(choice([1], "x", "stop")))
    assert not had.has_usage
    stream.feed(usage)
    assert had.has_usage
    assert stream.client.got.endswith(usage)

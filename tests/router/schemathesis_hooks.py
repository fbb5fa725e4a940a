"""What schemathesis' own checks leave out; its command loads this module (SCHEMATHESIS_HOOKS).

Most names that it makes up are no model's and no instance's, so requests would end in 404 before
anything else is looked at: names that are well-formed become those that exist, but for a few.
"""

from __future__ import annotations

import json
from typing import Any

import schemathesis

from tests.router.strict_engines import MODEL, SPARE

_LONGEST_NAME = 512
_ONE_IN = 8


def _is_left(name: str) -> bool:
    return sum(name.encode("utf-8", "replace")) % _ONE_IN == 1


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Names that exist."""
    body = case.body
    if isinstance(body, dict):
        model = body.get("model")
        if isinstance(model, str) and 0 < len(model) <= _LONGEST_NAME and not _is_left(model):
            case.body = {**body, "model": MODEL}
    name = (case.path_parameters or {}).get("name")
    if isinstance(name, str) and name and not _is_left(name):
        is_model = case.path.startswith("/v1/")
        case.path_parameters["name"] = MODEL if is_model else SPARE


@schemathesis.check
def streams_are_whole(context: Any, response: Any, case: Any) -> None:
    """A stream comes to its end; its events are checked by their schema."""
    kind = response.headers.get("content-type", [""])[0]
    if not kind.startswith("text/event-stream"):
        return
    *events, rest = response.text.split("\n\n")
    assert not rest
    if case.path == "/v1/messages":
        assert events[-1].startswith("event: message_stop\n")
        return
    if case.path == "/v1/responses":
        ended = ("completed", "incomplete", "failed")
        assert events[-1].startswith(tuple(f"event: response.{how}\n" for how in ended))
        return
    payloads = [event.removeprefix("data: ") for event in events]
    assert payloads.pop() == "[DONE]"
    chunks = [json.loads(payload) for payload in payloads]
    assert any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])
    assert len({chunk["id"] for chunk in chunks}) == 1


@schemathesis.check
def no_address_reaches_a_client(context: Any, response: Any, case: Any) -> None:
    """Of an engine; nor its ids."""
    if case.path.startswith("/v1/"):
        asked = json.dumps(case.body) if isinstance(case.body, dict) else str(case.body)
        for secret in ("127.0.0.1", "___decode_addr_"):
            assert secret not in response.text or secret in asked


@schemathesis.check
def errors_are_not_bare(context: Any, response: Any, case: Any) -> None:
    """Each says in words what is wrong; 405 says what is allowed."""
    if response.status_code >= 400 and case.method != "HEAD":
        assert json.loads(response.text)["error"]["message"]
    assert (response.status_code == 405) == ("allow" in response.headers) or case.method in (
        "OPTIONS",
    )

"""Where a router breaks the contract of docs/adr/0002 in what it asks of P and D. Pure.

The called engine sees it: seed, continue_from and emit_from, which limits P gets, what D gets of P.
"""

from __future__ import annotations

from tests.router.chaos.wire import Call, transfer_of


def faults_of(call: Call) -> list[str]:
    """Where the router broke the contract in this call."""
    if call.part == "alone" and not call.params:
        return []
    wrong: list[str] = []
    for choice, ids in enumerate(call.given):
        right = [call.wanted.token(choice, position) for position in range(len(ids))]
        if ids != right:
            wrong.append(f"continue_from of choice {choice} is {ids}, not {right}")
    if len(call.given) != call.wanted.choices:
        wrong.append(f"continue_from has {len(call.given)} entries")
    if "seed" not in call.params:
        wrong.append("no seed")
    elif "seed" in call.body and call.body["seed"] != call.params["seed"]:
        wrong.append("another seed than the client's")
    if call.part == "alone":
        return wrong + _faults_alone(call)
    return wrong + (_faults_to_p(call) if call.part == "P" else _faults_to_d(call))


def _wrong(to: str, call: Call, checks: dict[str, bool]) -> list[str]:
    return [f"{to}: {name}: {call.params.get(name)}" for name, holds in checks.items() if not holds]


def _faults_alone(call: Call) -> list[str]:
    """Of an instance alone it is asked that its stream can be gone on with elsewhere."""
    return _wrong("alone", call, {"stream": call.wanted.stream, **_goes_on(call)})


def _goes_on(call: Call) -> dict[str, bool]:
    lengths = [len(ids) if call.wanted.stream else 0 for ids in call.given]
    prefix = "chatcmpl-" if call.wanted.is_chat else "cmpl-"
    return {
        "continue_from": call.is_continued,
        "emit_from": call.params.get("emit_from") == lengths,
        "response_id": str(call.params.get("response_id")).startswith(prefix),
        "created": isinstance(call.params.get("created"), int),
    }


def _faults_to_p(call: Call) -> list[str]:
    body, limit = call.body, 1 + len(call.given[0])
    checks = {
        "stream": not body.get("stream"),
        "stream_options": body.get("stream_options") is None,
        "return_token_ids": body.get("return_token_ids") is True,
        "max_tokens": body.get("max_tokens") == limit,
        "max_completion_tokens": body.get("max_completion_tokens", limit) == limit,
        "min_tokens": (body.get("min_tokens") or 0) <= limit,
        "continue_from without client_max_tokens": not (
            call.is_continued and "client_max_tokens" not in call.params
        ),
    }
    return [f"to P: {name}: {body.get(name)}" for name, holds in checks.items() if not holds]


def _faults_to_d(call: Call) -> list[str]:
    passed_on = {k: v for k, v in transfer_of(call).items() if k != "reason"}
    checks = {
        **_goes_on(call),
        **{k: call.params.get(k) == v for k, v in passed_on.items()},
        "reason": "reason" not in call.params,
        "first_logprobs": call.wanted.stream or "first_logprobs" in call.params,
    }
    return _wrong("to D", call, checks)

"""Makes engine requests of a checked call: SamplingParams, KV transfer, what to emit.

Decides, by this instance's role and the request id, whether a prompt's KV is sent (P), awaited (D)
or neither. It talks to the engine only to ask what P offered.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from xpyd_core.blocks import prompt_digest
from xpyd_core.bodies import refuse
from xpyd_core.request_id import TransferKey, is_dialable
from xpyd_worker.engine.request import EngineRequest, ReceiveFrom, SamplingParams, SendTo
from xpyd_worker.server.openai.params import Options
from xpyd_worker.server.openai.prompts import check_vocabulary, output_limit
from xpyd_worker.server.request_ids import RequestId
from xpyd_worker.server.service import Service

_MASK_64 = 2**64 - 1


@dataclass(frozen=True)
class Job:
    """One prompt: its engine request, of how many ids per choice the client has the text, and the
    prompt's own text where the answer begins with it (echo). `grammar_field`: the field that says
    what the answer must look like, where one does."""

    request: EngineRequest
    emit_from: tuple[int, ...]
    echo_text: str | None = None
    grammar_field: str = ""


def keys_of(request_id: RequestId, prompts: int) -> list[TransferKey]:
    """The transfer keys of a request's prompts; none where it runs alone."""
    pair = request_id.pair
    return [] if pair is None else [TransferKey(pair.uuid, i) for i in range(prompts)]


def offered_ids(
    service: Service, request_id: RequestId, options: Options, index: int
) -> tuple[int, ...] | None:
    """The prompt's ids as P sent them to this D, if they are what P says it computed."""
    if service.instance.role != "Decode" or request_id.pair is None or not options.kv.prompt_digest:
        return None
    offered = service.bridge.offered(TransferKey(request_id.pair.uuid, index))
    if offered is None:
        return None
    ids = offered.token_ids[: offered.prompt_tokens]
    return ids if prompt_digest(ids) == options.kv.prompt_digest[index] else None


def make_jobs(
    service: Service,
    request_id: RequestId,
    options: Options,
    prompts: Sequence[tuple[int, ...]],
    *,
    default_max_tokens: int | None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    echo_texts: Sequence[str] | None = None,
    name: str = "prompt",
) -> list[Job]:
    """One job per prompt. ApiError 400 where something does not fit the model. `bad_words` are
    those of `options` as token ids."""
    _check_ids(service, options)
    seed = _seed(service, options)
    if options.priority and not service.has_priorities:
        raise refuse("priority", "must be 0: this engine runs without --scheduling-policy priority")
    replica = replica_of(service, request_id)
    batch = os.urandom(4).hex()  # the same uuid may come twice, the engine's ids must differ
    jobs: list[Job] = []
    for index, prompt in enumerate(prompts):
        # Also a text's: a tokenizer may have tokens behind the model's last one.
        check_vocabulary(service.model, prompt, name)
        sampling = _sampling(
            service, options, len(prompt), seed, default=default_max_tokens, name=name
        )
        sampling = replace(
            sampling,
            bad_words=bad_words,
            prompt_logprobs=_prompt_logprobs(options, has_echo=echo_texts is not None),
        )
        first = index * options.n
        continued = options.kv.continue_from[first : first + options.n]
        request = EngineRequest(
            request_id=f"{request_id.log_id}-{index}-{batch}",
            log_id=request_id.log_id,
            prompt=prompt,
            sampling=sampling,
            n=options.n,
            first_choice=first,
            continue_from=continued if any(continued) else (),
            transfer=_transfer(service, request_id, options, index, sampling, len(prompt)),
            kv_missing=_kv_missing(service, request_id, options, index),
            cache_salt=options.cache_salt,
            priority=options.priority,
            replica=replica,
        )
        emit_from = _emit_from(service, options, continued, first)
        echo_text = echo_texts[index] if echo_texts is not None else None
        jobs.append(Job(request, emit_from, echo_text))
    return jobs


async def constrained(service: Service, options: Options, jobs: Sequence[Job]) -> list[Job]:
    """The jobs with the grammar that the call asks for, each choice behind what it has put out.
    ApiError 400 where that cannot be compiled."""
    if options.grammar is None:
        return list(jobs)
    target = service.model.grammar_target
    found: list[Job] = []
    for job in jobs:
        request = job.request
        outputs = request.continue_from or ((),) * request.n
        matchers = await service.grammars.matchers(options.grammar, target, outputs)
        field = options.grammar.field
        request = replace(request, matchers=matchers)
        found.append(replace(job, request=request, grammar_field=field))
    return found


def replica_of(service: Service, request_id: RequestId) -> int | None:
    """The replica that the call is for, if it names one: by its KV address in a pair's id, for
    there its KV goes; else by the header. ApiError 400 for a number that there is not."""
    if (pair := request_id.pair) is not None:
        own = pair.prefill if service.instance.role == "Prefill" else pair.decode
        for number, place in enumerate(service.kv_places()):
            if place.address == own:
                return number
    named = request_id.replica
    if named is None:
        return None
    if not (named.isascii() and named.isdigit() and int(named[:9]) < service.replicas):
        raise refuse("X-data-parallel-rank", f"must be 0 to {service.replicas - 1}")
    return int(named)


def _check_ids(service: Service, options: Options) -> None:
    model = service.model
    check_vocabulary(model, options.stop_token_ids, "stop_token_ids")
    check_vocabulary(model, options.allowed_token_ids, "allowed_token_ids")
    check_vocabulary(model, [token for token, _ in options.logit_bias], "logit_bias")
    for ids in options.kv.continue_from:
        check_vocabulary(model, ids, "kv_transfer_params.continue_from")


def _prompt_logprobs(options: Options, *, has_echo: bool) -> int | None:
    """How many alternatives of each prompt token serve both fields that may ask for them."""
    asked = [options.prompt_logprobs, options.logprobs if has_echo else None]
    return max((count for count in asked if count is not None), default=None)


def _emit_from(
    service: Service, options: Options, continued: tuple[tuple[int, ...], ...], first: int
) -> tuple[int, ...]:
    if service.instance.role == "Prefill":
        # P answers from the end of what it was given.
        return tuple(len(ids) for ids in continued)
    return options.kv.emit_from[first : first + options.n]


def _seed(service: Service, options: Options) -> int:
    given = options.kv.seed if options.kv.seed is not None else options.seed
    return service.draw_seed() if given is None else given & _MASK_64


def _sampling(
    service: Service,
    options: Options,
    prompt_tokens: int,
    seed: int,
    *,
    default: int | None,
    name: str,
) -> SamplingParams:
    model = service.model
    if options.kv.max_model_len is not None:
        model = replace(model, max_model_len=min(model.max_model_len, options.kv.max_model_len))
    if options.kv.client_max_tokens is not None:
        # The client's own number must fit before P computes anything.
        output_limit(
            model, prompt_tokens, asked=options.kv.client_max_tokens, default=None, name=name
        )
    max_tokens = output_limit(
        model, prompt_tokens, asked=options.max_tokens, default=default, name=name
    )
    least = options.min_tokens
    if options.max_tokens is None and default is not None and least > default:
        raise refuse("min_tokens", f"must not be above max_tokens, which is {default} by default")
    return SamplingParams(
        # With max_tokens 0 (only the prompt is shown) one token is computed and thrown away.
        max_tokens=max(1, max_tokens),
        seed=seed,
        # Where the context ends before that, so does the answer. A 400 would come too late: P does
        # not see the client's number, and its token is on the wire already.
        min_tokens=min(least, max_tokens),
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        ignore_eos=options.ignore_eos,
        stop_token_ids=options.stop_token_ids,
        logprobs=options.logprobs,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=options.logit_bias,
        allowed_token_ids=options.allowed_token_ids,
    )


def _transfer(
    service: Service,
    request_id: RequestId,
    options: Options,
    index: int,
    sampling: SamplingParams,
    prompt_tokens: int,
) -> SendTo | ReceiveFrom | None:
    pair, instance = request_id.pair, service.instance
    if pair is None or instance.role == "Aggregated":
        return None
    key = TransferKey(pair.uuid, index)
    kv = options.kv
    if instance.role == "Prefill":
        if not is_dialable(pair.decode):
            return None
        return SendTo(key, pair.decode, prompt_tokens, cancel_when_done=kv.from_router)
    if _kv_missing(service, request_id, options, index) or sampling.prompt_logprobs is not None:
        return None
    return ReceiveFrom(key, instance.kv_wait_s, pair.prefill)


def _kv_missing(service: Service, request_id: RequestId, options: Options, index: int) -> str:
    """Why this D does not wait for KV: P sent nothing, or to an earlier start of this D, or to an
    address that none of its replicas has."""
    pair, kv = request_id.pair, options.kv
    if pair is None or service.instance.role != "Decode":
        return ""
    incarnation = service.instance.incarnation
    if places := service.kv_places():
        place = next((one for one in places if one.address == pair.decode), None)
        if place is None:
            return "address"
        incarnation = place.incarnation
    if kv.transfer and kv.transfer[index] == "none":
        return "not_sent"
    if kv.decode_incarnation not in ("", incarnation):
        return "restarted"
    return ""

"""From prompts and parameters to jobs of the server, and from their generations to outputs.

Runs on the session's loop. Nothing here waits but for the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypedDict

import msgspec

from xpyd_core.bodies import read
from xpyd_core.errors import UserError
from xpyd_core.openai import TokenId
from xpyd_worker.offline.outputs import RequestOutput, completion_output, prompt_alternatives
from xpyd_worker.offline.sampling import SamplingParams, as_json, check_text
from xpyd_worker.server.openai.answers import collect
from xpyd_worker.server.openai.chats import Conversation
from xpyd_worker.server.openai.generation import ChoiceDelta, Generation, ending_of
from xpyd_worker.server.openai.jobs import Job, constrained, make_jobs
from xpyd_worker.server.openai.params import Options
from xpyd_worker.server.openai.prompts import bad_word_ids, chat_ids, completion_ids
from xpyd_worker.server.request_ids import read_request_id
from xpyd_worker.server.service import Service

# Calls that tokenize at once: half of what the text threads let wait.
_PREPARING = 32


class _TokenPrompt(msgspec.Struct, frozen=True):
    """A prompt of token ids, checked as the server checks one."""

    prompt_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


@dataclass(frozen=True)
class CompletionPrompt:
    """A prompt to complete: `text`, or `token_ids` where it is None."""

    text: str | None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chat:
    """A conversation to go on with."""

    conversation: Conversation


@dataclass(frozen=True)
class Request:
    """One prompt, ready for the engine."""

    text: str | None
    options: Options
    job: Job


class Turns:
    """What all calls of one LLM share, from whatever thread: they take turns where the engine and
    the text threads would refuse what is over their bounds. Used on one loop."""

    def __init__(self, most_at_once: int) -> None:
        """`most_at_once`: prompts that may be in the engine."""
        self.most_at_once = most_at_once
        self.preparing = asyncio.Semaphore(_PREPARING)
        self.running = asyncio.Semaphore(most_at_once)


async def prepare(
    service: Service,
    prompts: Sequence[CompletionPrompt | Chat],
    params: Sequence[SamplingParams],
    priorities: Sequence[int],
    *,
    turns: Turns,
) -> list[Request]:
    """Tokenize and check everything. UserError names the prompt."""
    requests: list[Request] = []
    async with turns.preparing:
        for index, (prompt, each, rank) in enumerate(zip(prompts, params, priorities, strict=True)):
            try:
                requests.append(await _prepare(service, prompt, each, rank))
            except UserError as error:
                raise UserError(f"prompts[{index}]: {error}") from error
    return requests


async def _prepare(
    service: Service, prompt: CompletionPrompt | Chat, params: SamplingParams, priority: int
) -> Request:
    if isinstance(prompt, Chat):
        for index, message in enumerate(prompt.conversation.messages):
            for member, value in message.items():
                if isinstance(value, str):
                    check_text(value, f"messages[{index}].{member}")
        text, ids = None, await chat_ids(service, prompt.conversation)
    elif prompt.text is not None:
        if not prompt.text:
            raise UserError("is empty")
        check_text(prompt.text, "prompt")
        text = prompt.text
        (ids,) = await completion_ids(service, [text])
    else:
        ids = as_json(prompt.token_ids, "prompt_token_ids")
        found = read(_TokenPrompt, msgspec.json.encode({"prompt_token_ids": ids}))
        text = None
        (ids,) = await completion_ids(service, [tuple(found.prompt_token_ids)])
    options = replace(params.options(), priority=priority)
    # As in vLLM's class of this name, the context's end is an end like max_tokens; over HTTP a
    # client that asks for more than fits gets an error.
    room = service.model.max_model_len - len(ids)
    if options.max_tokens is not None and 0 < room < options.max_tokens:
        options = replace(options, max_tokens=room)
    jobs = make_jobs(
        service,
        read_request_id(None),
        options,
        [ids],
        default_max_tokens=None,
        bad_words=await bad_word_ids(service, options.bad_words),
    )
    (job,) = await constrained(service, options, jobs)
    return Request(text, options, job)


async def run_all(
    service: Service,
    requests: Sequence[Request],
    *,
    turns: Turns,
    done: Callable[[RequestOutput], None],
) -> list[RequestOutput]:
    """Run every request, each when it is its turn; `done` hears of each as it ends.

    The first error ends all of them.
    """
    outputs: dict[int, RequestOutput] = {}
    left = iter(enumerate(requests))

    async def take_turns(left: Iterator[tuple[int, Request]]) -> None:
        for index, request in left:
            async with turns.running:
                outputs[index] = await _run(service, request)
            done(outputs[index])

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(turns.most_at_once, len(requests))):
                group.create_task(take_turns(left))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [outputs[index] for index in range(len(requests))]


async def _run(service: Service, request: Request) -> RequestOutput:
    generation = Generation(service, [request.job], ending_of(service, request.options))
    gained: dict[int, ChoiceDelta] = {}
    try:
        generation.start()
        async for deltas in generation.steps():
            collect(gained, deltas)
    finally:
        generation.close()
    tokenizer = service.model.tokenizer
    asked = request.job.request
    entries = generation.prompt_logprobs(0)
    return RequestOutput(
        request_id=asked.log_id,
        prompt=request.text,
        prompt_token_ids=asked.prompt,
        prompt_logprobs=prompt_alternatives(tokenizer, entries) if entries else None,
        outputs=tuple(
            completion_output(
                tokenizer, gained[index], with_logprobs=request.options.logprobs is not None
            )
            for index in sorted(gained)
        ),
        finished=True,
        num_cached_tokens=generation.usage.cached_tokens,
    )

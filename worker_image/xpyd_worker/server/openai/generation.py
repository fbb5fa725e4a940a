"""One HTTP request in the engine: its prompts' choices, from engine outputs to text deltas.

Submits the jobs, replays what choices already put out, finds stop strings, ends choices. Knows no
JSON. Its owner calls `close` when the HTTP request is over, whatever happened; that aborts what
still runs.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from xpyd_core.errors import ApiError
from xpyd_core.kv_outcome import MOVED
from xpyd_worker.engine.request import (
    ChoiceOutput,
    EngineOutput,
    ErrorKind,
    SampledToken,
    TokenLogprob,
    TransferReport,
)
from xpyd_worker.parsers import Part
from xpyd_worker.parsers.registry import ChatOptions, ChatParser
from xpyd_worker.server.bridge import Mailbox, RequestTimes, failure_answer
from xpyd_worker.server.openai.jobs import Job
from xpyd_worker.server.openai.params import Options
from xpyd_worker.server.output_text import OutputText
from xpyd_worker.server.service import Service

_log = logging.getLogger(__name__)
_FAILURES: Mapping[ErrorKind, str] = MappingProxyType(
    {
        "": "stopping",
        "busy": "busy",
        "too_long": "context_length_exceeded",
        "kv_failed": "kv_transfer_failed",
        "grammar": "grammar_failed",
        "replica_lost": "replica_lost",
        "internal": "engine_failed",
    }
)


@dataclass(frozen=True)
class Ending:
    """When a choice of this request ends, as far as the server decides, and how its text is read.

    `hold_at_length`: P, asked by our router, goes on elsewhere after its max_tokens, so text that
    may still change stays back. `discard`: the tokens computed are not wanted (max_tokens 0).
    `include_stop`: what ends a choice, string or token, is part of its text. `chat`: what a chat's
    answer may hold besides content; None of a completion, whose text is not parsed.
    """

    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()  # empty with ignore_eos
    min_tokens: int = 0
    hold_at_length: bool = False
    discard: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    chat: ChatOptions | None = None

    def text_of(self, service: Service, prompt: Sequence[int]) -> OutputText:
        """A new text machine for one choice behind `prompt`."""
        detokenizer = service.model.detokenizer(
            prompt,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            shown=service.model.tokens_for(self.chat),
        )
        return OutputText(
            detokenizer,
            stop=self.stop,
            min_tokens=self.min_tokens,
            include_stop=self.include_stop,
        )


def ending_of(service: Service, options: Options) -> Ending:
    """The ending that a call asks for."""
    return Ending(
        stop=options.stop,
        stop_token_ids=frozenset(options.stop_token_ids),
        eos_token_ids=frozenset() if options.ignore_eos else service.model.eos_token_ids,
        min_tokens=options.min_tokens,
        hold_at_length=service.instance.role == "Prefill" and options.kv.from_router,
        discard=options.max_tokens == 0,
        include_stop=options.include_stop,
        skip_special_tokens=options.skip_special_tokens,
        spaces_between_special_tokens=options.spaces_between_special_tokens,
        chat=options.chat,
    )


@dataclass
class CallDelta:
    """What one tool call gained: its name, where it begins, and more of its arguments' JSON.
    `index`: which of the choice's calls it is."""

    index: int
    name: str = ""
    arguments: str = ""


@dataclass
class ChoiceDelta:
    """What one choice gained: text, ids and logprobs that the client does not have yet.

    `index` is OpenAI's. `stop_reason`: the stop string or stop token id that ended it, if any.
    `calls`: in their order, of each call one. `reasoning_tokens`: at the end, of the whole choice,
    where reasoning is told from the answer.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list[CallDelta])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    reasoning_tokens: int | None = None

    def add_call(self, more: CallDelta) -> None:
        """Add what a call gained behind what it has here."""
        if self.calls and self.calls[-1].index == more.index:
            self.calls[-1].arguments += more.arguments
        else:
            self.calls.append(more)

    @property
    def says_nothing(self) -> bool:
        """Whether there is neither text nor a part of another kind."""
        return not (self.text or self.reasoning or self.calls)


@dataclass(frozen=True)
class Usage:
    """Token counts of the whole request; the prompt counts once for all its choices.
    `reasoning_tokens`: those of the completion that are reasoning; None where it is not told
    from the answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None


class _Choice:
    """One choice: its text machine and what is not yet handed out."""

    def __init__(
        self, index: int, text: OutputText, ending: Ending, parser: ChatParser | None
    ) -> None:
        self.text = text
        self.parser = parser
        self.reasoning_tokens = 0
        self.malformed = 0
        """Calls that were not whole, of those whose end came here."""
        self._known_malformed = 0
        self._is_call_cut = False
        self._calls = 0
        self.ended = False
        self.reason = ""
        self.tokens = 0
        self._index = index
        self._ending = ending
        self._delta = ChoiceDelta(index)

    def replay(self, ids: Sequence[int], emit_from: int) -> None:
        """Take the ids that the choice put out elsewhere; the client has the first `emit_from`."""
        for position, token_id in enumerate(ids):
            self.tokens += 1
            last = position == len(ids) - 1
            new = "" if last and self._is_end(token_id) else self.text.push(token_id)
            is_news = position >= emit_from
            self._say(new, shown=is_news)
            if is_news:
                self._delta.token_ids.append(token_id)
            if self.text.stop_found is not None:
                self._finish_text(shown=is_news, is_cut=True)
                self._end("stop", self.text.stop_found)
                return

    def _say(self, text: str, *, shown: bool = True) -> None:
        """Take the text that one more token completes; hand it out where it is to be `shown`."""
        parser = self.parser
        if parser is None:
            self._delta.text += text if shown else ""
            return
        self.reasoning_tokens += parser.is_reasoning
        if text:
            self._add(parser, parser.push(text), shown=shown)

    def _finish_text(self, *, shown: bool = True, is_cut: bool = False) -> None:
        """The text has ended: hand out what was held back. `is_cut`: not by the model."""
        rest, parser = self.text.finish(), self.parser
        if parser is None:
            self._delta.text += rest if shown else ""
        else:
            parts = [*parser.push(rest)]
            known = parser.malformed
            parts += parser.finish()
            is_bare = bool(parts) and parts[-1].kind == "call"  # forced, and not begun
            self._is_call_cut = is_cut and (is_bare or parser.malformed > known)
            self._known_malformed += parser.malformed - known if is_cut else 0
            self._add(parser, parts, shown=shown)

    def _add(self, parser: ChatParser, parts: Iterable[Part], *, shown: bool) -> None:
        delta = self._delta if shown else ChoiceDelta(self._index)
        self.malformed += parser.malformed - self._known_malformed if shown else 0
        self._known_malformed = parser.malformed
        for kind, text in parts:
            match kind:
                case "content":
                    delta.text += text
                case "reasoning":
                    delta.reasoning += text
                case "call":
                    self._calls += 1
                    delta.add_call(CallDelta(self._calls - 1, name=text))
                case "arguments":
                    delta.add_call(CallDelta(self._calls - 1, arguments=text))

    def _is_end(self, token_id: int) -> bool:
        """Whether the token, as a choice's last, has no text."""
        if self._ending.include_stop:
            return False
        return token_id in self._ending.stop_token_ids or token_id in self._ending.eos_token_ids

    def take(self, output: ChoiceOutput) -> bool:
        """Take an engine output. True when a stop string ended the choice now."""
        if self.ended:
            return False
        for token in output.tokens:
            if self.ended:
                break
            self._push(token, is_end=token.token_id == output.stop_token_id)
        if self.ended:
            return True
        reason = output.finish_reason
        if reason is not None and self._ending.discard:
            self._end("length", None)
        elif reason is not None:
            if not (self._ending.hold_at_length and reason == "length"):
                self._finish_text(is_cut=reason == "length")
            ended_by = output.stop_token_id
            self._end(reason, ended_by if ended_by in self._ending.stop_token_ids else None)
        return False

    def _push(self, token: SampledToken, *, is_end: bool) -> None:
        if self._ending.discard:
            return
        self.tokens += 1
        self._delta.token_ids.append(token.token_id)
        if token.logprob is not None:
            self._delta.logprobs.append(token.logprob)
        # The token that ends a choice has no text, also where it is no special one.
        if not is_end or self._ending.include_stop:
            self._say(self.text.push(token.token_id))
        if self.text.stop_found is not None:
            self._finish_text(is_cut=True)
            self._end("stop", self.text.stop_found)

    def _end(self, reason: str, stop_reason: str | int | None) -> None:
        if reason == "stop" and self.parser is not None and self.parser.calls:
            reason = "stop" if self._is_call_cut else "tool_calls"
        self.ended = True
        self.reason = reason
        self._delta.finish_reason = reason
        self._delta.stop_reason = stop_reason
        if self.parser is not None and self.parser.thinks:
            self._delta.reasoning_tokens = self.reasoning_tokens

    def gained(self) -> ChoiceDelta | None:
        """The delta since the last call, or None when there is none."""
        delta, self._delta = self._delta, ChoiceDelta(self._index)
        empty = not (delta.token_ids or delta.finish_reason) and delta.says_nothing
        return None if empty else delta


class _Prompt:
    """One job in the engine."""

    def __init__(self, job: Job, choices: list[_Choice]) -> None:
        self.job = job
        self.choices = choices
        self.finished = False
        self.cached_tokens = 0
        self.report: TransferReport | None = None
        self.kv = ""
        self.logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.times: RequestTimes | None = None


class Generation:
    """The jobs of one HTTP request. Use: `start`, iterate `steps`, `close`."""

    def __init__(self, service: Service, jobs: Sequence[Job], ending: Ending) -> None:
        self.failure = ""
        """One word for why the engine did not finish the request; "" where it did, or may yet."""
        self._bridge = service.bridge
        self._malformed_calls = service.malformed_calls
        self._parser_name = service.model.parsers.tools_name
        self._mailbox = Mailbox()
        self._prompts: dict[str, _Prompt] = {}
        for job in jobs:
            request = job.request
            make_parser = service.model.parser_maker(ending.chat, request.prompt)
            choices = [
                _Choice(
                    request.first_choice + j,
                    ending.text_of(service, request.prompt),
                    ending,
                    make_parser(),
                )
                for j in range(request.n)
            ]
            self._prompts[request.request_id] = _Prompt(job, choices)

    def start(self) -> None:
        """Replay what was put out elsewhere and hand the jobs to the engine."""
        for request_id, prompt in self._prompts.items():
            request = prompt.job.request
            for j, ids in enumerate(request.continue_from):
                prompt.choices[j].replay(ids, prompt.job.emit_from[j])
            prompt.times = self._bridge.submit(request, self._mailbox)
            ended = tuple(j for j, choice in enumerate(prompt.choices) if choice.ended)
            self._end_choices(request_id, prompt, ended)

    def _end_choices(self, request_id: str, prompt: _Prompt, ended: tuple[int, ...]) -> None:
        if not ended:
            return
        if all(choice.ended for choice in prompt.choices):
            # Frees the KV that waits for it too.
            self._bridge.end(request_id, tuple(range(len(prompt.choices))))
            prompt.finished = True
        else:
            self._bridge.abort_choices(request_id, ended)

    async def steps(self) -> AsyncIterator[list[ChoiceDelta]]:
        """What the choices gained, step by step; steps merge while the caller does not read.

        ApiError when the engine could not run the request.
        """
        first = self._gained(self._prompts.values())
        if first:
            yield first
        while not self.is_finished:
            touched: dict[_Prompt, None] = {}
            failure: ApiError | None = None
            for output in await self._taken():
                touched[self._prompts[output.request_id]] = None
                failure = failure or self._take(output)
            # What came before a failure is the client's.
            gained = self._gained(touched)
            if gained:
                yield gained
            if failure is not None:
                raise failure

    async def _taken(self) -> list[EngineOutput]:
        try:
            return await self._mailbox.take()
        except ApiError:  # The engine is gone.
            self.failure = _FAILURES["internal"]
            raise

    def _gained(self, prompts: Iterable[_Prompt]) -> list[ChoiceDelta]:
        deltas = [choice.gained() for prompt in prompts for choice in prompt.choices]
        return [delta for delta in deltas if delta is not None]

    def _take(self, output: EngineOutput) -> ApiError | None:
        """Take one output; its error, if it has one."""
        prompt = self._prompts[output.request_id]
        if output.error:
            return self._failure(prompt, output)
        prompt.cached_tokens = max(prompt.cached_tokens, output.cached_tokens)
        prompt.report = output.transfer or prompt.report
        prompt.kv = output.kv or prompt.kv
        prompt.logprobs = output.prompt_logprobs or prompt.logprobs
        stopped: list[int] = []
        for one in output.choices:
            if one.finish_reason in ("abort", "error"):
                return self._failure(prompt, output)
            if prompt.choices[one.choice].take(one):
                stopped.append(one.choice)
        if output.finished:
            prompt.finished = True
            if stopped:  # on P: what ended by length does not go on elsewhere
                self._bridge.abort_choices(output.request_id, tuple(stopped))
        else:
            self._end_choices(output.request_id, prompt, tuple(stopped))
        return None

    def _failure(self, prompt: _Prompt, output: EngineOutput) -> ApiError:
        request = prompt.job.request
        _log.error(
            "engine ended the request: %s",
            output.error or "aborted",
            extra={"request": request.log_id},
        )
        self.failure = _FAILURES[output.error_kind]
        prompt.kv = output.kv or prompt.kv
        return failure_answer(output.error_kind, prompt.job.grammar_field)

    def close(self) -> None:
        """Abort what still runs. May be called again."""
        for request_id, prompt in self._prompts.items():
            for choice in prompt.choices:
                if choice.malformed:
                    self._malformed_calls[self._parser_name] += choice.malformed
                    choice.malformed = 0
            if not prompt.finished:
                prompt.finished = True
                self._bridge.abort(request_id)

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(prompt.finished for prompt in self._prompts.values())

    @property
    def jobs(self) -> list[Job]:
        """In the prompts' order."""
        return [prompt.job for prompt in self._prompts.values()]

    def prompt_logprobs(self, choice_index: int) -> tuple[TokenLogprob | None, ...]:
        """The log probabilities of the prompt of a choice; known with its first delta, empty where
        not asked for."""
        prompts = list(self._prompts.values())
        return prompts[choice_index // len(prompts[0].choices)].logprobs or ()

    @property
    def kv(self) -> str:
        """D: what became of the prompts' KV so far (EngineOutput.kv), of the worst of them: one
        that failed or is computed here, else one that began from its KV."""
        known = [prompt.kv for prompt in self._prompts.values() if prompt.kv]
        return next((one for one in known if one != MOVED), known[0] if known else "")

    @property
    def failed_for_kv(self) -> bool:
        """D: whether the request failed because its KV did not come."""
        return self.failure == _FAILURES["kv_failed"]

    @property
    def reports(self) -> list[TransferReport]:
        """The state of each prompt's transfer at its end, on P."""
        none = TransferReport("none")
        return [prompt.report or none for prompt in self._prompts.values()]

    @property
    def times(self) -> list[RequestTimes]:
        """When each prompt's tokens came, of those that the engine was given."""
        return [prompt.times for prompt in self._prompts.values() if prompt.times is not None]

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """The finish reasons of the choices that have ended, in order."""
        choices = [choice for prompt in self._prompts.values() for choice in prompt.choices]
        return tuple(choice.reason for choice in choices if choice.reason)

    @property
    def usage(self) -> Usage:
        """Counts so far."""
        prompts = self._prompts.values()
        choices = [choice for prompt in prompts for choice in prompt.choices]
        tells = any(choice.parser is not None and choice.parser.thinks for choice in choices)
        return Usage(
            prompt_tokens=sum(len(prompt.job.request.prompt) for prompt in prompts),
            completion_tokens=sum(choice.tokens for choice in choices),
            cached_tokens=sum(prompt.cached_tokens for prompt in prompts),
            reasoning_tokens=sum(c.reasoning_tokens for c in choices) if tells else None,
        )

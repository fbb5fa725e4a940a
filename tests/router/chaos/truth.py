"""The mock engines' model: which token comes next, and so what each client must get. Pure.

A token is a function of (prompt, seed, choice, position) alone, as docs/adr/0002 asks of random
numbers: P, D and the engine that continues for a dead D draw alike, and the judge draws the same
without any of them. Text machine and stop strings are the engine's own. Token texts are chosen to
be awkward: halves of characters, bytes that look like the stream's own framing, texts of no length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

from xpyd_worker.server.output_text import Detokenizer, OutputText

EOS = 256
VOCABULARY = 258
CONTEXT = 160
"""Tokens of prompt and output together (max_model_len of the mocks)."""
SEEDS = 256
"""A seed counts modulo this, so that the judge can find the one that a router drew."""
_FIRST_HALF, _HALVES = 240, ("é", "中", "😀")
_AWKWARD = (
    *("\n\n", "data: [DONE]\n\n", 'data: {"error"', '{"error": {"type": "server_error"}}', ""),
    *('"token_ids":[1,2]', ',"token_ids":[', '"finish_reason":null', '""', "\\", '"', "}", "\x00"),
    *("\u2028", "\r\n", "stop", "日本", "]", " ", "\ufffd"),
)


def _token_bytes() -> tuple[bytes, ...]:
    words = [text.encode() for text in _AWKWARD]
    words += [b" w%d" % number for number in range(len(words), _FIRST_HALF)]
    for text in _HALVES:
        whole = text.encode()
        words += [whole[:-1], whole[-1:]]
    words += [b"~%d" % number for number in range(len(words), 256)]
    return (*words, b"<eos>", b"<bos>")


TOKEN_BYTES = _token_bytes()


def token_text(token_id: int) -> str:
    """One token's text by itself."""
    return TOKEN_BYTES[token_id].decode("utf-8", "replace")


def decode(ids: Sequence[int]) -> str:
    """The text of ids together, EOS left out."""
    return b"".join(TOKEN_BYTES[i] for i in ids if i < EOS).decode("utf-8", "replace")


def encode(text: str) -> tuple[int, ...]:
    """A prompt's ids: its bytes."""
    return tuple(text.encode())


def logprob(token_id: int) -> float:
    """Of a token, wherever it stands."""
    return -0.5 - token_id % 97


def top(token_id: int, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest beside it."""
    return [((token_id + i) % 240, logprob(token_id) - i) for i in range(count)]


def chat_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The chat template."""
    return "".join(f"{m['role']}:{m['content']}\n" for m in messages)


class Step(NamedTuple):
    """What one choice gains. `token_id` None: it ends without another token."""

    token_id: int | None
    text: str
    finish: str | None = None
    stop: str | None = None


@dataclass(frozen=True)
class Wanted:
    """What a body asks for, as engine and judge read it. `seed` None: greedy."""

    is_chat: bool
    prompts: tuple[tuple[int, ...], ...]
    n: int
    limit: int
    min_tokens: int
    seed: int | None
    is_seed_drawn: bool
    """The client left the seed to the router."""
    ignore_eos: bool
    stop: tuple[str, ...]
    logprobs: int | None
    echo: str
    stream: bool
    include_usage: bool
    running_usage: bool
    token_ids: bool

    @classmethod
    def of(cls, endpoint: str, body: Mapping[str, Any]) -> Wanted:
        """Reads a body that is known to be right."""
        is_chat = endpoint == "chat/completions"
        prompts = (encode(chat_text(body["messages"])),) if is_chat else _prompts(body["prompt"])
        limit = body.get("max_completion_tokens") if is_chat else None
        limit = body.get("max_tokens") if limit is None else limit
        if limit is None:
            limit = CONTEXT - len(prompts[0]) if is_chat else 16
        shown = body.get("logprobs")
        if is_chat:
            shown = body.get("top_logprobs", 0) if shown else None
        options: dict[str, Any] = body.get("stream_options") or {}
        stop = body.get("stop") or ()
        greedy = body.get("temperature") == 0
        return cls(
            is_chat=is_chat,
            prompts=prompts,
            n=body.get("n") or 1,
            limit=limit,
            min_tokens=body.get("min_tokens") or 0,
            seed=None if greedy else body.get("seed", 0) % SEEDS,
            is_seed_drawn=not greedy and "seed" not in body,
            ignore_eos=bool(body.get("ignore_eos")),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            logprobs=shown,
            echo=body["prompt"] if body.get("echo") else "",
            stream=bool(body.get("stream")),
            include_usage=bool(options.get("include_usage")),
            running_usage=bool(options.get("continuous_usage_stats")),
            token_ids=bool(body.get("return_token_ids")),
        )

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @cached_property
    def _digests(self) -> list[bytes]:
        return [blake2b(bytes(ids), digest_size=8).digest() for ids in self.prompts]

    def digest(self, prompt: int) -> str:
        """What stands for a prompt in `prompt_digest`."""
        return self._digests[prompt].hex()

    def seeded(self, seed: int) -> Wanted:
        """With the seed that the router gives; greedy stays greedy."""
        return self if self.seed is None else replace(self, seed=seed % SEEDS)

    def _number(self, choice: int, position: int) -> int:
        prompt = self._digests[choice // self.n]
        drawn = b"greedy" if self.seed is None else b"%d/%d" % (self.seed, choice)
        text = b"%s/%s/%d" % (prompt, drawn, position)
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")

    def token(self, choice: int, position: int) -> int:
        """The token of OpenAI's choice `choice` at `position` of its output."""
        number = self._number(choice, position)
        if position >= self.min_tokens and not self.ignore_eos and number % 24 == 0:
            return EOS
        if position % 2 == 0:
            if number % 5 == 1:
                return _FIRST_HALF + 2 * (number >> 8) % (2 * len(_HALVES))
        elif (before := self.token(choice, position - 1)) in range(_FIRST_HALF, 256, 2):
            return before + 1
        return (number >> 16) % _FIRST_HALF

    def steps(
        self,
        choice: int,
        *,
        limit: int | None = None,
        given: Sequence[int] = (),
        hold: bool = False,
    ) -> Iterator[Step]:
        """A choice from its beginning. `given`: ids that it put out elsewhere; `hold`: it goes on
        elsewhere where the limit ends it, so that text that may still change stays back.
        """
        limit = self.limit if limit is None else limit
        context = self.prompts[choice // self.n]
        detokenizer = Detokenizer(decode, frozenset({EOS}), context=context)
        text = OutputText(detokenizer, stop=self.stop, min_tokens=self.min_tokens)
        for position in range(max(limit, len(given))):
            is_given = position < len(given)
            token = given[position] if is_given else self.token(choice, position)
            new = text.push(token)
            if text.stop_found is not None:
                yield Step(token, new, "stop", text.stop_found)
                return
            is_last = position + 1 >= max(limit, len(given))
            ended = "stop" if token == EOS and not self.ignore_eos else "length" if is_last else ""
            if not ended or position + 1 < len(given):
                yield Step(token, new)
                continue
            rest = "" if hold and ended == "length" else text.finish()
            if is_given:
                yield Step(token, new)
                yield Step(None, rest, ended)
            else:
                yield Step(token, new + rest, ended)
            return


def _prompts(prompt: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (encode(prompt),)
    if isinstance(prompt[0], int):
        return (tuple(prompt),)
    return tuple(encode(one) if isinstance(one, str) else tuple(one) for one in prompt)

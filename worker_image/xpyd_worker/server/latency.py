"""When the tokens of requests came, and the distributions that are made of it. Pure.

TTFT: submit to first token. ITL: gap of two consecutive tokens. TPOT: mean ITL over the output
tokens of a choice. E2E: submit to last token. Of a request with one choice and n tokens therefore
E2E - TTFT = sum of its ITL = TPOT x (n - 1). Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from xpyd_core.distribution import Distribution
from xpyd_worker.engine.request import RequestOutput

# From a token of a small model to a long answer, or a long queue, on a CPU.
REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0),
)
REQUEST_TOKENS = tuple(float(2**power) for power in range(18))


class RequestFigures:
    """Distributions and sums over requests. A request is one prompt; ITL and TPOT are of each of
    its choices. Requests that failed or were aborted count up to there and have no TPOT and E2E.
    """

    def __init__(self) -> None:
        self.ttft = Distribution(REQUEST_SECONDS)
        self.itl = Distribution(TOKEN_SECONDS)
        self.tpot = Distribution(TOKEN_SECONDS)
        self.e2e = Distribution(REQUEST_SECONDS)
        self.queue = Distribution(REQUEST_SECONDS)
        self.request_prompt_tokens = Distribution(REQUEST_TOKENS)
        self.request_output_tokens = Distribution(REQUEST_TOKENS)
        self.prompt_tokens = 0
        self.output_tokens = 0


class _Choice:
    """The first and last token of one choice, and how many there were."""

    __slots__ = ("first_s", "last_s", "tokens")

    def __init__(self, now_s: float) -> None:
        self.first_s = now_s
        self.last_s = now_s
        self.tokens = 0


class RequestTimes:
    """When the tokens of one prompt's choices came. Feeds `figures` as they come."""

    def __init__(self, figures: RequestFigures, *, submitted_s: float, prompt_tokens: int) -> None:
        self.submitted_s = submitted_s
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._figures = figures
        self._prompt_tokens = prompt_tokens
        self._choices: dict[int, _Choice] = {}

    def take(self, output: RequestOutput, now_s: float) -> None:
        """The step that gave `output` ended at `now_s`."""
        if self.started_s is None and output.started_s is not None:
            self.started_s = output.started_s
            self._figures.queue.observe(max(0.0, output.started_s - self.submitted_s))
        for choice in output.choices:
            if choice.tokens:
                self._take_tokens(choice.choice, len(choice.tokens), now_s)

    def _take_tokens(self, index: int, count: int, now_s: float) -> None:
        figures = self._figures
        if self.first_token_s is None:
            self.first_token_s = now_s
            figures.ttft.observe(now_s - self.submitted_s)
            figures.prompt_tokens += self._prompt_tokens
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice(now_s)
        else:
            figures.itl.observe(now_s - choice.last_s)
            choice.last_s = now_s
        # The tokens of one step came together.
        for _ in range(count - 1):
            figures.itl.observe(0.0)
        choice.tokens += count
        self.last_token_s = now_s
        figures.output_tokens += count

    def finish(self) -> None:
        """The request has its last token: TPOT, E2E and its sizes. Once."""
        figures = self._figures
        if self.last_token_s is None:
            return
        figures.e2e.observe(self.last_token_s - self.submitted_s)
        for choice in self._choices.values():
            if choice.tokens > 1:
                figures.tpot.observe((choice.last_s - choice.first_s) / (choice.tokens - 1))
        figures.request_prompt_tokens.observe(self._prompt_tokens)
        figures.request_output_tokens.observe(self.output_tokens)

    @property
    def output_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(choice.tokens for choice in self._choices.values())

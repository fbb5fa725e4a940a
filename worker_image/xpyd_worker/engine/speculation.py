"""Speculation: tokens that are drafted behind a sequence's last one, and whether to draft. Pure.

    SequenceDraft (propose) -> StepMaker -> the step verifies it -> Speculation.verified
          ^------- what a model drafts behind the step (wanted) -------'

A step computes a sequence's last token and its draft, k tokens that may follow; it draws behind
each of them, and gives the tokens up to the first draw that is another one than was drafted. What
is drafted changes the time that tokens take, never which they are (docs/adr/0135). N-grams are
looked up here; what a model drafts comes with what the step before drew (docs/adr/0137).

A draft has its price: the positions that the step computes more. It is measured as the engine runs,
and so is what drafts of a sequence bring. One whose drafts do not pay rests, and tries again later.
This module must not know tensors, or how a draft is verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast, get_args

from xpyd_core.errors import UserError

FLAG = "--speculative-config"
Method = Literal["ngram", "draft_model", "eagle3", "medusa"]
MOST_DRAFT_TOKENS = 16
"""More are never all accepted often enough to pay for their positions."""
MOST_LOOKUP = 32
_DEFAULT_LOOKUP = 5
"""vLLM's, where neither bound is given."""
_STATES = 32
"""Behind as many states a head's drafts are as often accepted as behind all of a prompt's: the demo
model's, 1.49 tokens a step, and 1.45 behind one (scripts.train_demo_heads.measure)."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """`--speculative-config`, with vLLM's names."""

    method: Method = "ngram"
    num_speculative_tokens: int
    """Of a draft, at most."""
    model: str = ""
    """Where the draft model, or the heads, are: an address as of `--model`. Empty for n-grams."""
    prompt_lookup_max: int = _DEFAULT_LOOKUP
    prompt_lookup_min: int = _DEFAULT_LOOKUP
    """How many of the last tokens are looked up: the most first, down to the least."""

    @property
    def has_model(self) -> bool:
        """Whether a model drafts, behind a step, on the rank that answers it."""
        return self.method != "ngram"

    @property
    def reads_again(self) -> int:
        """Last tokens of a sequence that are computed though their KV is at hand, from another
        instance or the prefix cache: what drafts reads hidden states, which nobody keeps."""
        return _STATES if self.method == "eagle3" else 0


_NUMBERS = {
    "num_speculative_tokens": MOST_DRAFT_TOKENS,
    "prompt_lookup_max": MOST_LOOKUP,
    "prompt_lookup_min": MOST_LOOKUP,
    "draft_tensor_parallel_size": 1,
}
_LOOKUPS = ("prompt_lookup_max", "prompt_lookup_min")
_OF_MODELS = ("model", "draft_tensor_parallel_size")


def read_speculative(given: Mapping[str, object] | None) -> SpeculativeConfig | None:
    """The flag's object; None where there is none. UserError naming the key."""
    if given is None:
        return None
    method = given.get("method", "draft_model" if "model" in given else None)
    methods = get_args(Method)
    if method not in methods:
        names = ", ".join(f'"{name}"' for name in methods)
        got = f"got {method!r}" if "method" in given else "it is missing, and so is a model"
        raise UserError(f"{FLAG}: method: expected one of {names}; {got}")
    own, others = (_LOOKUPS, _OF_MODELS) if method == "ngram" else (_OF_MODELS, _LOOKUPS)
    found: dict[str, int] = {}
    for key, value in given.items():
        if key in ("method", "model") and key not in others:
            continue
        if key not in _NUMBERS or key in others:
            known = ", ".join(("method", "num_speculative_tokens", *own))
            raise UserError(
                f"{FLAG}: unknown key {key!r} of method {method}; expected some of {known}"
            )
        most = _NUMBERS[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            wanted = f"a whole number from 1 to {most}" if most > 1 else "1: one rank drafts"
            raise UserError(f"{FLAG}: {key}: expected {wanted}")
        found[key] = value
    if "num_speculative_tokens" not in found:
        raise UserError(f"{FLAG}: num_speculative_tokens: missing; e.g. 3")
    model = given.get("model", "")
    if method != "ngram" and not (isinstance(model, str) and model):
        raise UserError(f"{FLAG}: model: expected where what drafts is, as for --model")
    found.pop("draft_tensor_parallel_size", None)
    # Where one bound is given it is the other, too, as in vLLM.
    least, longest = found.get("prompt_lookup_min"), found.get("prompt_lookup_max")
    found["prompt_lookup_max"] = longest or least or _DEFAULT_LOOKUP
    found["prompt_lookup_min"] = least or longest or _DEFAULT_LOOKUP
    config = SpeculativeConfig(method=cast("Method", method), model=cast("str", model), **found)
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise UserError(
            f"{FLAG}: prompt_lookup_min: {config.prompt_lookup_min}; at most prompt_lookup_max, "
            f"{config.prompt_lookup_max}"
        )
    return config


# --- what to draft

_INDEXED_AT_ONCE = 8192
"""Tokens; some 2 us each. A longer prompt is taken in over several steps, and has no draft before
that is done."""


class Drafts(Protocol):
    """What is drafted behind one sequence's tokens."""

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may follow `tokens`, which only grow; none where none is
        known."""
        ...


class ModelDrafts:
    """What a model has drafted behind one sequence's tokens, as of its last step."""

    def __init__(self) -> None:
        self._behind, self._ids = -1, ()

    def put(self, tokens: int, ids: tuple[int, ...]) -> None:
        """These were drafted behind so many tokens."""
        self._behind, self._ids = tokens, ids

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """See Drafts."""
        return self._ids[:most] if len(tokens) == self._behind else ()


class NgramIndex:
    """Where each n-gram of a sequence's tokens came first; a step costs its new tokens, however
    many there are before them. About half a kilobyte a token."""

    def __init__(self, *, longest: int, least: int) -> None:
        self._ends: list[tuple[int, dict[tuple[int, ...], int]]] = [
            (n, {}) for n in range(longest, least - 1, -1)
        ]
        self._taken = 0

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that came behind the first earlier place with the last tokens, the
        longest n-gram that has one; none where there is no such place. `tokens` only grow."""
        self._take(tokens)
        if self._taken < len(tokens):
            return ()
        for n, ends in self._ends:
            end = ends.get(tuple(tokens[-n:]), len(tokens))
            if end < len(tokens):
                return tuple(tokens[end : end + most])
        return ()

    def _take(self, tokens: Sequence[int]) -> None:
        before = self._taken
        self._taken = min(len(tokens), before + _INDEXED_AT_ONCE)
        for n, ends in self._ends:
            for end in range(max(n, before + 1), self._taken + 1):
                ends.setdefault(tuple(tokens[end - n : end]), end)


# --- whether to draft

_TRIAL_DRAFTS = 4
"""After so many a sequence's drafts are judged."""
_TRIAL_MARGIN = 1.25
"""By so much a trial's drafts must bring more than they cost; those that go on need only pay. So a
sequence near the border does not change from step to step."""
_REST_TOKENS, _LONGEST_REST_TOKENS = 64, 4096
"""Doubled with each trial that fails: the worst is 4 drafts in 64 tokens, then fewer and fewer."""
_TRY_EVERY = 16
"""New sequences that begin with a rest, as others' drafts did not pay, until one tries again: short
ones end before their rest does."""
_MISSES = 16
"""Steps without a draft that is verified, of a device that waits for each of them, or a model that
drafts for them."""
_TAKEN_IN = 256
"""Tokens that a model which drafts takes in behind one step, at least: half of what it may."""
_WEIGHT = 1 / 8
"""Of the newest value in a running mean."""
_PLAIN_EVERY, _PLAIN_TRIES = 64, 4
"""Steps with drafts, until one without is made to measure what they are compared with; it measures
nothing where a prompt comes into it, so there are a few tries."""


_FIRST_PLAIN = 3
"""Steps without drafts are measured first: one alone may have been a slow one."""
_LEAST_PRICE = 1 / 20
"""Of a sequence's share of a step, for a draft token: measured steps vary by more, and where they
seem to cost nothing a draft that is never right would go on."""


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + _WEIGHT * (value - before)


def _mean_of(count: int, before: float, value: float) -> float:
    """Of so many values, of which the first ones count alike."""
    return before + max(_WEIGHT, 1 / count) * (value - before)


@dataclass(eq=False)
class SequenceDraft:
    """What is known of one sequence's drafts. `resume_at`: it rests until it has so many tokens."""

    drafts: Drafts
    resume_at: int = 0
    rest: int = _REST_TOKENS
    accepted: float = 0.0
    drafted: float = 0.0
    """Tokens of a draft, in the mean: of a trial's drafts, then of the newest."""
    tried: int = 0
    misses: int = 0
    passed: bool = False
    """Whether its trial has ended well."""
    has_begun: bool = False

    def is_on(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens may have a draft."""
        return tokens >= self.resume_at

    def begin_rest(self, tokens: int, decodes: int) -> None:
        """Have no draft for a while, then a trial. It is a longer while where more decode: each
        waits for the trials of all."""
        self.resume_at = tokens + min(decodes * self.rest, _LONGEST_REST_TOKENS)
        self.rest = min(2 * self.rest, _LONGEST_REST_TOKENS)
        self.accepted, self.drafted = 0.0, 0.0
        self.tried, self.misses, self.passed = 0, 0, False


@dataclass
class _Costs:
    """Of steps in which so many sequences decode: seconds of one without drafts, and those that a
    draft token adds."""

    plain_s: float | None = None
    plain_steps: int = 0
    token_s: float | None = None
    since_plain: int = 0
    # Steps without drafts that were asked for since.
    asked: int = 0


class Speculation:
    """The drafts of one engine. Where the engine has a device that draws ahead (`waits`), the next
    step of a sequence with drafts waits for its last token."""

    def __init__(self, config: SpeculativeConfig, *, waits: bool) -> None:
        self._config = config
        self._waits = waits
        # By the bits of the number of sequences: steps of 5 to 8 are alike enough.
        self._costs: dict[int, _Costs] = {}
        self._decodes = 1
        # Draft tokens that a model may draft for the next step: as many as this one may have.
        self._room = 0
        # Of all drafts so far, accepted and drafted: what a new sequence is thought to be like.
        self._accepted: float | None = None
        self._drafted: float | None = None
        self._tried = 0
        # New ones in a row that have begun with a rest for it.
        self._rested = 0

    def begin(self) -> SequenceDraft:
        """For a sequence that starts."""
        config = self._config
        if config.has_model:
            return SequenceDraft(ModelDrafts())
        index = NgramIndex(longest=config.prompt_lookup_max, least=config.prompt_lookup_min)
        return SequenceDraft(index)

    def room(self, decodes: int, spare: int) -> int:
        """Draft tokens that a step may have in which `decodes` sequences decode and `spare` tokens
        are left: half of them, so that prompts have the others; none where the step is to show
        what one without drafts takes."""
        self._decodes = max(1, decodes)
        costs = self._costs.setdefault(decodes.bit_length(), _Costs())
        is_due = costs.plain_steps < _FIRST_PLAIN or costs.since_plain >= _PLAIN_EVERY
        is_plain = bool(decodes) and is_due and costs.asked < _PLAIN_TRIES
        costs.asked += is_plain
        self._room = 0 if is_plain else spare // 2
        return self._room

    def wanted(self, draft: SequenceDraft, tokens: int, most: int) -> int:
        """How many tokens, at most so many, a model is to draft behind what the step draws for a
        sequence of so many tokens, for its next step; 0 where no model drafts, or it rests."""
        if not self._config.has_model or not self._room or not self._may(draft, tokens):
            return 0
        found = max(0, min(most, self._room, self._config.num_speculative_tokens))
        self._room -= found
        return found

    def drafted(self, draft: SequenceDraft, tokens: int, ids: tuple[int, ...]) -> None:
        """A model has drafted `ids` behind so many tokens."""
        if isinstance(draft.drafts, ModelDrafts):
            draft.drafts.put(tokens, ids)

    def propose(self, draft: SequenceDraft, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """What may follow `tokens`, at most so many, in the step that `room` was asked for; none
        where the sequence rests. A new one begins with that where others' drafts did not pay."""
        most = min(most, self._config.num_speculative_tokens)
        if most < 1 or not self._may(draft, len(tokens)):
            return ()
        found = draft.drafts.propose(tokens, most)
        # Also one that is not verified, as nobody makes room for it.
        draft.misses += 1
        allowed = _MISSES
        if self._config.has_model:
            # It may still be taking the tokens in.
            allowed += len(tokens) // _TAKEN_IN
        if (self._waits or self._config.has_model) and draft.misses > allowed:
            draft.begin_rest(len(tokens), 1)
            return ()
        return found

    def _may(self, draft: SequenceDraft, tokens: int) -> bool:
        """Whether a sequence of so many tokens may have drafts: it does not rest."""
        if not draft.is_on(tokens):
            return False
        if not draft.has_begun:
            draft.has_begun = True
            accepted, drafted = self._accepted, self._drafted
            if accepted is None or drafted is None or self._tried < _TRIAL_DRAFTS:
                return True
            if self._pays(accepted, drafted, self._decodes):
                self._rested = 0
                return True
            self._rested += 1
            if self._rested % _TRY_EVERY:
                draft.begin_rest(tokens, self._decodes)
                return False
        return True

    def verified(
        self, draft: SequenceDraft, *, accepted: int, drafted: int, tokens: int, decodes: int
    ) -> None:
        """A draft of `drafted` tokens was verified in a step of so many `decodes`; the sequence has
        `tokens` tokens."""
        self._accepted = _mean(self._accepted, accepted)
        self._drafted = _mean(self._drafted, drafted)
        self._tried += 1
        draft.misses = 0
        draft.tried += 1
        draft.accepted = _mean_of(draft.tried, draft.accepted, accepted)
        draft.drafted = _mean_of(draft.tried, draft.drafted, drafted)
        if draft.tried < _TRIAL_DRAFTS:
            return
        margin = 1 if draft.passed else _TRIAL_MARGIN
        if not self._pays(draft.accepted, margin * draft.drafted, decodes):
            draft.begin_rest(tokens, decodes)
        elif not draft.passed:
            draft.passed, draft.rest = True, _REST_TOKENS

    def measured(
        self, seconds: float, *, decodes: int, draft_tokens: int, drafts_on: bool = False
    ) -> None:
        """A step of `decodes` sequences, all of which decoded, took so long. `drafts_on`: a model
        drafted behind it, which is a part of what draft tokens cost."""
        costs = self._costs.setdefault(decodes.bit_length(), _Costs())
        if not draft_tokens and drafts_on:
            return
        if not draft_tokens:
            costs.plain_steps += 1
            costs.plain_s = _mean_of(costs.plain_steps, costs.plain_s or 0.0, seconds)
            costs.since_plain = costs.asked = 0
            return
        costs.since_plain += 1
        if not costs.since_plain % _PLAIN_EVERY:
            costs.asked = 0
        if costs.plain_s is not None:
            each = (seconds - costs.plain_s) / draft_tokens
            costs.token_s = max(0.0, _mean(costs.token_s, each))

    def _pays(self, accepted: float, drafted: float, decodes: int) -> bool:
        """Whether as many accepted tokens are worth as many drafted ones: each is one that a later
        step need not compute."""
        share_s, token_s = self._measures(decodes)
        return accepted * share_s >= drafted * token_s

    def _measures(self, decodes: int) -> tuple[float, float]:
        """A sequence's share of a step of so many, and what a draft token adds to it; of the most
        alike steps that were measured. Where none was, as if both were the same."""
        bits = decodes.bit_length()
        for at in sorted(self._costs, key=lambda at: abs(at - bits)):
            costs = self._costs[at]
            if costs.plain_s is not None and costs.token_s is not None:
                share_s = costs.plain_s / decodes
                return share_s, max(costs.token_s, _LEAST_PRICE * share_s)
        return 1.0, 1.0

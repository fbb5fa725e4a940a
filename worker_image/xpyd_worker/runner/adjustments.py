"""What a request's options change in the logits of its next token, as small tensors.

Between the runner, which has the step's sequences, and the sampler, which has the logits. Work per
step grows with the ids that the options name and the distinct tokens of the text, never with the
vocabulary. What is kept of a sequence stays on the host: there it grows by a token without a
launch, and a step's share goes to the logits' device in one piece for each kind of option. Nothing
waits for the device. It must not know queues, filters or random numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xpyd_worker.engine.executor import KnownTokens, ScheduledSequence
from xpyd_worker.engine.request import SamplingParams
from xpyd_worker.runner.tensors import can_be_read, numbers, to_device, to_floats, to_ints

# Token ids that are kept between steps, about 100 bytes each. Sequences that do not fit are made
# anew at each step, which is slower and not wrong.
_REMEMBERED_IDS = 1 << 19
# What a sequence takes besides, in ids.
_LEAST_SIZE = 32
_FIRST_CAPACITY = 64
_MINUS_INFINITY = float("-inf")


@dataclass(frozen=True)
class Seen:
    """Distinct tokens that a penalty touches: `ids` int64 [s], and how often each is in the
    output, float64 [s]. A view of state that the next step changes."""

    ids: Tensor
    output_counts: Tensor


@dataclass(frozen=True)
class Adjustment:
    """What changes one row's logits, on the host. Ids are int64 and lie in the vocabulary; an empty
    tensor or None is off.

    `allowed`: none but these. `banned`: not these. `bias` float32 is added at `bias_ids`.
    """

    sampling: SamplingParams
    allowed: Tensor | None
    banned: Tensor | None
    bias_ids: Tensor
    bias: Tensor
    seen: Seen | None


class Adjustments:
    """Makes the adjustments of a step; keeps what it counted for the next one. One thread."""

    def __init__(self, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._known: OrderedDict[int, _Kept] = OrderedDict()
        self._size = 0

    @property
    def remembered(self) -> int:
        """Sequences of which something is kept."""
        return len(self._known)

    def begin_step(self) -> None:
        """Forget sequences that the last step did not draw for: they have ended, or are preempted.
        Its few small tensors would keep the memory around them from being used for large ones."""
        for seq_id in [seq_id for seq_id, kept in self._known.items() if not kept.is_in_use]:
            self._size -= self._known.pop(seq_id).size
        for kept in self._known.values():
            kept.is_in_use = False

    def of(self, sequence: ScheduledSequence) -> Adjustment | None:
        """What the options of a sequence that draws in this step change; None: nothing."""
        if not sequence.sampling.changes_logits:
            return None
        kept = self._known.get(sequence.seq_id)
        if kept is None:
            kept = _Kept(sequence.sampling, sequence.known, self._vocab_size)
            self._known[sequence.seq_id] = kept
            self._size += kept.size
            while self._size > _REMEMBERED_IDS:
                _, oldest = self._known.popitem(last=False)
                self._size -= oldest.size
        else:
            self._known.move_to_end(sequence.seq_id)
        kept.is_in_use = True
        return kept.adjustment(sequence.sampling, sequence.known)

    def behind_drafts(self, sequence: ScheduledSequence) -> list[Adjustment | None]:
        """The same behind each of a sequence's draft tokens, once `of` was asked in this step."""
        count = sequence.drafts
        kept = self._known.get(sequence.seq_id)
        if not count or kept is None or not sequence.sampling.changes_logits:
            return [None] * count
        draft = sequence.token_ids[-count:]
        return [
            kept.behind(sequence.sampling, sequence.known, draft[: at + 1]) for at in range(count)
        ]


class _Kept:
    """What stays the same over the steps of one sequence, and its counts so far."""

    def __init__(
        self, sampling: SamplingParams, known: KnownTokens | None, vocab_size: int
    ) -> None:
        self.is_in_use = True

        def within(ids: Iterable[int]) -> list[int]:
            return [token for token in ids if token < vocab_size]

        allowed = within(sampling.allowed_token_ids)
        self._allowed = (
            torch.tensor(allowed, dtype=torch.int64) if sampling.allowed_token_ids else None
        )
        bias = [pair for pair in sampling.logit_bias if pair[0] < vocab_size]
        self._bias_ids = torch.tensor([token for token, _ in bias], dtype=torch.int64)
        self._bias = torch.tensor([value for _, value in bias], dtype=torch.float32)
        words = [word for word in sampling.bad_words if word and word[-1] < vocab_size]
        self._always_banned = sorted({word[0] for word in words if len(word) == 1})
        # Longer words by the token before their last: few of them can be complete at a time.
        self._words: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(word)
        self._banned = torch.tensor(self._always_banned) if self._always_banned else None
        self._counts: _Counts | None = None
        if sampling.counts_tokens and known is not None:
            reads_prompt = sampling.repetition_penalty != 1.0
            self._counts = _Counts(known.prompt if reads_prompt else (), vocab_size)
        # As it begins; what it comes to put out is bounded by its max_tokens.
        self.size = _LEAST_SIZE + len(allowed) + len(bias) + sum(map(len, words))
        if self._counts is not None and known is not None:
            self.size += len(known.prompt) + len(known.output)

    def adjustment(self, sampling: SamplingParams, known: KnownTokens | None) -> Adjustment:
        output = known.output if known is not None else ()
        return Adjustment(
            sampling,
            self._allowed,
            self._banned_after(output),
            self._bias_ids,
            self._bias,
            self._counts.after(output) if self._counts is not None else None,
        )

    def behind(
        self, sampling: SamplingParams, known: KnownTokens | None, draft: tuple[int, ...]
    ) -> Adjustment:
        """As `adjustment`, which was called for what is known, were `draft` known, too."""
        output = (*known.output, *draft) if known is not None else ()
        seen = None if self._counts is None else self._counts.behind(draft)
        return Adjustment(
            *(sampling, self._allowed, self._banned_after(output)),
            *(self._bias_ids, self._bias, seen),
        )

    def _banned_after(self, output: Sequence[int]) -> Tensor | None:
        candidates = self._words.get(output[-1], ()) if output else ()
        complete = [word[-1] for word in candidates if tuple(output[-len(word) + 1 :]) == word[:-1]]
        return torch.tensor([*self._always_banned, *complete]) if complete else self._banned


class _Counts:
    """Distinct tokens of a text that grows, with their counts in the output."""

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        first = sorted({token for token in prompt if token < vocab_size})
        self._place = {token: place for place, token in enumerate(first)}
        capacity = max(_FIRST_CAPACITY, 2 * len(self._place))
        self._ids = torch.zeros(capacity, dtype=torch.int64)
        self._ids[: len(first)] = torch.tensor(first, dtype=torch.int64)
        self._output_counts = torch.zeros(capacity, dtype=torch.float64)
        self._taken = 0

    def after(self, output: Sequence[int]) -> Seen:
        """Take in what came since the last call."""
        if len(output) - self._taken == 1:
            self._add(output[-1], 1)
        else:
            new: dict[int, int] = {}
            for token in output[self._taken :]:
                new[token] = new.get(token, 0) + 1
            for token, count in new.items():
                self._add(token, count)
        self._taken = len(output)
        size = len(self._place)
        return Seen(self._ids[:size], self._output_counts[:size])

    def behind(self, draft: Sequence[int]) -> Seen:
        """What it would be with these tokens behind those taken in."""
        size = len(self._place)
        ids, counts = to_ints(self._ids[:size]), to_floats(self._output_counts[:size])
        place = dict(self._place)
        for token in draft:
            if token >= self._vocab_size:
                continue
            if token not in place:
                place[token] = len(ids)
                ids.append(token)
                counts.append(0.0)
            counts[place[token]] += 1
        return Seen(torch.tensor(ids, dtype=torch.int64), torch.tensor(counts, dtype=torch.float64))

    def _add(self, token: int, count: int) -> None:
        if token >= self._vocab_size:
            return
        place = self._place.setdefault(token, len(self._place))
        if place == self._ids.shape[0]:
            self._ids = torch.cat((self._ids, torch.zeros_like(self._ids)))
            more = torch.zeros_like(self._output_counts)
            self._output_counts = torch.cat((self._output_counts, more))
        self._ids[place] = token
        self._output_counts[place] += count


def apply_masks(logits: Tensor, masks: Sequence[tuple[int, bytes]]) -> None:
    """Take out of contiguous `logits` [rows, vocab] what a row's mask forbids (TokenMask.words)."""
    if not masks:
        return
    vocab = logits.shape[1]
    words = -(-vocab // 32)
    # What a mask says of ids behind the vocabulary is dropped; where it ends before, none may come.
    table = np.zeros((len(masks), words), dtype=np.int32)
    for at, (_, mask) in enumerate(masks):
        known = np.frombuffer(mask, dtype=np.int32)[:words]
        table[at, : len(known)] = known
    if can_be_read(logits):
        # A few small operators of torch take longer than the draw of a small model.
        bytes_ = np.unpackbits(table.view(np.uint8), axis=1, count=vocab, bitorder="little")
        forbidden = torch.as_tensor(bytes_).view(torch.bool).logical_not_()
    else:
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        on_device = to_device(torch.as_tensor(table), logits.device)
        allowed = (on_device[:, :, None] >> bits) & 1
        forbidden = allowed.view(len(masks), -1)[:, :vocab] == 0
    if len(masks) == logits.shape[0]:
        logits.masked_fill_(forbidden, _MINUS_INFINITY)
        return
    rows = numbers([row for row, _ in masks], torch.int64, logits.device)
    kept = logits.index_select(0, rows).masked_fill_(forbidden, _MINUS_INFINITY)
    logits.index_copy_(0, rows, kept)


def apply_allowed(logits: Tensor, adjustments: Sequence[tuple[int, Adjustment]]) -> None:
    """Set contiguous `logits` [rows, vocab] to -inf where a row with allowed ids has others."""
    some = [(row, one.allowed) for row, one in adjustments if one.allowed is not None]
    if not some:
        return
    at, flat = _places(some, logits), logits.view(-1)
    kept = flat.index_select(0, at)
    rows = numbers([row for row, _ in some], torch.int64, logits.device)
    logits.index_fill_(0, rows, _MINUS_INFINITY)
    flat.index_copy_(0, at, kept)


def apply_banned(logits: Tensor, adjustments: Sequence[tuple[int, Adjustment]]) -> None:
    """Take out what would complete a bad word."""
    some = [(row, one.banned) for row, one in adjustments if one.banned is not None]
    if some:
        logits.view(-1).index_fill_(0, _places(some, logits), _MINUS_INFINITY)


def apply_bias(logits: Tensor, adjustments: Sequence[tuple[int, Adjustment]]) -> None:
    """Add what each row's logit_bias says."""
    some = [(row, one.bias_ids) for row, one in adjustments if one.sampling.logit_bias]
    if some:
        bias = torch.cat([one.bias for _, one in adjustments if one.sampling.logit_bias])
        added = to_device(bias, logits.device)
        logits.view(-1).index_add_(0, _places(some, logits), added)


def apply_penalties(logits: Tensor, adjustments: Sequence[tuple[int, Adjustment]]) -> None:
    """Repetition, frequency and presence penalties, as vLLM's and (the last two) OpenAI's.

    https://platform.openai.com/docs/api-reference/completions: a token that is c times in the
    output loses c x frequency + (c > 0) x presence. The repetition penalty divides positive logits
    of tokens seen anywhere and multiplies others (CTRL, Keskar et al. 2019).
    """
    some = [(row, one.seen, one.sampling) for row, one in adjustments if one.seen is not None]
    if not some:
        return
    # By row of `logits`; rows that are not in `some` have no place.
    penalties = [[1.0, 0.0, 0.0]] * logits.shape[0]
    for row, _, sampling in some:
        penalties[row] = [
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        ]
    at, flat = _places([(row, seen.ids) for row, seen, _ in some], logits), logits.view(-1)
    columns = numbers(penalties, torch.float64, logits.device).index_select(
        0, at.div(logits.shape[1], rounding_mode="floor")
    )
    repetition, frequency, presence = columns.unbind(1)
    counts = to_device(torch.cat([seen.output_counts for _, seen, _ in some]), logits.device)
    # float64 and a clamp: no penalty that a client may send makes a logit infinite, and none hides
    # one that is.
    before = flat.index_select(0, at)
    values = before.to(torch.float64)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts
    values -= presence * (counts > 0)
    most = torch.finfo(torch.float32).max
    values = torch.where(before.isfinite(), values.clamp(-most, most), values)
    flat.index_copy_(0, at, values.to(logits.dtype))


def _places(rows: Sequence[tuple[int, Tensor]], logits: Tensor) -> Tensor:
    """The flat places in `logits` of the columns that each row names, on the device of `logits`."""
    sizes = torch.tensor([columns.shape[0] for _, columns in rows])
    firsts = torch.tensor([row * logits.shape[1] for row, _ in rows]).repeat_interleave(sizes)
    return to_device(firsts + torch.cat([columns for _, columns in rows]), logits.device)

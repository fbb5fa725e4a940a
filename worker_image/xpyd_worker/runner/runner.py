"""The executor of one rank: block copies, one flat forward, sampling.

The engine calls `launch` from its thread, step by step. Launching only enqueues: on a GPU the step
runs on while the engine prepares the next, and what the host wants of it is fetched when it is
waited for. The runner owns weights and KV cache; it must not know queues, requests' lives or who
else reads the cache. It touches no global state of torch: the number of threads is the program's
choice.

Of several ranks each launches every step, in the same order. What they do together follows from the
step alone: which sequences take part, how many rows go from stage to stage, who draws. So a step
that is not sound is refused by all of them alike, and none waits for another. Each rank of the last
stage draws from the same logits, so the same. Where replicas share experts, a step without sound
sequences is a dummy forward: the k-th step of each replica meets the k-th of all others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xpyd_core.errors import XpydError
from xpyd_worker.engine.executor import (
    LayerExperts,
    ScheduledSequence,
    StepCounters,
    StepInput,
    StepOutput,
)
from xpyd_worker.engine.request import SampledToken
from xpyd_worker.kernels.api import Kernels, Plan
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.decoder import Decoder
from xpyd_worker.model.shards import weight_bytes
from xpyd_worker.parallel.api import GroupError
from xpyd_worker.runner.adjustments import Adjustments
from xpyd_worker.runner.batch import Batch, BatchRows, build_batch, faults
from xpyd_worker.runner.device import Device, HostDevice, Mark, reach
from xpyd_worker.runner.drafter import Computed, Drafter
from xpyd_worker.runner.gpu_memory import lacks_memory
from xpyd_worker.runner.graphs import DecodeGraphs
from xpyd_worker.runner.kv_cache import KvCache
from xpyd_worker.runner.prompt_scores import NO_SCORES, PromptScorer, PromptScores
from xpyd_worker.runner.rejection import count_standing
from xpyd_worker.runner.sampler import Draw, Drawn, SampleRow, draw, sample
from xpyd_worker.runner.tensors import fill_drawn, put_ints, to_host, to_ints

if TYPE_CHECKING:
    from xpyd_worker.parallel.stages import IncomingHidden, StageBoundary
    from xpyd_worker.parallel.state import ParallelState

_log = logging.getLogger(__name__)
# The longest step of the largest model takes seconds; a device that needs more does not answer.
_STEP_DEADLINE_S = 120.0


Samples = Mapping[int, tuple[SampledToken, ...]]
"""What stands of the draws of a step's sequences, by id."""
Proposals = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class DeviceDraw:
    """Tokens of one step, on the device, and by sequence where its only one is. NOT_FINITE is no
    token."""

    tokens: Tensor | None = None
    places: dict[int, int] = field(default_factory=dict[int, int])


class ModelRunner:
    """Runs steps on one model; implements the engine's Executor."""

    draws_ahead = True

    def __init__(
        self,
        model: Decoder,
        config: ModelConfig,
        kernels: Kernels,
        kv_cache: KvCache,
        *,
        device: Device | None = None,
        graphs: DecodeGraphs | None = None,
        draw: Draw = draw,
        parallel: ParallelState | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`model` is loaded, and made of `kernels`; all of it is on `device` (None: the CPU), and
        `graphs` are of its forward over this cache. `draw`: how tokens are drawn there. `parallel`:
        the other ranks that `model` was built with; None where there are none. `drafter`: of the
        rank that answers steps, where a model drafts."""
        self._model = model
        part = None if parallel is None else parallel.part
        self._has_others = part is not None and (part.ranks > 1 or part.is_elastic)
        self._shares_experts = part is not None and part.exchanges_rows
        self._boundary: StageBoundary | None = None
        if parallel is not None and parallel.part.stages > 1:
            self._boundary = parallel.boundary
        self._kernels = kernels
        self._device = device or HostDevice()
        self._graphs = graphs
        self._vocab_size = config.vocab_size
        self._scorer = PromptScorer(model.logits, vocab_size=config.vocab_size)
        self._draw = draw
        self._adjustments = Adjustments(vocab_size=config.vocab_size)
        self._last = DeviceDraw()
        self._drafter = drafter
        self.kv_cache = kv_cache
        self.weight_bytes = weight_bytes(
            group.checkpoint_tensors() for group in model.weight_groups()
        )
        self.counters = StepCounters()
        model.forget_chosen()

    @property
    def num_blocks(self) -> int:
        """Blocks of the paged KV cache."""
        return self.kv_cache.num_blocks

    @property
    def drafts(self) -> bool:
        """Whether a model drafts here, behind each step."""
        return self._drafter is not None

    @property
    def draft_weight_bytes(self) -> int:
        """What that model's weights take."""
        return 0 if self._drafter is None else self._drafter.weight_bytes

    @property
    def draft_bytes(self) -> int:
        """What that model takes, its KV cache included."""
        cache = 0 if self._drafter is None else self._drafter.cache_bytes
        return self.draft_weight_bytes + cache

    def experts_chosen(self) -> tuple[LayerExperts, ...]:
        """See Decoder."""
        with self._device.use():
            return self._model.experts_chosen()

    @property
    def depth(self) -> int:
        """See Executor."""
        return self._device.depth

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> LaunchedStep:
        """Start one step; see Executor. Want of memory is an XpydError, and so are other failures
        of torch where they end with the step. What a GPU does not recover from is raised as it
        comes, here or by the step's `wait`: the engine ends.

        Of several ranks one that fails leaves others waiting for its part of the step. So all this
        is a GroupError then, as it is when another does not answer: the rank's process must end.
        A plain XpydError is only what all ranks raise alike, before anything is sent. On all stages
        but the last the output has no samples and no scores.
        """
        with self._computing(f"step {step.step}"):
            return self._launch(step, layer_done)

    @contextmanager
    def _computing(self, what: str) -> Generator[None]:
        """On the device, with failures as `launch` says."""
        try:
            with self._device.use(), torch.inference_mode():
                yield
        except RuntimeError as error:
            if self._has_others:
                raise GroupError(f"{what} failed on this rank: {error}") from error
            if lacks_memory(error):
                raise XpydError(f"{what} did not fit into memory: {error}") from error
            if self._device.is_lost_by_an_error:
                raise
            raise XpydError(f"{what} failed in the model: {error}") from error

    def await_oldest(self, awake: int) -> bool:
        """See Executor. One device runs one step after the other: what has come meanwhile is as
        early when it follows."""
        return True

    def _launch(self, step: StepInput, layer_done: Callable[[int], None]) -> LaunchedStep:
        self._model.begin_step(step.experts)
        before, self._last = self._last, DeviceDraw()
        self.kv_cache.copy_blocks(step.block_copies)
        failed = faults(
            step.sequences,
            self.kv_cache.shape,
            vocab_size=self._vocab_size,
            num_blocks=self.num_blocks,
            drawn=before.places,
        )
        sound = [one for one in step.sequences if one.seq_id not in failed]
        if not sound:
            # The other replicas make a forward, and meet this one in each layer with experts.
            if self._shares_experts:
                self._model.join()
            return self._launched(step.step, StepResults(failed, NO_SCORES, (), None))
        batch = build_batch(sound, before.places)
        asking = [rows for rows in batch.rows if rows.sequence.samples]
        hidden, asked = self._forward(batch, asking, before, _logged(layer_done, step.step))
        if hidden is None:
            return self._launched(step.step, StepResults(failed, NO_SCORES, (), None))
        prompts = self._scorer.score(hidden, batch.rows)
        drawn = self._sample(hidden.index_select(0, asked), asking) if asking else None
        draw = DeviceDraw()
        if drawn is not None:
            draw = DeviceDraw(drawn.tokens, _places(asking))
        # The first of several stages does not know it: there the caller does, or waits.
        if self._boundary is None:
            self._last = draw
        sequences = tuple(rows.sequence for rows in asking)
        standing = None if drawn is None else _standing(sequences, drawn.tokens)
        results = StepResults(failed, prompts, sequences, drawn, standing)
        propose = None
        if self._drafter is not None:
            computed = partial(Computed, batch.rows, hidden, self._model.take_features())
            propose = partial(self._propose, self._drafter, step.step, computed)
        return self._launched(step.step, results, draw, propose)

    def _launched(
        self,
        step: int,
        results: StepResults,
        draw: DeviceDraw = DeviceDraw(),
        propose: Callable[[Samples], Proposals] | None = None,
    ) -> LaunchedStep:
        return LaunchedStep(draw, step, results.to_host(), self._device.mark(), propose)

    def _propose(
        self, drafter: Drafter, step: int, computed: Callable[[Samples], Computed], samples: Samples
    ) -> Proposals:
        """What is drafted behind a step. A drafter that fails is asked no more: its step has its
        tokens, and the next ones need no draft."""
        behind = computed(samples)
        if not drafter.note(behind):
            return {}
        what = f"drafting behind step {step}"
        with self._computing(what):
            try:
                return drafter.propose(behind)
            except Exception as error:
                is_errors = isinstance(error, RuntimeError) and not lacks_memory(error)
                if is_errors and self._device.is_lost_by_an_error:
                    raise
                self._drafter = None
                _log.exception("%s failed; no model drafts from here on", what)
                return {}

    def _forward(
        self,
        batch: Batch,
        asking: list[BatchRows],
        before: DeviceDraw,
        layer_done: Callable[[int], None],
    ) -> tuple[Tensor | None, Tensor]:
        """The step's one forward: hidden states [tokens, hidden], None where they went to the next
        stage; and which rows of them are asked for a token."""
        self.counters.count(len(batch.token_ids), batch.prompt_tokens)
        some = [batch.drawn_at, batch.drawn_from, [row for rows in asking for row in rows.asked]]

        def fill(token_ids: Tensor) -> None:
            if before.tokens is not None and batch.drawn_at:
                fill_drawn(token_ids, at, before.tokens, places)

        graphs, on = self._graphs, self._device.torch_device
        if graphs is not None and batch.is_decode and len(batch.spans) <= graphs.most:
            self.counters.graph_replays += 1
            at, places, asked = put_ints(some, on)
            return graphs.run(batch.token_ids, batch.spans, fill), asked
        incoming = self._begin_stage(len(batch.token_ids))
        token_ids, positions, at, places, asked = put_ints(
            [batch.token_ids, batch.positions, *some], on
        )
        plan = self._kernels.plan(batch.spans, self.kv_cache.shape)
        fill(token_ids)
        entering = token_ids if incoming is None else incoming
        return self._run(entering, positions, plan, layer_done), asked

    def _begin_stage(self, rows: int) -> IncomingHidden | None:
        """Receive what the stage before sends for a forward of `rows` tokens, if there is such a
        stage. The buffers that it comes into may be on their way still, sent by the step before."""
        if self._boundary is None:
            return None
        self._boundary.begin_step()
        return None if self._model.part.is_first else self._boundary.receive(rows)

    def _run(
        self,
        entering: Tensor | IncomingHidden,
        positions: Tensor,
        plan: Plan,
        layer_done: Callable[[int], None],
    ) -> Tensor | None:
        """The layers of this stage, and what they give to the next one if there is one."""
        layers = self.kv_cache.layers
        if self._boundary is None or self._model.part.is_last:
            return self._model.forward(entering, positions, layers, plan, layer_done)
        self._boundary.send(self._model.stage(entering, positions, layers, plan, layer_done))
        return None

    def _sample(self, hidden: Tensor, asking: list[BatchRows]) -> Drawn:
        """Tokens for the rows [asked, hidden] of sequences that ask for some; only these rows go
        through the head."""
        logits = self._model.logits(hidden)
        self._adjustments.begin_step()
        wanted: list[SampleRow] = []
        row = 0
        for rows in asking:
            sequence = rows.sequence
            first = self._adjustments.of(sequence)
            adjustments = [first, *self._adjustments.behind_drafts(sequence)]
            # All but the draw is launched: a mask that a thread still fills has had that long.
            masks = _masks(sequence)
            for behind, (adjustment, mask) in enumerate(zip(adjustments, masks, strict=True)):
                wanted += [
                    SampleRow(
                        row + behind,
                        sequence.sampling,
                        spec.choice_index,
                        spec.position + behind,
                        sequence.eos_token_ids,
                        adjustment,
                        mask,
                    )
                    for spec in sequence.samples
                ]
            row += len(rows.asked)
        return sample(logits, wanted, self._draw)


def _standing(asking: Sequence[ScheduledSequence], tokens: Tensor) -> Tensor | None:
    """How many draws count, of each sequence with draft tokens; None where there is none. `tokens`:
    all that was drawn. Nothing waits for the device."""
    most = max((sequence.drafts for sequence in asking), default=0)
    if not most:
        return None
    rows: list[int] = []
    drafted: list[int] = []
    first = 0
    for sequence in asking:
        if k := sequence.drafts:
            # Shorter drafts are filled up with what is no draft token.
            rows += [first + min(at, k) for at in range(most + 1)]
            drafted += [*sequence.token_ids[-k:], *[-1] * (most - k)]
        first += len(sequence.samples) + sequence.drafts
    at, draft_tokens = put_ints([rows, drafted], tokens.device)
    return count_standing(tokens[at].view(-1, most + 1), draft_tokens.view(-1, most))


def _masks(sequence: ScheduledSequence) -> list[bytes | None]:
    """What each of a sequence's draws may take: the first, and those behind draft tokens."""
    count = 1 + sequence.drafts
    if sequence.mask is None:
        return [None] * count
    words = sequence.mask.words()
    each = len(words) // count
    return [words[at * each : (at + 1) * each] for at in range(count)]


def _places(asking: list[BatchRows]) -> dict[int, int]:
    """The place, among the tokens that the step draws, of a sequence's only one; by sequence. Which
    one it is of those behind draft tokens is known when they are verified."""
    places: dict[int, int] = {}
    first = 0
    for rows in asking:
        sequence = rows.sequence
        if len(sequence.samples) == 1 and not sequence.drafts:
            places[sequence.seq_id] = first
        first += len(sequence.samples) + sequence.drafts
    return places


@dataclass(frozen=True)
class LaunchedStep:
    """A step on its way: what it draws, for the next step on the device, and the mark
    behind the copies of its results."""

    draw: DeviceDraw
    step: int
    results: StepResults
    mark: Mark
    propose: Callable[[Samples], Proposals] | None = None

    def wait(self) -> StepOutput:
        """See Running. Raises DeviceLostError where the device does not answer. A model that drafts
        does it now, behind what was drawn."""
        reach(self.mark, within_s=_STEP_DEADLINE_S, what=f"step {self.step}")
        output = self.results.output()
        if self.propose is None:
            return output
        proposals = self.propose(output.samples)
        return replace(output, proposals=proposals) if proposals else output


def _logged(layer_done: Callable[[int], None], step: int) -> Callable[[int], None]:
    """`layer_done` with a debug line before it; itself where debug lines are off."""
    if not _log.isEnabledFor(logging.DEBUG):
        return layer_done

    def log(layer: int) -> None:
        extra = {"layer": layer, "step": step, "monotonic_ns": time.monotonic_ns()}
        _log.debug("layer done", extra=extra)
        layer_done(layer)

    return log


@dataclass(frozen=True)
class StepResults:
    """The results of a step's sequences: `failed` says why some took no part, `asking` are those
    that draw, and `drawn` has the rows of their SampleSpecs and draft tokens, one behind the other;
    None where no sequence draws. `standing`: how many of its draws count, for each of those with
    draft tokens."""

    failed: dict[int, str]
    prompts: PromptScores
    asking: tuple[ScheduledSequence, ...]
    drawn: Drawn | None
    standing: Tensor | None = None

    def to_host(self) -> StepResults:
        """Enqueue the copies to the host: right when what was enqueued so far is done."""
        drawn = None if self.drawn is None else self.drawn.to_host()
        standing = None if self.standing is None else to_host(self.standing)
        return replace(self, prompts=self.prompts.to_host(), drawn=drawn, standing=standing)

    def output(self) -> StepOutput:
        """What is on the host, when the caller has waited for the copies: nothing here does."""
        scored = self.prompts.result()
        failed = self.failed | scored.failed
        samples: dict[int, tuple[SampledToken, ...]] = {}
        tokens = iter(() if self.drawn is None else self.drawn.result())
        standing = iter(() if self.standing is None else to_ints(self.standing))
        for sequence in self.asking:
            drawn = [next(tokens) for _ in range(len(sequence.samples) + sequence.drafts)]
            if sequence.drafts:
                del drawn[next(standing) :]
            found = tuple(token for token in drawn if token is not None)
            if len(found) < len(drawn):
                failed.setdefault(
                    sequence.seq_id,
                    f"request {sequence.log_id or sequence.seq_id}: the model gave logits that are "
                    "not finite",
                )
            elif sequence.seq_id not in failed:
                samples[sequence.seq_id] = found
        return StepOutput(samples, scored.scores, failed)

"""The executor of one rank: block copies, one flat forward, sampling.

The engine calls `launch` from its thread, step by step. The runner owns weights and KV cache; it
must not know queues, requests' lives or who else reads the cache. It touches no global state of
torch: the number of threads is the program's choice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import torch
from torch import Tensor

from xpyd_core.blocks import DEFAULT_BLOCK_SIZE
from xpyd_core.errors import XpydError
from xpyd_worker.engine.executor import Finished, StepInput, StepOutput
from xpyd_worker.kernels.api import Kernels, KvShape
from xpyd_worker.kernels.cpu.kernels import choose_kernels
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.decoder import Decoder
from xpyd_worker.model.loader import load_weights
from xpyd_worker.model.registry import build_model
from xpyd_worker.runner.adjustments import Adjustments
from xpyd_worker.runner.batch import Batch, BatchRows, build_batch, faults
from xpyd_worker.runner.kv_cache import KvCache, blocks_in_budget
from xpyd_worker.runner.prompt_scores import PromptScorer
from xpyd_worker.runner.results import StepResults
from xpyd_worker.runner.sampler import Drawn, SampleRow, sample
from xpyd_worker.runner.tensors import rows_of

_log = logging.getLogger(__name__)


@dataclass
class RunnerCounters:
    """What entered forwards since the start. Written by the engine's thread only."""

    forwards: int = 0
    prompt_tokens_computed: int = 0
    output_tokens_computed: int = 0


class ModelRunner:
    """Runs steps on one model; implements the engine's Executor."""

    def __init__(
        self, model: Decoder, config: ModelConfig, kernels: Kernels, kv_cache: KvCache
    ) -> None:
        """`model` is loaded, and made of `kernels`."""
        self._model = model
        self._kernels = kernels
        self._vocab_size = config.vocab_size
        self._scorer = PromptScorer(model.logits, vocab_size=config.vocab_size)
        self._adjustments = Adjustments(vocab_size=config.vocab_size)
        self.kv_cache = kv_cache
        self.weight_bytes = sum(
            tensor.numel() * tensor.itemsize
            for group in model.weight_groups()
            for tensor in group.checkpoint_tensors().values()
        )
        self.counters = RunnerCounters()

    @classmethod
    def load(
        cls,
        folder: Path,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        kv_cache_bytes: int,
        kv_memory: mmap | None = None,
        block_size_tokens: int = DEFAULT_BLOCK_SIZE,
    ) -> ModelRunner:
        """Read the checkpoint in `folder` and allocate a KV cache of at most `kv_cache_bytes`, in
        `kv_memory` (so many bytes) where it is given.

        Raises UserError for a checkpoint that does not fit `config` or a budget below one block.
        """
        shape = KvShape(config.num_kv_heads, config.head_dim, block_size_tokens, dtype)
        num_blocks = blocks_in_budget(shape, config.num_layers, kv_cache_bytes)
        kernels = choose_kernels(vector_sizes=config.vector_sizes, head_dim=config.head_dim)
        model = build_model(config, dtype, kernels)
        load_weights(
            folder,
            model.weight_groups(),
            kernels=kernels,
            device=torch.device("cpu"),
            is_tied=config.tie_word_embeddings,
        )
        cache = KvCache(
            shape, num_layers=config.num_layers, num_blocks=num_blocks, memory=kv_memory
        )
        return cls(model, config, kernels, cache)

    @property
    def num_blocks(self) -> int:
        """Blocks of the paged KV cache."""
        return self.kv_cache.num_blocks

    @property
    def depth(self) -> int:
        """A step is over when it is launched."""
        return 1

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> Finished:
        """Run one step; see Executor. Out of memory and other failures of torch are XpydError."""
        try:
            with torch.inference_mode():
                return Finished(self._execute(step, layer_done))
        except RuntimeError as error:
            raise XpydError(f"step {step.step} failed in the model: {error}") from error

    def _execute(self, step: StepInput, layer_done: Callable[[int], None]) -> StepOutput:
        self.kv_cache.copy_blocks(step.block_copies)
        if not step.sequences:
            return StepOutput({}, {})
        shape = self.kv_cache.shape
        failed = faults(
            step.sequences, shape, vocab_size=self._vocab_size, num_blocks=self.num_blocks
        )
        sound = [one for one in step.sequences if one.seq_id not in failed]
        if not sound:
            return StepOutput({}, {}, failed)
        batch = build_batch(sound, shape, self._kernels)
        hidden = self._forward(batch, _logged(layer_done, step.step))
        prompts = self._scorer.score(hidden, batch.rows)
        asking = [rows for rows in batch.rows if rows.sequence.samples]
        drawn = self._sample(hidden, asking) if asking else None
        sequences = tuple(rows.sequence for rows in asking)
        return StepResults(failed, prompts, sequences, drawn).to_host().output()

    def _forward(self, batch: Batch, layer_done: Callable[[int], None]) -> Tensor:
        """The step's one forward; hidden states [tokens, hidden]."""
        tokens = batch.token_ids.shape[0]
        self.counters.forwards += 1
        self.counters.prompt_tokens_computed += batch.prompt_tokens
        self.counters.output_tokens_computed += tokens - batch.prompt_tokens
        return self._model.forward(
            batch.token_ids, batch.positions, self.kv_cache.layers, batch.plan, layer_done
        )

    def _sample(self, hidden: Tensor, asking: Sequence[BatchRows]) -> Drawn:
        """Tokens of the sequences that ask for some; only their last rows go through the head."""
        logits = self._model.logits(rows_of(hidden, [rows.last_row for rows in asking]))
        wanted: list[SampleRow] = []
        for index, rows in enumerate(asking):
            sequence = rows.sequence
            adjustment = self._adjustments.of(sequence)
            wanted += [
                SampleRow(
                    index,
                    sequence.sampling,
                    spec.choice_index,
                    spec.position,
                    sequence.eos_token_ids,
                    adjustment,
                )
                for spec in sequence.samples
            ]
        return sample(logits, wanted)


def _logged(layer_done: Callable[[int], None], step: int) -> Callable[[int], None]:
    """`layer_done` with a debug line before it; itself where nobody reads such lines."""
    if not _log.isEnabledFor(logging.DEBUG):
        return layer_done

    def log(layer: int) -> None:
        extra = {"layer": layer, "step": step, "monotonic_ns": time.monotonic_ns()}
        _log.debug("layer done", extra=extra)
        layer_done(layer)

    return log

"""Drives a ModelRunner step by step for tests: block tables, chunks, batches. No scheduler.

`Driver` gives each sequence its own blocks and keeps what it put out; `tiny_checkpoint` writes a
random-weight model that transformers and our loader both read; `oracle_*` are its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xpyd_worker.engine.executor import (
    KnownTokens,
    SampleSpec,
    ScheduledSequence,
    StepInput,
    StepOutput,
)
from xpyd_worker.engine.request import SamplingParams, TokenLogprob
from xpyd_worker.model.registry import load_config
from xpyd_worker.runner.runner import ModelRunner

if TYPE_CHECKING:
    from xpyd_worker.engine.speculation import Method, SpeculativeConfig
    from xpyd_worker.runner.load_draft import DraftSource

BLOCK_SIZE = 16
# What a family's tiny checkpoint has beside the sizes that all have.
_FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 24},
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
    },
}
GREEDY = SamplingParams(max_tokens=1 << 30, seed=0, temperature=0.0)


@dataclass
class DrivenSequence:
    """One sequence of the driver: all its known tokens and how many have KV."""

    seq_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    blocks: list[int]
    choice_index: int = 0
    computed: int = 0
    output: list[int] = field(default_factory=list[int])
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    output_logprobs: list[TokenLogprob | None] = field(default_factory=list[TokenLogprob | None])

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt, *self.output]


class Driver:
    """A runner with the simplest block manager: blocks are handed out and never come back."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.steps = 0
        self._next_block = 0
        self._next_id = 0

    def take_blocks(self, count: int) -> list[int]:
        """`count` unused blocks, in an order that is not the cache's."""
        first, self._next_block = self._next_block, self._next_block + count
        assert self._next_block <= self.runner.num_blocks
        return list(reversed(range(first, first + count)))

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        shared_blocks: Sequence[int] = (),
        choice_index: int = 0,
    ) -> DrivenSequence:
        """A new sequence; `shared_blocks` hold the KV of its first tokens (a cached prefix)."""
        self._next_id += 1
        computed = len(shared_blocks) * BLOCK_SIZE
        return DrivenSequence(
            self._next_id,
            tuple(prompt),
            sampling,
            list(shared_blocks),
            choice_index=choice_index,
            computed=computed,
        )

    def step(
        self,
        chunks: Sequence[tuple[DrivenSequence, int]],
        *,
        copies: Sequence[tuple[int, int]] = (),
        layer_done: Callable[[int], None] = lambda layer: None,
    ) -> StepOutput:
        """Compute the next `count` tokens of each sequence in one step; those whose last known
        token is computed get a sample appended."""
        scheduled = tuple(self.schedule(sequence, count) for sequence, count in chunks)
        self.steps += 1
        step = StepInput(self.steps, scheduled, tuple(copies))
        output = self.runner.launch(step, layer_done).wait()
        for sequence, count in chunks:
            sequence.computed += count
            sequence.prompt_logprobs += output.prompt_logprobs.get(sequence.seq_id, ())
            for sampled in output.samples.get(sequence.seq_id, ()):
                sequence.output.append(sampled.token_id)
                sequence.output_logprobs.append(sampled.logprob)
        return output

    def schedule(self, sequence: DrivenSequence, count: int) -> ScheduledSequence:
        """The next `count` tokens of a sequence, with a sample if they are the last known."""
        end = sequence.computed + count
        assert end <= len(sequence.tokens)
        missing = -(-end // BLOCK_SIZE) - len(sequence.blocks)
        sequence.blocks += self.take_blocks(max(0, missing))
        samples: tuple[SampleSpec, ...] = ()
        if end == len(sequence.tokens):
            samples = (SampleSpec(sequence.choice_index, len(sequence.output)),)
        return ScheduledSequence(
            seq_id=sequence.seq_id,
            token_ids=tuple(sequence.tokens[sequence.computed : end]),
            start=sequence.computed,
            block_ids=tuple(sequence.blocks),
            sampling=sequence.sampling,
            prompt_tokens=len(sequence.prompt),
            samples=samples,
            log_id=f"{sequence.seq_id:032x}",
            known=self._known(sequence) if samples else None,
        )

    @staticmethod
    def _known(sequence: DrivenSequence) -> KnownTokens | None:
        if not sequence.sampling.reads_tokens:
            return None
        return KnownTokens(sequence.prompt, tuple(sequence.output))

    def preempt(self, sequence: DrivenSequence) -> None:
        """Take all its blocks: what it has is computed anew."""
        sequence.blocks = []
        sequence.computed = 0

    def run(
        self, sequences: Sequence[DrivenSequence], *, tokens: int, budget: int = 1 << 30
    ) -> None:
        """Until each has put out `tokens`: every sequence takes part in every step while the token
        budget of the step lasts, decodes first, long prompts in chunks."""
        while True:
            chunks: list[tuple[DrivenSequence, int]] = []
            left = budget
            open_ = [s for s in sequences if len(s.output) < tokens]
            for sequence in sorted(open_, key=lambda s: len(s.tokens) - s.computed):
                count = min(left, len(sequence.tokens) - sequence.computed)
                if count:
                    chunks.append((sequence, count))
                    left -= count
            if not chunks:
                return
            self.step(chunks)


def draft_source(
    folder: Path, draft: Path, method: Method = "draft_model"
) -> tuple[SpeculativeConfig, DraftSource]:
    """What drafts for the model in `folder`: the model or the heads in `draft`."""
    # GPU tests have no configuration's libraries.
    from xpyd_worker.config import WorkerConfig
    from xpyd_worker.engine.speculation import SpeculativeConfig
    from xpyd_worker.runner.load_draft import open_draft

    given = SpeculativeConfig(method=method, num_speculative_tokens=3, model=str(draft))
    config = WorkerConfig(model=str(folder), block_size=BLOCK_SIZE, speculative=given)
    source = open_draft(config, load_config(folder), folder)
    assert source is not None
    return given, source


def make_runner(
    folder: Path,
    *,
    blocks: int = 64,
    dtype: torch.dtype = torch.float32,
    draft: DraftSource | None = None,
) -> ModelRunner:
    """A runner with `blocks` blocks over the checkpoint in `folder`; with a draft model somewhat
    more."""
    config = load_config(folder)
    block_bytes = config.num_kv_heads * BLOCK_SIZE * 2 * config.head_dim * dtype.itemsize
    budget = blocks * block_bytes * config.num_layers
    # What reads checkpoints is not on every machine that runs steps.
    from xpyd_worker.runner.load import fit_on_cpu

    if draft is not None:
        budget *= 2
    return fit_on_cpu(folder, config, dtype=dtype, kv_cache_bytes=budget, draft=draft).make_runner()


def poison(runner: ModelRunner) -> None:
    """Fill the whole KV cache with NaN: whoever reads a slot that nobody wrote shows it."""
    for layer in runner.kv_cache.layers:
        layer.fill_(float("nan"))


def tiny_checkpoint(folder: Path, family: str, **changes: Any) -> Any:
    """Write a random-weight model of `family` (llama, qwen2, qwen3, mixtral, qwen3_moe, ...) and
    return transformers' own model of it in float32. `changes` override its configuration."""
    import transformers

    shared: dict[str, Any] = {
        "vocab_size": 307,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        # Far from zero: with small weights all logits are alike and any bug gives the same tokens.
        "initializer_range": 0.15,
    }
    prefix = "".join(part.capitalize() for part in family.split("_"))
    module: Any = transformers
    config = getattr(module, f"{prefix}Config")(
        **(shared | _FAMILY_SIZES.get(family, {}) | changes)
    )
    torch.manual_seed(7)
    model = getattr(module, f"{prefix}ForCausalLM")(config).to(torch.float32).eval()
    _fill_constant_weights(model)
    model.save_pretrained(folder)
    return model


def _fill_constant_weights(model: Any) -> None:
    """Biases and norms are initialised to constants, which would hide their absence."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".bias"):
                weight.normal_(0.0, 0.3)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)


def oracle_tokens(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens, the whole sequence computed anew for each: no cache, no batch."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def oracle_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of one sequence."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].float()


def with_params(**changes: Any) -> SamplingParams:
    """Greedy parameters with changes."""
    return replace(GREEDY, **changes)


def fork_by_copy(
    runner: ModelRunner, prompt: Sequence[int], token: int
) -> tuple[DrivenSequence, DrivenSequence]:
    """A sequence of two tokens behind `prompt`, and one that goes on from its blocks with `token`:
    its last block is copied in the step in which both compute."""
    driver = Driver(runner)
    first = driver.add(prompt)
    driver.run([first], tokens=1)
    fork = replace(first, seq_id=99, blocks=[*first.blocks[:-1], *driver.take_blocks(1)])
    fork.output = [token]
    driver.step([(first, 1), (fork, 1)], copies=[(first.blocks[-1], fork.blocks[-1])])
    return first, fork

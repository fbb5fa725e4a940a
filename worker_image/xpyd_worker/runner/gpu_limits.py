"""What a GPU's engine is to hold, and the steps that this allows: the largest, by which memory is
measured, and one of each form that kernels are compiled in. Values only, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xpyd_worker.engine.executor import KnownTokens, SampleSpec, ScheduledSequence, StepInput
from xpyd_worker.engine.request import SamplingParams

# Decode attention cuts contexts of 256 tokens and more, by powers of two, at most into 64 parts.
_CUT_CONTEXTS = tuple(256 << power for power in range(8))
# All that makes the sampler work at once: what a step draws takes the most memory then.
_ALL_OPTIONS = SamplingParams(
    max_tokens=2,
    seed=0,
    temperature=1.0,
    top_p=0.9,
    top_k=1000,
    min_p=0.01,
    repetition_penalty=1.1,
    logprobs=20,
)
_GREEDY = SamplingParams(max_tokens=2, seed=0, temperature=0.0)


@dataclass(frozen=True)
class GpuLimits:
    """What a GPU's engine is to hold.

    `utilization` is the share of the device's memory that it may use; `cache_bytes` is the KV
    cache's size where that is given instead (None: what is left of the share). Beside the cache
    `beside_bytes` of the share are kept, and `beside_percent` of the cache's size.
    """

    utilization: float
    cache_bytes: int | None
    beside_bytes: int
    beside_percent: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    use_graphs: bool

    @property
    def flag(self) -> str:
        """The one that decides the KV cache's size."""
        return "--gpu-memory-utilization" if self.cache_bytes is None else "--kv-cache-memory"


def largest(limits: GpuLimits, block_size: int) -> StepInput:
    """The step that takes the most memory: all tokens that a step may have, in as many sequences
    as may run, and all of them draw. They stand in block 0 together; what comes out is nothing."""
    each, more = divmod(limits.max_num_batched_tokens, limits.max_num_seqs)
    counts = [each + (index < more) for index in range(limits.max_num_seqs)]
    return StepInput(
        0,
        tuple(
            _sequence(index, count, 0, block_size, _ALL_OPTIONS)
            for index, count in enumerate(counts)
        ),
    )


def warm_ups(limits: GpuLimits, block_size: int) -> Iterator[StepInput]:
    """A step for each form that kernels are compiled in, so that requests wait for no compiler:
    each size of a tile of rows, which grow with the powers of two, and each number of parts that a
    decode's context is cut into."""
    longest = min(limits.max_model_len, limits.max_num_batched_tokens)
    # Kernels are also compiled apart for counts that 16 divides.
    powers = [1 << power for power in range(4, longest.bit_length())]
    for count in (2, *powers, *(power + 1 for power in powers)):
        if count <= longest:
            yield StepInput(0, (_sequence(0, count, 0, block_size, _GREEDY),))
    for context in (1, *_CUT_CONTEXTS):
        if context <= limits.max_model_len:
            yield StepInput(0, (_sequence(0, 1, context - 1, block_size, _GREEDY),))


def _sequence(
    index: int, count: int, start: int, block_size: int, sampling: SamplingParams
) -> ScheduledSequence:
    blocks = -(-(start + count) // block_size)
    return ScheduledSequence(
        seq_id=index,
        token_ids=(0,) * count,
        start=start,
        block_ids=(0,) * blocks,
        sampling=sampling,
        prompt_tokens=start + count,
        samples=(SampleSpec(0, 0),),
        log_id="warm-up",
        known=KnownTokens((0,), ()),
    )

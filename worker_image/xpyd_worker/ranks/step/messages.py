"""What goes to the ranks for a step, and what comes back: msgpack, small, each size bounded. Pure.

    StepInput --StepEncoder--> StepMessage --bytes--> StepDecoder --> StepInput, on every rank
    StepOutput <----------- OutputMessage <--bytes--------------- from the output rank

A rank keeps what it has received of a sequence in a slot. So one that goes on costs a slot and its
new blocks (Going, Ahead), and its draft tokens (Draft), a further part of a prompt its tokens
(Chunk), and only what a rank does not know, or knows otherwise, comes in full (Full). It must not
know tensors or transports."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from xpyd_core.errors import XpydError
from xpyd_worker.engine.eplb import ExpertTurn
from xpyd_worker.engine.executor import Resize, StepOutput
from xpyd_worker.engine.request import SampledToken, SamplingParams, TokenLogprob

MAX_STEP_BYTES = 64 << 20
"""A step of 16,384 prompt tokens takes 0.1 MB, tables of 256 sequences with 128k tokens 10 MB; the
rest is for draws that read tokens whose KV was found or received: those come once, 5 bytes each."""
MAX_OUTPUT_BYTES = 64 << 20
"""20 alternatives for each of 16,384 prompt tokens take 6 MB."""


def slot_count(max_num_seqs: int) -> int:
    """Sequences that ranks know at once: those that run, and as many that were preempted."""
    return 2 * max_num_seqs


class MessageError(XpydError):
    """A message of the other side is too long or none of ours: the two are not of one version."""


class Going(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A sequence computes the token that the ranks drew for it last, and draws the next one for the
    same choice. `blocks`: those that are new in its table."""

    slot: int
    blocks: tuple[int, ...] = ()


class Ahead(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The row with the token that the step before this one draws (DRAWN_BEFORE)."""

    slot: int
    blocks: tuple[int, ...] = ()


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """More tokens of a sequence that its last step drew no one token for, from where that ended.
    `choices` (their indices) draw behind them."""

    slot: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()


class Full(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A sequence as ScheduledSequence has it; the slot is its own from here on. `samples` are
    (choice index, position). `before`: its tokens before `start`, where the draw reads them, and
    the `salt` of them all."""

    slot: int
    seq_id: int
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    prompt_tokens: int
    samples: tuple[tuple[int, int], ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    log_id: str
    before: tuple[int, ...] | None
    drafts: int = 0
    """So many of `tokens`, the last ones, are draft tokens."""
    salt: bytes = b""


class Draft(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """As Going, with draft tokens behind the token."""

    slot: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...] = ()


Row = Going | Ahead | Chunk | Full | Draft


class StepMessage(msgspec.Struct, frozen=True, array_like=True):
    """One StepInput; `rows` are its sequences in order. `masks`: of those that draw under a grammar
    (row, words of the mask). `experts` and `resize`: see StepInput. `propose`: of those with drafts
    by a model (row, tokens)."""

    step: int
    rows: tuple[Row, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    kv: bytes = b""
    masks: tuple[tuple[int, bytes], ...] = ()
    experts: ExpertTurn = ExpertTurn.NONE
    resize: Resize | None = None
    propose: tuple[tuple[int, int], ...] = ()


class OutputMessage(msgspec.Struct, frozen=True, array_like=True):
    """One StepOutput, by sequence id. `scores` has those sequences whose samples carry log
    probabilities."""

    samples: dict[int, tuple[int, ...]]
    scores: dict[int, tuple[TokenLogprob | None, ...]]
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]]
    failed: dict[int, str]
    proposals: dict[int, tuple[int, ...]] = {}


_encoder = msgspec.msgpack.Encoder()
_steps = msgspec.msgpack.Decoder(StepMessage)
_outputs = msgspec.msgpack.Decoder(OutputMessage)


def encode_step(message: StepMessage) -> bytes:
    """MessageError where it is longer than MAX_STEP_BYTES."""
    encoded = _encoder.encode(message)
    if len(encoded) > MAX_STEP_BYTES:
        raise MessageError(
            f"step {message.step} takes {len(encoded)} bytes, {MAX_STEP_BYTES} are allowed: lower "
            "--max-num-seqs or --max-model-len"
        )
    return encoded


def decode_step(encoded: bytes) -> StepMessage:
    """Raises MessageError."""
    _check_size(encoded, MAX_STEP_BYTES, "a step")
    try:
        return _steps.decode(encoded)
    except msgspec.DecodeError as error:
        raise MessageError(f"not a step of this version: {error}") from error


def encode_output(output: StepOutput) -> bytes:
    """The bytes of a StepOutput; MessageError where they are more than MAX_OUTPUT_BYTES."""
    samples = {i: tuple(one.token_id for one in some) for i, some in output.samples.items()}
    scores = {
        i: tuple(one.logprob for one in some)
        for i, some in output.samples.items()
        if any(one.logprob for one in some)
    }
    message = OutputMessage(
        samples, scores, output.prompt_logprobs, output.failed, output.proposals
    )
    encoded = _encoder.encode(message)
    _check_size(encoded, MAX_OUTPUT_BYTES, "what came of a step")
    return encoded


def decode_output(encoded: bytes) -> StepOutput:
    """What `encode_output` was given. Raises MessageError."""
    _check_size(encoded, MAX_OUTPUT_BYTES, "what came of a step")
    try:
        message = _outputs.decode(encoded)
    except msgspec.DecodeError as error:
        raise MessageError(f"not a step's output of this version: {error}") from error
    samples = {i: _samples(tokens, message.scores.get(i)) for i, tokens in message.samples.items()}
    return StepOutput(samples, message.prompt_logprobs, message.failed, message.proposals)


def _check_size(encoded: bytes, most: int, what: str) -> None:
    if len(encoded) > most:
        raise MessageError(f"{what} takes {len(encoded)} bytes, {most} are allowed")


def _samples(
    tokens: Sequence[int], scores: Sequence[TokenLogprob | None] | None
) -> tuple[SampledToken, ...]:
    if scores is None:
        return tuple(map(SampledToken, tokens))
    if len(scores) != len(tokens):
        raise MessageError(f"{len(scores)} log probabilities for {len(tokens)} tokens")
    return tuple(map(SampledToken, tokens, scores))

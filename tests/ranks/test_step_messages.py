"""Messages to and from the ranks: their bytes, their sizes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks.kit.coded_executor import MOST_TOKENS
from xpyd_worker.engine.eplb import ExpertTurn
from xpyd_worker.engine.executor import (
    DRAWN_BEFORE,
    KnownMask,
    KnownTokens,
    Resize,
    SampleSpec,
    ScheduledSequence,
    StepInput,
    StepOutput,
)
from xpyd_worker.engine.request import SampledToken, SamplingParams, TokenLogprob
from xpyd_worker.ranks.compute.request_states import RequestStates
from xpyd_worker.ranks.compute.work import sampled_rows
from xpyd_worker.ranks.step import messages as step_messages
from xpyd_worker.ranks.step.decoder import StepDecoder
from xpyd_worker.ranks.step.encoder import StepEncoder
from xpyd_worker.ranks.step.messages import (
    Ahead,
    Chunk,
    Draft,
    Full,
    Going,
    MessageError,
    StepMessage,
    decode_output,
    decode_step,
    encode_output,
    encode_step,
)

SAMPLING = SamplingParams(max_tokens=8, seed=7, temperature=0.0)
PENALIZED = replace(SAMPLING, presence_penalty=0.5)
SOME = ScheduledSequence(
    seq_id=5,
    token_ids=(11, 12, 13),
    start=0,
    block_ids=(4,),
    sampling=SAMPLING,
    prompt_tokens=3,
    samples=(SampleSpec(0, 0),),
    eos_token_ids=(2,),
    log_id="a",
)
GOING = replace(SOME, token_ids=(20,), start=3, samples=(SampleSpec(0, 1),))


# Before and behind the sampling parameters, which come by name.
GOLDEN_BEGIN = "98099593000191079301cd012c909502029205ce000111709091009e03030604910892040905919200"
GOLDEN_END = (
    "9102a161940102030400c4017394040592080691079192"
    + "0102c4026b76919202c404ff000001029403920001c2c291920002"
)


class Line:
    """An encoder and a rank behind it."""

    def __init__(self, slots: int = 4) -> None:
        self.encoder = StepEncoder(slots)
        self.states = RequestStates(slots, MOST_TOKENS)
        self.decoder = StepDecoder(slots, self.states)
        self.steps = 0

    def send(
        self, *sequences: ScheduledSequence, drawn: dict[int, int] | None = None
    ) -> StepMessage:
        """One step, of which the ranks draw 20 for everyone, or what `drawn` says."""
        self.steps += 1
        step = StepInput(self.steps, sequences, ((1, 2),), b"kv")
        message = decode_step(self.encoder.encode(step))
        assert self.decoder.read(message) == step
        ids = drawn or {}
        output = StepOutput(
            {
                s.seq_id: tuple(SampledToken(ids.get(s.seq_id, 20)) for _ in s.samples)
                for s in sequences
                if s.samples
            },
            {},
        )
        self.states.post_update(
            [row.slot for row in message.rows],
            [len(s.token_ids) for s in sequences],
            sampled_rows(step, output),
        )
        self.encoder.drawn(step.step, output)
        return message


def test_the_bytes_of_a_step_are_these():
    message = StepMessage(
        9,
        (
            Going(1, (7,)),
            Ahead(300),
            Chunk(2, (5, 70000), (), (0,)),
            Full(3, 6, 4, (8,), (4, 9), 5, ((0, 0),), SAMPLING, (2,), "a", (1, 2, 3, 4), salt=b"s"),
            Draft(5, (8, 6), (7,)),
        ),
        ((1, 2),),
        b"kv",
        ((2, b"\xff\x00\x00\x01"),),
        ExpertTurn.PLACE,
        Resize(3, (0, 1)),
        ((0, 2),),
    )
    encoded = encode_step(message)
    assert encoded.hex().startswith(GOLDEN_BEGIN)
    assert encoded.hex().endswith(GOLDEN_END)
    assert decode_step(encoded) == message


def test_the_bytes_of_an_output_are_these():
    output = StepOutput(
        {5: (SampledToken(20),), 6: (SampledToken(7, TokenLogprob(7, -0.5, ((7, -0.5),), 1)),)},
        {5: (TokenLogprob(3, -1.0, (), 4),)},
        {9: "no"},
        {5: (21, 22)},
    )
    encoded = encode_output(output)
    assert encoded.hex() == (
        "95820591140691078106919407cbbfe0000000000000919207cbbfe000000000000001"
        "8105919403cbbff000000000000090048109a26e6f8105921516"
    )
    assert decode_output(encoded) == output


def test_a_sequence_that_goes_on_costs_a_few_bytes():
    line = Line(slots=256)
    many = [replace(SOME, seq_id=i, block_ids=(i,)) for i in range(256)]
    line.send(*many)
    going = [replace(GOING, seq_id=i, block_ids=(i,)) for i in range(256)]
    assert {type(row) for row in line.send(*going).rows} == {Going}
    line.encoder.drawn(line.steps, StepOutput({}, {}))
    later = [replace(g, start=4, samples=(SampleSpec(0, 2),)) for g in going]
    step = StepInput(line.steps + 1, tuple(later))
    assert len(line.encoder.encode(step)) <= 6 * 256 + 16


@pytest.mark.parametrize(
    ("second", "kind"),
    [
        (GOING, Going),
        (replace(GOING, block_ids=(4, 6)), Going),
        (replace(GOING, token_ids=(DRAWN_BEFORE,)), Ahead),
        (replace(GOING, token_ids=(21,)), Full),
        (replace(GOING, token_ids=(20, 21), samples=()), Full),
        (replace(GOING, samples=(SampleSpec(1, 1),)), Full),
        (replace(GOING, samples=(SampleSpec(0, 2),)), Full),
        (replace(GOING, block_ids=(5,)), Full),
        (replace(GOING, start=2), Full),
        (replace(GOING, sampling=replace(SAMPLING, logprobs=1)), Full),
        (replace(GOING, eos_token_ids=(3,)), Full),
        (replace(GOING, log_id="b"), Full),
        (replace(GOING, prompt_tokens=2), Full),
        (replace(GOING, seq_id=6), Full),
    ],
)
def test_only_what_the_ranks_know_is_left_out(second: ScheduledSequence, kind: type):
    line = Line()
    line.send(SOME)
    (row,) = line.send(second).rows
    assert type(row) is kind


def test_masks_come_along_with_each_step_whatever_row_their_sequence_has():
    """Each `send` compares the step that a rank makes."""
    line = Line()
    first, other = KnownMask(b"\x06\x00\x00\x00"), replace(SOME, seq_id=6, block_ids=(7,))
    line.send(other, replace(SOME, mask=first))
    going = replace(other, token_ids=(20,), start=3, samples=(SampleSpec(0, 1),))
    rows = line.send(replace(GOING, mask=KnownMask(b"\x01\x00\x00\x80")), going).rows
    assert {type(row) for row in rows} == {Going}
    assert line.send(replace(GOING, start=4, samples=(SampleSpec(0, 2),))).masks == ()


def test_a_mask_for_a_row_that_is_not_there_is_refused():
    line = Line()
    line.send(SOME)
    with pytest.raises(MessageError, match="a mask for row 1 of 1"):
        line.decoder.read(StepMessage(2, (Going(0),), masks=((1, b""),)))


def test_chunks_of_a_prompt_carry_their_tokens_and_no_more():
    line = Line()
    first = replace(SOME, token_ids=(11,), samples=())
    second = replace(SOME, token_ids=(12,), start=1, samples=())
    last = replace(SOME, token_ids=(13,), start=2, block_ids=(4, 9))
    (row,) = line.send(first).rows
    assert isinstance(row, Full)
    assert line.send(second).rows == (Chunk(0, (12,)),)
    assert line.send(last).rows == (Chunk(0, (13,), (9,), (0,)),)
    assert line.send(replace(GOING, block_ids=(4, 9))).rows == (Going(0),)


def test_tokens_that_a_draw_reads_are_sent_once_where_their_kv_was_found():
    line = Line()
    prompt = (9, 10, 11, 12, 13)
    found = replace(
        SOME,
        start=2,
        prompt_tokens=5,
        sampling=PENALIZED,
        block_ids=(1, 2),
        known=KnownTokens(prompt, ()),
    )
    (row,) = line.send(found).rows
    assert isinstance(row, Full)
    assert row.before == (9, 10)
    decode = replace(
        found,
        token_ids=(20,),
        start=5,
        samples=(SampleSpec(0, 1),),
        known=KnownTokens(prompt, (20,)),
    )
    assert line.send(decode).rows == (Going(0),)


def test_tokens_that_nobody_read_are_sent_when_somebody_does():
    line = Line()
    found = replace(
        SOME, start=2, prompt_tokens=6, block_ids=(1, 2), samples=(), sampling=PENALIZED
    )
    (row,) = line.send(found).rows
    assert isinstance(row, Full)
    assert row.before is None
    last = replace(
        found,
        token_ids=(14,),
        start=5,
        samples=(SampleSpec(0, 0),),
        known=KnownTokens((9, 10, 11, 12, 13, 14), ()),
    )
    (row,) = line.send(last).rows
    assert isinstance(row, Full)
    assert row.before == (9, 10, 11, 12, 13)


def test_the_longest_unused_slot_goes_first_and_its_sequence_is_told_again():
    line = Line(slots=2)
    a, b, c = (replace(SOME, seq_id=i) for i in range(3))
    line.send(a)
    line.send(b)
    assert line.send(replace(GOING, seq_id=0)).rows == (Going(0),)
    (row,) = line.send(c).rows
    assert row.slot == 1
    assert line.send(replace(GOING, seq_id=2)).rows == (Going(1),)
    (row,) = line.send(replace(GOING, seq_id=1)).rows
    assert isinstance(row, Full)
    assert row.slot == 0


def test_who_is_in_a_step_keeps_its_slot_in_it():
    line = Line(slots=2)
    line.send(replace(SOME, seq_id=0))
    line.send(replace(SOME, seq_id=1))
    rows = line.send(replace(SOME, seq_id=2), replace(GOING, seq_id=0)).rows
    assert [type(row) for row in rows] == [Full, Going]


def test_an_engine_that_says_nothing_of_draws_sends_more_and_nothing_wrong():
    line = Line()
    line.encoder.drawn = lambda step, output: None  # pyright: ignore
    line.send(SOME)
    (row,) = line.send(GOING).rows
    assert isinstance(row, Full)


def test_a_step_that_is_too_long_is_not_sent_and_all_are_told_anew(
    monkeypatch: pytest.MonkeyPatch,
):
    line = Line()
    line.send(SOME)
    with monkeypatch.context() as patch:
        patch.setattr(step_messages, "MAX_STEP_BYTES", 60)
        with pytest.raises(MessageError, match=r"step 7 takes \d+ bytes, 60 are allowed"):
            line.encoder.encode(StepInput(7, (replace(SOME, seq_id=6),)))
    (row,) = line.send(GOING).rows
    assert isinstance(row, Full)


@pytest.mark.parametrize("encoded", [b"", b"\x93\x01", encode_output(StepOutput({}, {}))])
def test_what_is_no_step_is_refused(encoded: bytes):
    with pytest.raises(MessageError, match="not a step of this version"):
        decode_step(encoded)


@pytest.mark.parametrize("rows", [(Going(0),), (Chunk(3, (1,)),)])
def test_a_slot_that_holds_nothing_is_refused(rows: tuple[Going | Chunk, ...]):
    with pytest.raises(MessageError, match=r"slot \d holds no sequence"):
        Line().decoder.read(StepMessage(1, rows))


def test_a_slot_that_there_is_not_is_refused():
    line = Line(slots=4)
    row = decode_step(StepEncoder(8).encode(StepInput(1, (SOME,)))).rows[0]
    assert isinstance(row, Full)
    outside = Full(**{f: getattr(row, f) for f in row.__struct_fields__} | {"slot": 4})
    with pytest.raises(MessageError, match="slot 4 of 4"):
        line.decoder.read(StepMessage(1, (outside,)))


def test_what_is_longer_than_allowed_is_not_looked_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_messages, "MAX_STEP_BYTES", 3)
    monkeypatch.setattr(step_messages, "MAX_OUTPUT_BYTES", 3)
    with pytest.raises(MessageError, match="a step takes 4 bytes"):
        decode_step(bytes(4))
    with pytest.raises(MessageError, match="what came of a step takes 4 bytes"):
        decode_output(bytes(4))


_logprobs = st.builds(
    TokenLogprob,
    st.integers(0, 1 << 20),
    st.floats(allow_nan=False),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.floats(allow_nan=False)), max_size=3).map(tuple),
    st.integers(0, 1 << 20),
)
_samples = st.lists(
    st.builds(SampledToken, st.integers(0, 1 << 20), st.none() | _logprobs), min_size=1, max_size=3
).map(tuple)


@given(
    st.builds(
        StepOutput,
        st.dictionaries(st.integers(0, 1 << 40), _samples, max_size=3),
        st.dictionaries(
            st.integers(0, 1 << 40), st.lists(_logprobs, max_size=3).map(tuple), max_size=2
        ),
        st.dictionaries(st.integers(0, 1 << 40), st.text(max_size=9), max_size=2),
    )
)
def test_an_output_comes_as_it_was(output: StepOutput):
    assert decode_output(encode_output(output)) == output

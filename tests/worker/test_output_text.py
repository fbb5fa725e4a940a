"""Text of a choice: whole characters only, cut at stop strings, the same at every replay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_worker.server.output_text import Detokenizer, OutputText

# Every single byte, and pieces that split characters in all places, as byte-level BPE does.
PIECES = [bytes([i]) for i in range(256)] + [
    piece
    for text in ("é", "中文", "😀 ok", "stop", "the end", "\n\n", " a", "\ufffd")
    for cut in range(1, len(text.encode()))
    for piece in (text.encode()[:cut], text.encode()[cut:])
]
SPECIAL = len(PIECES)
READABLE = "".join(("the end stop é中😀 ", "sstostop", "\n\n", "aXbXc"))


def decode(ids: Sequence[int]) -> str:
    return b"".join(PIECES[i] for i in ids if i != SPECIAL).decode("utf-8", "replace")


def machine(stop: Sequence[str] = (), min_tokens: int = 0) -> OutputText:
    return OutputText(Detokenizer(decode, frozenset({SPECIAL})), stop=stop, min_tokens=min_tokens)


any_ids = st.lists(st.integers(0, SPECIAL), max_size=60)


@st.composite
def cut_text(draw: st.DrawFn) -> list[int]:
    """Valid UTF-8 text in tokens cut anywhere, as far as the vocabulary has the pieces."""
    data = draw(st.text(alphabet="stop endé中😀X\n", max_size=40)).encode()
    ids: list[int] = []
    while data:
        fitting = [i for i, piece in enumerate(PIECES) if data.startswith(piece)]
        ids.append(draw(st.sampled_from(fitting)))
        data = data[len(PIECES[ids[-1]]) :]
    return ids


@given(any_ids | cut_text())
@settings(max_examples=150, deadline=None)
def test_all_pushes_together_are_the_whole_text(ids: list[int]) -> None:
    text = machine()
    assert "".join(map(text.push, ids)) + text.finish() == decode(ids)


@given(any_ids | cut_text())
@settings(max_examples=100, deadline=None)
def test_what_was_given_never_changes(ids: list[int]) -> None:
    text = machine()
    given_text = ""
    for k, token_id in enumerate(ids):
        given_text += text.push(token_id)
        for longer in (ids[: k + 1], ids):
            assert decode(longer).startswith(given_text)


@given(cut_text())
@settings(max_examples=100, deadline=None)
def test_no_half_character_is_shown_while_text_is_valid(ids: list[int]) -> None:
    text = machine()
    assert not any("\ufffd" in text.push(token_id) for token_id in ids)


@given(cut_text(), st.lists(st.text("stopX 中", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_a_stop_string_cuts_the_text_wherever_tokens_are_cut(
    ids: list[int], stops: list[str]
) -> None:
    text = machine(stops)
    shown, given_text = "", ""
    for token_id in ids:
        given_text += text.push(token_id)
        if text.stop_found is not None:
            break
        assert all(stop not in given_text for stop in stops)
        shown = given_text
    given_text += text.finish()
    assert given_text.startswith(shown)
    whole = decode(ids)
    assert whole.startswith(given_text)
    assert all(stop not in given_text for stop in stops)
    if text.stop_found is None:
        assert given_text == whole
    else:
        assert whole[len(given_text) :].startswith(text.stop_found)


@given(cut_text(), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_a_replay_of_the_first_ids_gives_the_same_text(ids: list[int], k: int) -> None:
    first, again = machine(["stop"]), machine(["stop"])
    assert list(map(first.push, ids))[:k] == list(map(again.push, ids[:k]))


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("abc", ["b"], "a"),
        ("abc", ["abc"], ""),
        ("abcabd", ["abd"], "abc"),
        ("aab", ["ab"], "a"),
        ("one two", ["two", "one"], ""),
        ("xstoy", ["stop"], "xstoy"),
        ("xsto", ["stop"], "xsto"),
        ("abcd", ["cd", "bcd"], "a"),
    ],
)
def test_the_first_stop_string_counts(text: str, stops: list[str], shown: str) -> None:
    one = machine(stops)
    given_text = "".join(one.push(byte) for byte in text.encode())
    assert given_text + one.finish() == shown


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none() -> None:
    one = machine(["stop"])
    assert [one.push(byte) for byte in b"a sto.stop!"] == [
        *("a", " ", "", "", "", "sto."),
        *("", "", "", "", ""),
    ]
    assert one.stop_found == "stop"
    assert one.finish() == ""


@pytest.mark.parametrize(("min_tokens", "shown"), [(0, "a"), (1, "a"), (2, "aXb"), (3, "aXb")])
def test_a_stop_string_counts_only_behind_min_tokens(min_tokens: int, shown: str) -> None:
    one = machine(["X"], min_tokens)
    text = "".join(one.push(byte) for byte in b"aXbXc")
    assert text == shown


def test_special_tokens_have_no_text_and_split_no_character() -> None:
    one = machine()
    first, second = "é".encode()
    assert [one.push(i) for i in (first, SPECIAL, second)] == ["", "", "é"]


def test_decoding_looks_at_a_bounded_window() -> None:
    lengths: list[int] = []

    def watching(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode(ids)

    for token_id in (ord("a"), 0xFF):
        text = Detokenizer(watching)
        for _ in range(500):
            text.push(token_id)
    assert max(lengths) <= 16

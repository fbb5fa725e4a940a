"""Text token by token, over tokenizers: byte-level, byte fallback, and one without a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.worker.test_runner_tokenizer import save
from xpyd_worker.runner.tokenizer import Tokenizer as Wrapper
from xpyd_worker.server.output_text import Detokenizer, OutputText
from xpyd_worker.server.service import ServedModel

# Emoji of several code points, combining marks, right to left, three and four bytes, a literal
# replacement character, spaces.
ALPHABET = "ab <>é\u0301\u0308中文😀👩\u200d👧🏽🇩🇪اب\u0e01\u0e33\n\ufffd\U0010ffff"
TEXTS = st.text(ALPHABET, max_size=30)


def byte_level(folder: Path) -> Wrapper:
    """Bytes, merges that cut characters in all places, special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges: list[tuple[str, str]] = []
    for text in ("中文", "😀a", " é", "👩\u200d👧"):
        chars = pre.pre_tokenize_str(text)[0][0]
        for left, right in zip(chars[::2], chars[1::2], strict=False):
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "<|end|>")])
    return save(folder, tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast"}, None)


def llama_2(folder: Path) -> Wrapper:
    """Pieces with byte fallback; the decoder takes one space from the beginning of a text."""
    names = ["<unk>", "\u2581", "\u2581a", "a", "b", "é", "中", "<", ">", "\n"]
    names += [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(
        models.BPE({n: i for i, n in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    return save(folder, tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast"}, None)


def words(folder: Path) -> Wrapper:
    """Whole words and no decoder: a space goes between any two tokens."""
    names = ["<unk>", "one", "two", "three"]
    tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    return save(folder, tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast"}, None)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wrapper]:
    makers = {"byte_level": byte_level, "llama_2": llama_2, "words": words}
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in makers.items()}


def machine(tokenizer: Wrapper, context: Sequence[int] = (), **options: bool) -> Detokenizer:
    """As the server makes it, behind `context`."""
    model = ServedModel(("m",), tokenizer, frozenset(), tokenizer.vocab_size, 100, 0)
    return model.detokenizer(context, **options)


def pieces(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """What each token gives, and the end."""
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@pytest.mark.parametrize("name", ["byte_level", "llama_2"])
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, before=TEXTS)
def test_text_comes_whole_and_no_character_is_ever_split(
    tokenizers: dict[str, Wrapper], name: str, text: str, before: str
) -> None:
    tokenizer = tokenizers[name]
    context = tokenizer.encode(f"{before}a", add_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = pieces(machine(tokenizer, context), ids)
    assert "".join(found) == text
    seen = ""
    for piece in found[:-1]:
        seen += piece
        assert text.startswith(seen)
    # Held back is nothing but the beginning of one character, or of literal U+FFFD.
    assert not found[-1].strip("\ufffd")


@pytest.mark.parametrize("name", ["byte_level", "llama_2"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_ids_give_the_text_of_their_bytes(
    tokenizers: dict[str, Wrapper], name: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[name]
    some = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    # Bytes above 0x7F often, or nearly nothing is half a character.
    high = [i for i in some if tokenizer.token_bytes(i)[0] > 0x7F]
    ids = data.draw(st.lists(st.sampled_from(some) | st.sampled_from(high), max_size=50))
    context = tokenizer.encode("a", add_special_tokens=False)
    found = pieces(machine(tokenizer, context), ids)
    expected = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    assert "".join(found) == expected
    k = data.draw(st.integers(0, len(ids)))
    assert pieces(machine(tokenizer, context), ids[:k])[:-1] == found[:k]


def test_valid_characters_in_a_run_of_bytes_are_shown_at_once_and_stay(
    tokenizers: dict[str, Wrapper],
) -> None:
    """The decoder itself shows the whole run as U+FFFD while its last character is not there."""
    tokenizer = tokenizers["llama_2"]
    byte = {b: i for i, b in tokenizer.byte_ids.items()}
    ids = [byte[b] for b in "é😀é".encode()]
    assert "\ufffd" * 3 in tokenizer.decode(ids[:3], skip_special_tokens=True)
    found = pieces(machine(tokenizer, [3]), ids)
    assert found == ["", "é", "", "", "", "😀", "", "é", ""]
    assert pieces(machine(tokenizer, [3]), [*ids[:3], 3, *ids[:2]]) == [
        *("", "é", "", "\ufffda", "", "é", "")
    ]


def test_the_first_token_keeps_its_space_behind_a_prompt(tokenizers: dict[str, Wrapper]) -> None:
    tokenizer = tokenizers["llama_2"]
    assert pieces(machine(tokenizer, [3]), [2, 2]) == [" a", " a", ""]
    assert pieces(machine(tokenizer), [2, 2]) == ["a", " a", ""]
    assert pieces(machine(tokenizers["words"], [1]), [2, 3]) == [" two", " three", ""]


def test_half_a_character_of_the_prompt_is_left_alone(tokenizers: dict[str, Wrapper]) -> None:
    tokenizer = tokenizers["byte_level"]
    half = [tokenizer.encode(c, add_special_tokens=False)[0] for c in "é"]
    found = pieces(machine(tokenizer, half), tokenizer.encode("ab", add_special_tokens=False))
    assert found == ["a", "b", ""]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, " two three"),
        ({"skip_special_tokens": False}, " two <s> </s> <s> three </s>"),
        (
            {"skip_special_tokens": False, "spaces_between_special_tokens": False},
            " two <s></s><s> three </s>",
        ),
        ({"spaces_between_special_tokens": False}, " two three"),
    ],
)
def test_special_tokens_are_shown_and_joined_as_asked(
    tokenizers: dict[str, Wrapper], options: dict[str, bool], text: str
) -> None:
    tokenizer = tokenizers["words"]
    start, end = sorted(tokenizer.special_ids)
    ids = [2, start, end, start, 3, end]
    assert "".join(pieces(machine(tokenizer, [1], **options), ids)) == text


def test_special_tokens_between_bytes_split_no_text(tokenizers: dict[str, Wrapper]) -> None:
    tokenizer = tokenizers["llama_2"]
    byte = {b: i for i, b in tokenizer.byte_ids.items()}
    special = min(tokenizer.special_ids)
    first, second = (byte[b] for b in "é".encode())
    assert pieces(machine(tokenizer, [3]), [first, special, second]) == ["", "", "é", ""]
    shown = machine(tokenizer, [3], skip_special_tokens=False)
    assert "".join(pieces(shown, [first, special, 3])) == "\ufffd<s>a"


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.lists(st.text("ab é中", min_size=1, max_size=3), min_size=1, max_size=3))
def test_with_its_stop_string_a_text_is_longer_by_that_alone(text: str, stops: list[str]) -> None:
    """A byte at a time: the first stop string to be complete is the same with and without."""

    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    without = OutputText(Detokenizer(decode), stop=stops)
    within = OutputText(Detokenizer(decode), stop=stops, include_stop=True)
    data = text.encode()
    cut = "".join(map(without.push, data)) + without.finish()
    kept = "".join(map(within.push, data)) + within.finish()
    assert within.stop_found == without.stop_found
    assert kept == cut + (without.stop_found or "")


def test_a_text_that_includes_its_stop_string_is_not_held_back() -> None:
    text = OutputText(
        Detokenizer(lambda ids: bytes(ids).decode()), stop=["stop"], include_stop=True
    )
    assert [text.push(byte) for byte in b"a stostop."] == [*"a stostop", ""]

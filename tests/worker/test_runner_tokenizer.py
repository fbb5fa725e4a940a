"""The tokenizer's wrapper, over tokenizers made here: byte-level, and pieces with byte fallback."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from xpyd_core.errors import UserError
from xpyd_worker.runner.tokenizer import Tokenizer as Wrapper

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXTS = ["hello world", " x\ny\t", "naïve café", "日本語 🎉", "a<|end|>b", ""]


def byte_level(folder: Path, *, template: str | None = TEMPLATE) -> Wrapper:
    """A byte-level vocabulary with one merge, a BOS, special and plain additions."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate([*alphabet, "he"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "<|end|>")])
    tokenizer.add_tokens([AddedToken("<plain é>", special=False)])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    # Stored limits must not cut or pad what is served.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50, pad_id=257, pad_token="<s>")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    return save(folder, tokenizer, config, template)


def byte_fallback(folder: Path) -> Wrapper:
    """A vocabulary of pieces as SentencePiece has: U+2581 for a space, <0xAB> for other bytes."""
    names = ["<unk>", "\u2581", "\u2581hello", *(f"<0x{byte:02X}>" for byte in range(256)), "o"]
    names += ["xyz41>", "<0x41)", "<0xZZ>"]  # no bytes, though half of them looks so
    tokenizer = Tokenizer(
        models.BPE({n: i for i, n in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return save(folder, tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast"}, None)


def save(
    folder: Path, tokenizer: Tokenizer, config: dict[str, str], template: str | None
) -> Wrapper:
    """Write a checkpoint's tokenizer files and load them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Wrapper.load(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Wrapper:
    return byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_and_the_bytes_of_the_tokens_are_its_bytes(
    text: str, tokenizer: Wrapper
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


def test_special_tokens_are_added_and_left_out_on_request(tokenizer: Wrapper) -> None:
    plain = tokenizer.encode("hey", add_special_tokens=False)
    ids = tokenizer.encode("hey", add_special_tokens=True)
    assert ids == [257, *plain]
    assert plain[0] == 256
    assert tokenizer.decode([*ids, 258, 259], skip_special_tokens=False) == "<s>hey<|end|><plain é>"
    assert tokenizer.decode([*ids, 258, 259], skip_special_tokens=True) == "hey<plain é>"
    assert tokenizer.special_ids == {257, 258}
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (258, 260)


def test_a_stored_length_limit_neither_cuts_nor_pads(tokenizer: Wrapper) -> None:
    assert len(tokenizer.encode("x" * 30, add_special_tokens=False)) == 30


def test_half_a_character_has_its_own_bytes(tokenizer: Wrapper) -> None:
    ids = tokenizer.encode("é", add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xc3", b"\xa9"]
    assert [tokenizer.token_text(i) for i in ids] == ["\ufffd", "\ufffd"]
    assert tokenizer.decode(ids[:1], skip_special_tokens=True) == "\ufffd"


def test_added_tokens_have_their_text_and_unknown_ids_none(tokenizer: Wrapper) -> None:
    assert tokenizer.token_bytes(259) == "<plain é>".encode()
    assert tokenizer.token_text(258) == "<|end|>"
    assert tokenizer.token_bytes(99_999) == b""
    assert tokenizer.decode([99_999], skip_special_tokens=True) == ""


def test_pieces_with_byte_fallback_have_their_bytes(tmp_path: Path) -> None:
    tokenizer = byte_fallback(tmp_path)
    ids = tokenizer.encode(" é", add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b" ", b"\xc3", b"\xa9"]
    assert tokenizer.token_bytes(2) == b" hello"


def test_a_conversation_is_rendered_by_the_checkpoints_template(tokenizer: Wrapper) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.render_chat_template(messages, add_generation_prompt=True)
    assert text == "<|user|>hi<|end|><|assistant|>"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert 257 not in ids
    assert 258 in ids
    closed = tokenizer.render_chat_template(messages, add_generation_prompt=False)
    assert closed == "<|user|>hi<|end|>"


def test_a_conversation_that_the_template_refuses_is_the_users_error(
    tokenizer: Wrapper, tmp_path: Path
) -> None:
    assert tokenizer.has_chat_template
    with pytest.raises(UserError, match=r"messages: .*no tools here"):
        tokenizer.apply_chat_template(
            [{"role": "tool", "content": "x"}], add_generation_prompt=True
        )
    without = byte_level(tmp_path, template=None)
    assert not without.has_chat_template
    with pytest.raises(UserError, match=r"messages: .*no chat template"):
        without.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True)


def test_a_template_cannot_reach_into_python(tmp_path: Path) -> None:
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = byte_level(tmp_path, template=template)
    with pytest.raises(UserError, match="messages"):
        tokenizer.render_chat_template(
            [{"role": "user", "content": "x"}], add_generation_prompt=True
        )


def test_many_threads_may_encode_at_once(tokenizer: Wrapper) -> None:
    failures: list[BaseException] = []
    expected = tokenizer.encode("hello " * 200, add_special_tokens=True)

    def work() -> None:
        try:
            for _ in range(20):
                assert tokenizer.encode("hello " * 200, add_special_tokens=True) == expected
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("text", [None, "{", '{"version": "1.0"}'])
def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"model: .*tokenizer"):
        Wrapper.load(tmp_path)


def test_only_pieces_that_are_a_byte_in_whole_count_as_bytes(tmp_path: Path) -> None:
    found = byte_fallback(tmp_path).byte_ids
    assert found == {3 + byte: byte for byte in range(256)}

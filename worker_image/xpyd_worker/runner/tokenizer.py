"""The one typed wrapper around a checkpoint's tokenizer and chat template.

Sits between the server (text) and the engine (token ids). It is the only module that may import
transformers, which is untyped and slow to import: hence the `Any` fields and the import inside
`load`. It must not know requests or streams. Methods keep no state and may run in any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from xpyd_core.errors import UserError

# The library's calls for one text hold Python's lock to their end, 0.7 s for a megabyte, in which
# neither the engine nor HTTP would run; those for batches let it go, but have threads of their own.
_LONG_CHARACTERS = 4096
_LONG_TOKENS = 4096


def _byte_of_char() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table): printable
    bytes stand for themselves, the others are moved up from code point 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    moved = [byte for byte in range(256) if chr(byte) not in table]
    table.update({chr(256 + index): byte for index, byte in enumerate(moved)})
    return table


def _fallback_byte(piece: str) -> int | None:
    """The byte of a piece like `<0xE4>`, which sentencepiece vocabularies fall back to."""
    if len(piece) != 6 or not (piece.startswith("<0x") and piece.endswith(">")):
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None


def _decoder_types(node: object) -> set[str]:
    """The `type`s of a decoder of tokenizer.json, those inside a Sequence included."""
    if not isinstance(node, dict):
        return set()
    decoder = cast("dict[str, Any]", node)
    types = {str(decoder.get("type"))}
    for child in decoder.get("decoders") or ():
        types |= _decoder_types(child)
    return types


def import_library() -> Any:  # noqa: ANN401 - transformers is untyped
    """The class of transformers that reads tokenizers."""
    # Not AutoTokenizer: it imports a thousand modules to find the class, which takes seconds,
    # and gives the same tokenizer where there is a tokenizer.json.
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


class Tokenizer:
    """Text to token ids and back, for one checkpoint. Immutable after `load`."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers is untyped
        """`tokenizer` is a transformers PreTrainedTokenizerFast; use `load`."""
        self._hf: Any = tokenizer
        # The Rust tokenizer itself: transformers' own `encode` sets padding on it at each call,
        # which raises "Already borrowed" when two threads do it.
        self._rust: Any = tokenizer.backend_tokenizer
        self._rust.no_truncation()
        self._rust.no_padding()
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        self._added_text = {int(i): str(token.content) for i, token in added.items()}
        special = {int(i) for i, token in added.items() if token.special}
        self.special_ids = frozenset(special | {int(i) for i in tokenizer.all_special_ids})
        """Ids that `decode(skip_special_tokens=True)` leaves out."""
        document = json.loads(self.to_json())
        decoders = _decoder_types(document.get("decoder"))
        byte_level = "ByteLevel" in decoders
        vocab: Mapping[str, int] = {}
        if "ByteFallback" in decoders:
            vocab = self._rust.get_vocab()
        self.byte_ids: Mapping[int, int] = {
            i: byte for piece, i in vocab.items() if (byte := _fallback_byte(piece)) is not None
        }
        """Ids that stand for one byte each, of a vocabulary whose other pieces are characters."""
        self._byte_of_char = _byte_of_char() if byte_level else None

    @classmethod
    def load(cls, folder: Path | str, *, chat_template: str | None = None) -> Tokenizer:
        """Read the tokenizer of the checkpoint in `folder`. No network, no code from the folder.
        `chat_template` takes the place of the checkpoint's.

        Raises UserError when there is no tokenizer.json or it cannot be read.
        """
        if not (Path(folder) / "tokenizer.json").exists():
            raise UserError(f"model: {folder} has no tokenizer.json, the only form supported")
        try:
            tokenizer = import_library().from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the Rust library raises plain Exception for a broken file
            raise UserError(f"model: cannot load the tokenizer in {folder}: {error}") from error
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        return cls(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, with the model's BOS (if it uses one) where asked."""
        if len(text) <= _LONG_CHARACTERS:
            encoding = self._rust.encode(text, add_special_tokens=add_special_tokens)
        else:
            # "fast": without the offsets, which are not read here.
            encode = self._rust.encode_batch_fast
            encoding = encode([text], add_special_tokens=add_special_tokens)[0]
        return cast("list[int]", encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `ids`; bytes that are no UTF-8 (yet) give U+FFFD. Spaces are not cleaned up, so
        that the text of a prefix is a prefix of the text (but for an unfinished character)."""
        if len(ids) <= _LONG_TOKENS:
            return str(self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens))
        decode = self._rust.decode_batch
        return str(decode([list(ids)], skip_special_tokens=skip_special_tokens)[0])

    def to_json(self) -> str:
        """What `encode` works with, as a tokenizer.json. Slow for a large vocabulary."""
        return str(self._rust.to_str())

    def token_piece(self, token_id: int) -> str:
        """How the vocabulary writes one token; of an id outside of it the empty text."""
        piece = self._added_text.get(token_id)
        if piece is None:
            piece = cast("str | None", self._rust.id_to_token(token_id))
        return piece or ""

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, special ones included; half a character gives U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token adds to the text; of an id outside the vocabulary none.

        Half a character of a byte-level vocabulary gives its own bytes.
        """
        piece = self._added_text.get(token_id)
        if piece is None:
            piece = cast("str | None", self._rust.id_to_token(token_id))
        if piece is None:
            return b""
        table = self._byte_of_char
        if table is not None:
            # As the Rust decoder: byte by byte where all characters stand for bytes, else as text.
            known = [table[char] for char in piece if char in table]
            return bytes(known) if len(known) == len(piece) else piece.encode()
        if token_id in self._added_text:
            return piece.encode()
        byte = _fallback_byte(piece)
        if byte is not None:
            return bytes((byte,))
        return piece.replace("\u2581", " ").encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        add_special_tokens: bool = False,
        **more: Any,  # noqa: ANN401 - see render_chat_template
    ) -> list[int]:
        """Token ids of a conversation in the checkpoint's own template, which brings its own BOS;
        `add_special_tokens` puts another before it. The rest as `render_chat_template`.

        Raises UserError naming `messages` when there is no template or it refuses the conversation.
        """
        text = self.render_chat_template(
            messages, add_generation_prompt=add_generation_prompt, **more
        )
        return self.encode(text, add_special_tokens=add_special_tokens)

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Text of a conversation in the checkpoint's template; raises as `apply_chat_template`.

        `continue_final_message`: the text ends with the last message's content, so that an answer
        goes on in it. `variables` are the template's own; names of arguments are not allowed.
        """
        if not self.has_chat_template:
            raise UserError("messages: this model has no chat template; use /v1/completions")
        try:
            text = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                documents=[dict(document) for document in documents] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except Exception as error:  # a template may raise whatever it likes
            raise UserError(f"messages: refused by the model's chat template: {error}") from error
        return str(text)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint brings a chat template."""
        return bool(self._hf.chat_template)

    @property
    def chat_templates(self) -> dict[str, str]:
        """The checkpoint's chat templates by name; one without a name is `default`."""
        found: Any = self._hf.chat_template
        if isinstance(found, str):
            return {"default": found} if found else {}
        return dict(cast("Mapping[str, str]", found or {}))

    @property
    def template_variables(self) -> dict[str, str]:
        """What templates know besides the conversation: `bos_token` and its like."""
        return dict(cast("Mapping[str, str]", self._hf.special_tokens_map))

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's own end-of-text id (ModelConfig.eos_token_ids are what ends a text)."""
        return cast("int | None", self._hf.eos_token_id)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included (the model's logits may have more)."""
        return len(self._hf)

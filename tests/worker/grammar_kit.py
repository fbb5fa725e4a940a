"""Small vocabularies for grammars, and matchers made as the server makes them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from xpyd_worker.grammar.compiler import GrammarCompiler, Target
from xpyd_worker.grammar.matcher import Matcher
from xpyd_worker.grammar.spec import Grammar, Part, Pattern, json_schema_part

EOS_TEXT = "<eos>"


def byte_char(byte: int) -> str:
    """How a byte-level vocabulary writes a byte (GPT-2's table)."""
    if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
        return chr(byte)
    moved = [b for b in range(256) if not (0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE)]
    return chr(256 + moved.index(byte))


def tokenizer_json(pieces: Sequence[str], special: Mapping[str, int]) -> str:
    """A byte-level tokenizer.json without merges: piece i is the text of token i."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    # Special ones, too: else the library gives them ids behind the others.
    vocab = {
        one if one in special else "".join(map(byte_char, one.encode("latin-1"))): i
        for i, one in enumerate(pieces)
    }
    added = [
        {
            "id": i,
            "content": text,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for text, i in special.items()
    ]
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {**level, "use_regex": False},
            "post_processor": None,
            "decoder": {**level, "use_regex": True},
            "model": {
                "type": "BPE",
                "vocab": vocab,
                "merges": [],
                **dict.fromkeys(("dropout", "unk_token"), None),
                **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"), None),
                **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
            },
        }
    )


@dataclass(frozen=True)
class Pieces:
    """A vocabulary: `pieces` by id, those in `special` are special tokens."""

    pieces: tuple[str, ...]
    special: tuple[str, ...] = (EOS_TEXT,)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(map(self.pieces.index, self.special))

    def to_json(self) -> str:
        return tokenizer_json(self.pieces, {one: self.pieces.index(one) for one in self.special})

    def token_piece(self, token_id: int) -> str:
        return self.pieces[token_id]

    def target(self, vocab_size: int = 0) -> Target:
        eos = frozenset({self.pieces.index(EOS_TEXT)})
        return Target(self, eos, vocab_size or len(self.pieces))

    def ids(self, *texts: str) -> list[int]:
        """Ids of special tokens, and of other texts character by character."""
        found: list[int] = []
        for text in texts:
            found += [self.pieces.index(one) for one in ([text] if text in self.special else text)]
        return found


BYTES = Pieces((*map(chr, range(256)), EOS_TEXT, "<think>", "</think>"), (EOS_TEXT, "</think>"))
"""Every byte, EOS, and a pair of marks of which only the second is a special token."""


def matchers_of(
    grammar: Grammar | Part, outputs: Sequence[Sequence[int]] = ((),), target: Target | None = None
) -> tuple[Matcher, ...]:
    """As the server makes them for one request."""
    asked = grammar if isinstance(grammar, Grammar) else Grammar(grammar)
    of = target or BYTES.target()
    return asyncio.run(compiler_of(of).matchers(asked, of, outputs))


@cache
def compiler_of(target: Target) -> GrammarCompiler:
    """One for all tests of a process: it reads the tokenizer once."""
    return GrammarCompiler()


def allowed_ids(words: bytes) -> list[int]:
    """The ids whose bits are set in a mask."""
    bits = np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")
    return bits.nonzero()[0].tolist()


# --- of the fake engine, whose tokens are 0 to 39 and whose EOS is 0

FORTY = Pieces((EOS_TEXT, *'{}[]",: 0123456789abcdefghijklmnopqrstu'))
_ITEMS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3}
GRAMMARS: tuple[Part, ...] = (
    Pattern("[a-h]{2,5}i?"),
    Pattern("(ab)*"),
    json_schema_part(
        {"properties": {"a": _ITEMS, "b": {"type": "boolean"}}, "type": "object"}, "x"
    ),
)


@cache
def start_of(grammar: Part) -> Matcher:
    """A matcher at the grammar's beginning, to be copied."""
    (matcher,) = matchers_of(grammar, target=FORTY.target())
    return matcher


def ids_within(rng: random.Random, matcher: Matcher) -> tuple[int, ...]:
    """Some ids that a choice may have put out; the matcher is then behind them."""
    found: list[int] = []
    while rng.random() < 0.5 and not matcher.is_finished:
        found.append(rng.choice(allowed_ids(matcher.mask().words())))
        assert matcher.accept(found[-1:])
    return tuple(found)

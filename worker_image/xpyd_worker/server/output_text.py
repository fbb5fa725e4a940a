"""Text of one choice, token by token: a pure function of its ids and its stop strings.

    OutputText.push(id) -> text that will not change any more     OutputText.finish() -> the rest

P, D and a continuation replay the same ids and get the same text at every position, so that D goes
on exactly where P's text ended. Held back are half characters and possible beginnings of a stop
string. It knows no request and no stream.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence

REPLACEMENT = "\ufffd"
_UTF_8 = codecs.getincrementaldecoder("utf-8")
# Half of a 4-byte character shows as at most three replacement characters.
_MAX_HALF_CHARACTERS = 3
# Tokens that stay in the window when it is cut: some of them are whole characters, which keeps
# decoders that treat the first token differently (a leading space) away from the new text.
_KEEP_TOKENS = 6
_WINDOW_TOKENS = 16


class Detokenizer:
    """Ids to text without splitting a character. Decodes a window of bounded length per token."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        special_ids: frozenset[int] = frozenset(),
        *,
        byte_ids: Mapping[int, int] | None = None,
        joined: Mapping[int, str] | None = None,
        context: Sequence[int] = (),
    ) -> None:
        """`decode` turns ids into text; `special_ids` have none.

        `byte_ids` (of vocabularies that fall back to bytes): the byte of each id that is one.
        `joined`: text of the ids that follow one another without what `decode` puts between.
        `context`: the ids before the text; some decoders take the space from what comes first.
        """
        self._decode = decode
        self._special_ids = special_ids
        self._byte_ids: Mapping[int, int] = byte_ids or {}
        self._joined: Mapping[int, str] = joined or {}
        self._was_joined = False
        # Reads a run of bytes: `decode` shows a whole run as U+FFFD while its end is half a
        # character. None outside of one.
        self._bytes: codecs.IncrementalDecoder | None = None
        self._window = [i for i in context[-_WINDOW_TOKENS:] if i not in special_ids][
            -_KEEP_TOKENS:
        ]
        if self._window and decode(self._window).endswith(REPLACEMENT):
            self._window = []  # half a character of the prompt
        # Characters of the window's text that were handed out.
        self._given = len(decode(self._window)) if self._window else 0

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        if token_id in self._special_ids:
            return ""
        if token_id in self._byte_ids:
            return self._push_byte(token_id)
        rest = self._end_bytes()
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = len(text) - _half_characters(text)
        new = text[self._given : stable]
        self._given = max(self._given, stable)
        if len(self._window) >= _WINDOW_TOKENS:
            self._cut(len(text) - self._given)
        alone = self._joined.get(token_id)
        if alone is not None and self._was_joined:
            new = alone
        self._was_joined = alone is not None
        return rest + new

    def finish(self) -> str:
        """What was held back: half a character shows as U+FFFD."""
        if self._bytes is not None:
            return self._end_bytes()
        return self._held()

    def _held(self) -> str:
        new = self._decode(self._window)[self._given :]
        self._given += len(new)
        return new

    def _push_byte(self, token_id: int) -> str:
        before = ""
        if self._bytes is None:
            before = self._held()
            self._bytes = _UTF_8(errors="replace")
        self._was_joined = False
        self._window.append(token_id)
        del self._window[:-_WINDOW_TOKENS]
        return before + self._bytes.decode(bytes((self._byte_ids[token_id],)))

    def _end_bytes(self) -> str:
        """Half a character at the end of a run of bytes stays one."""
        if self._bytes is None:
            return ""
        rest = self._bytes.decode(b"", final=True)
        self._bytes = None
        self._given = len(self._decode(self._window))
        return rest

    def _cut(self, held: int) -> None:
        """Drop the window's first tokens; `held` characters at its end are still to be given."""
        del self._window[:-_KEEP_TOKENS]
        self._given = len(self._decode(self._window)) - held


def _half_characters(text: str) -> int:
    """How many characters at the end may still become another one."""
    half = len(text) - len(text.rstrip(REPLACEMENT))
    return min(half, _MAX_HALF_CHARACTERS)


class OutputText:
    """The text of one choice up to its first stop string, which is cut off, or with `include_stop`
    is its end.

    A stop string counts once more than `min_tokens` tokens are out, as in vLLM.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._tokens = 0
        # Text that may be the beginning of a stop string: held back, unless it is part of the text.
        self._pending = ""
        self.stop_found: str | None = None
        """The stop string that ended the text."""

    def push(self, token_id: int) -> str:
        """Take the next token; the text that is certain now. "" behind a stop string."""
        if self.stop_found is not None:
            return ""
        self._tokens += 1
        return self._take(self._detokenizer.push(token_id), last=False)

    def finish(self) -> str:
        """The choice has ended: all that was held back."""
        if self.stop_found is not None:
            return ""
        return self._take(self._detokenizer.finish(), last=True)

    def _take(self, new: str, *, last: bool) -> str:
        if not self._stop:
            return new
        old = len(self._pending)
        text = self._pending + new
        given = old if self._include_stop else 0
        cut = self._find_stop(text, old) if self._tokens > self._min_tokens else None
        if cut is not None:
            self._pending = ""
            return text[given:cut]
        held = 0 if last else _beginning_at_end(text, self._stop)
        self._pending = text[len(text) - held :]
        return text[given:] if self._include_stop else text[: len(text) - held]

    def _find_stop(self, text: str, old: int) -> int | None:
        """Where the text ends by the first stop string that ends behind the first `old` characters:
        before it, or behind it with include_stop."""
        found = [(text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self._stop]
        found = [(at, stop) for at, stop in found if at >= 0]
        if not found:
            return None
        at, self.stop_found = min(found, key=lambda pair: pair[0])
        return at + len(self.stop_found) if self._include_stop else at


def _beginning_at_end(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that some stop string begins with, but does not equal."""
    longest = min(len(text), max(map(len, stops)) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(len(stop) > length and stop.startswith(end) for stop in stops):
            return length
    return 0

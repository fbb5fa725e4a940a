"""Token counts of a whole answer, or of a stream's last chunk: not all is read as JSON. Pure."""

from __future__ import annotations

import re

_PROMPT = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,12})\b')
_OUTPUT = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,12})\b')


def tokens_in(body: bytes) -> tuple[int | None, int | None]:
    """Tokens of prompt and output in an OpenAI answer; None for what it does not say.

    Inside a JSON string the quotes would be escaped: what is found is a key.
    """
    start = body.rfind(b'"usage"')
    if start < 0:
        return None, None
    prompt, output = _PROMPT.search(body, start), _OUTPUT.search(body, start)
    return int(prompt[1]) if prompt else None, int(output[1]) if output else None

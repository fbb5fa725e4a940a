"""The progress bar of `LLM.generate`: finished prompts, and tokens per second so far."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

from xpyd_worker.offline.outputs import RequestOutput


class Progress:
    """A bar on standard error while the block runs; nothing where it is not `shown`."""

    def __init__(self, prompts: int, *, shown: bool) -> None:
        self._bar = tqdm(total=prompts, desc="Processed prompts", disable=not shown)
        self._start_s = time.perf_counter()
        self._input_tokens = 0
        self._output_tokens = 0

    def __enter__(self) -> Self:
        return self

    def done(self, output: RequestOutput) -> None:
        """One prompt has ended."""
        self._input_tokens += len(output.prompt_token_ids)
        self._output_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        seconds = max(1e-9, time.perf_counter() - self._start_s)
        rates = (
            f"input {self._input_tokens / seconds:.1f} tok/s, "
            f"output {self._output_tokens / seconds:.1f} tok/s"
        )
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

"""transformers' `generate` as a contender: a process that reads batches and writes their times.

python -m bench.engine.reference FOLDER THREADS DTYPE
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.engine.contender import ROOT, ContenderFailed, check, requests_of
from bench.engine.shape import Case
from bench.process import Processes
from xpyd_tools.bench.summary import Sample


class Reference(Processes):
    """The process, from the outside."""

    def run(self, case: Case, seed: int, rate: float = 0.0) -> list[Sample]:
        """See Contender: batches of the case's concurrency, one after the other, at no rate."""
        del rate
        requests = requests_of(case, seed)
        samples: list[Sample] = []
        for at in range(0, len(requests), case.concurrency):
            prompts = [request.prompt for request in requests[at : at + case.concurrency]]
            samples += self._batch(prompts, case)
        for sample in samples:
            check("transformers", case, sample)
        return samples

    def _batch(self, prompts: list[Any], case: Case) -> list[Sample]:
        sent_s = time.perf_counter()
        stamps = self.request({"prompts": prompts, "output_tokens": case.output_tokens})["stamps"]
        gaps = tuple(after - before for before, after in pairwise(stamps))
        return [
            Sample(
                sent_s,
                ttft_s=stamps[0],
                gaps_s=gaps,
                e2e_s=stamps[-1],
                input_tokens=case.input_tokens,
                output_tokens=len(stamps),
            )
            for _ in prompts
        ]

    def request(self, question: dict[str, Any]) -> dict[str, Any]:
        """One line there, one line back. ContenderFailed when it has ended."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = b""
        if not line:
            raise ContenderFailed(f"transformers ended: {self.complaint()}")
        return json.loads(line)


@contextmanager
def referenced(
    folder: Path, log: Path, threads: int, cores: str, dtype: str
) -> Iterator[Reference]:
    """The process while the block runs, its model loaded. ContenderFailed."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [
                *("taskset", "-c", cores, sys.executable, "-m", __name__),
                *(str(folder), str(threads), dtype),
            ],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
            cwd=ROOT,
        )
    reference = Reference(process, log)
    try:
        reference.request({"prompts": [[300] * 8], "output_tokens": 2})
        yield reference
    finally:
        reference.end()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def main(folder: str, threads: int, dtype: str) -> None:
    """The process, from the inside."""
    import torch
    from transformers import AutoModelForCausalLM, LogitsProcessorList

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    stamps: list[float] = []

    def stamp(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        stamps.append(time.perf_counter())
        return scores

    for line in sys.stdin:
        question = json.loads(line)
        ids = torch.tensor(question["prompts"])
        stamps.clear()
        start_s = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=question["output_tokens"],
            max_new_tokens=question["output_tokens"],
            logits_processor=LogitsProcessorList([stamp]),
        )
        answer = {"stamps": [at - start_s for at in stamps]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

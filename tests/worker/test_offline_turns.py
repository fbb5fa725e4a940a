"""Many threads may call one LLM at once: the bounds of engine and text threads hold for all."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from tests.worker.server_fakes import VOCAB, ByteTokenizer
from xpyd_worker import LLM, SamplingParams
from xpyd_worker.engine.request import EngineRequest
from xpyd_worker.offline.requests import CompletionPrompt, Turns, prepare
from xpyd_worker.server.bridge import EngineBridge, RequestMetrics
from xpyd_worker.server.service import InstanceInfo, ServedModel, Service

MODEL = Path(__file__).parents[2] / "examples/demo-model"


def test_calls_from_many_threads_stay_within_the_engines_bound_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most_open = 0
    submit = EngineBridge.submit

    def counted(self: EngineBridge, request: EngineRequest, mailbox: Any) -> Any:
        nonlocal most_open
        times = submit(self, request, mailbox)
        most_open = max(most_open, self.open_requests)
        return times

    monkeypatch.setattr(EngineBridge, "submit", counted)
    callers, together = 6, Barrier(6)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    small: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "16Mi", "threads": 1}
    with (
        LLM(MODEL, max_model_len=64, max_num_seqs=1, **small) as llm,
        ThreadPoolExecutor(callers) as pool,
    ):

        def call(caller: int) -> list[str | None]:
            together.wait(30)
            prompts = [f"{caller} {n}" for n in range(4)]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
            return [output.prompt for output in outputs]

        found = list(pool.map(call, range(callers)))
    assert found == [[f"{caller} {n}" for n in range(4)] for caller in range(callers)]
    # As many as run, and as many again that wait.
    assert most_open == 2


def test_long_texts_of_more_calls_than_may_wait_for_a_thread_are_all_encoded() -> None:
    async def test() -> None:
        model = ServedModel(("m",), ByteTokenizer(), frozenset(), VOCAB, 10_000, 0)
        bridge = EngineBridge(RequestMetrics())
        service, turns = Service(model, InstanceInfo("Aggregated", "inc"), bridge), Turns(4)
        try:
            prompts = [CompletionPrompt("x" * 5000)]
            found = await asyncio.gather(
                *(
                    prepare(service, prompts, [SamplingParams()], [0], turns=turns)
                    for _ in range(100)
                )
            )
        finally:
            service.threads.close()
        assert [len(request.job.request.prompt) for (request,) in found] == [5000] * 100

    asyncio.run(test())

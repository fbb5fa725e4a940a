"""`LLM`: a checkpoint, prompts in, texts out. The user's thread; the engine runs in the session's.

Prompts are checked and tokenized before the first of them is computed, so that what is wrong with
one is said at once.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import msgspec
from tqdm import tqdm

from xpyd_core.blocks import DEFAULT_BLOCK_SIZE
from xpyd_core.cli import parse_flag
from xpyd_core.errors import UserError
from xpyd_core.parallel.partition import PARTITION_VARIABLE, parse_override
from xpyd_core.sizes import parse_bytes
from xpyd_worker.config import WorkerConfig
from xpyd_worker.config_check import check_config
from xpyd_worker.engine.request import Policy
from xpyd_worker.flags import engine_fields
from xpyd_worker.offline.outputs import RequestOutput
from xpyd_worker.offline.requests import (
    Chat,
    CompletionPrompt,
    TextPrompt,
    TokensPrompt,
    Turns,
    prepare,
    run_all,
)
from xpyd_worker.offline.sampling import SamplingParams, as_json, default_params
from xpyd_worker.offline.session import Session
from xpyd_worker.server.openai.params import parse_chat
from xpyd_worker.server.service import Service

Prompt = str | TextPrompt | TokensPrompt
Message = Mapping[str, Any]


class LLM:
    """One engine in this process; with several ranks, each of them in a process of its own.

    The arguments are the flags of `xpyd worker` (docs/engine.md, Flags), sizes in bytes or as text
    ("4Gi"). `seed` makes runs repeatable whose SamplingParams have none. Raises UserError that
    names the flag or the checkpoint's field and the fix, and RankLostError where a rank ends while
    it starts.

    The engine's threads, ranks and memory live until `close`, the end of a `with` block, the
    object's collection as garbage or the interpreter's exit, whichever comes first; ranks end with
    the process, however that ends.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        enable_eplb: bool = False,
        eplb_config: Mapping[str, Any] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        long_prefill_token_threshold: int = 0,
        scheduling_policy: Policy = "fcfs",
        speculative_config: Mapping[str, Any] | None = None,
        kv_cache_memory: int | str | None = None,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        disable_custom_all_reduce: bool = False,
        block_size: int = DEFAULT_BLOCK_SIZE,
        enable_prefix_caching: bool = True,
        threads: int | None = None,
        seed: int | None = None,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        # The arguments by their names, which are those of the flags (flags.py).
        given = locals()
        size = kv_cache_memory
        if isinstance(size, str):
            size = parse_flag("kv_cache_memory", parse_bytes, size)
        config = WorkerConfig(
            **engine_fields({**given, "model": str(model), "kv_cache_memory": size}),
            layer_partition=_layer_partition(pipeline_parallel_size),
            # Nobody waits for a token here.
            latency_goal="ttft",
        )
        check_config(config)
        # As many as can run, and as many again, so that the scheduler never wants for one.
        self._turns = Turns(2 * max_num_seqs)
        self._session = Session(config)
        self._end = weakref.finalize(self, self._session.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: a text, `{"prompt": text}` or `{"prompt_token_ids": ids}`.

        One SamplingParams for all or one for each; None: get_default_sampling_params(). The outputs
        are in the prompts' order. `use_tqdm`: a progress bar on standard error. `priority`: one for
        each, the lower the earlier, where scheduling_policy is "priority". Raises UserError for a
        prompt that does not fit the model, before anything is computed; RankLostError where a rank
        has ended, also for every call after that.
        """
        given = [prompts] if isinstance(prompts, str | Mapping) else prompts
        return self._run(
            [_completion_prompt(one, index) for index, one in enumerate(given)],
            sampling_params,
            use_tqdm=use_tqdm,
            priority=priority,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The assistant's answer to one conversation or to each of several, in the checkpoint's
        chat template. Messages and what else the template gets are those of the HTTP API; the rest
        as in `generate`. The text is as the model wrote it: calls and reasoning are not parted."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if one else messages
        each = enumerate(cast("Sequence[Sequence[object]]", conversations))
        templated = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": as_json(tools, "tools"),
            "chat_template_kwargs": as_json(chat_template_kwargs, "chat_template_kwargs"),
        }
        prompts = [_conversation(one, index, templated) for index, one in each]
        return self._run(prompts, sampling_params, use_tqdm=use_tqdm)

    def _run(
        self,
        prompts: Sequence[CompletionPrompt | Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _for_each(sampling_params, len(prompts))
        ranks = [0] * len(prompts) if priority is None else list(priority)
        if len(ranks) != len(prompts):
            raise UserError(
                f"priority: expected as many as prompts ({len(prompts)}), got {len(ranks)}"
            )

        turns = self._turns

        async def work(service: Service) -> list[RequestOutput]:
            requests = await prepare(service, prompts, params, ranks, turns=turns)
            with Progress(len(requests), shown=use_tqdm) as progress:
                return await run_all(service, requests, turns=turns, done=progress.done)

        return self._session.run(work)

    def get_default_sampling_params(self) -> SamplingParams:
        """What calls without sampling parameters take: the checkpoint's generation_config.json, as
        generation_config and override_generation_config say."""
        return default_params(self._session.defaults)

    def close(self) -> None:
        """End the engine and free its memory. May be called again."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _layer_partition(stages: int) -> tuple[int, ...]:
    """Layers of each; of one stage there is nothing to override."""
    return parse_override(os.environ.get(PARTITION_VARIABLE, "")) if stages > 1 else ()


def _completion_prompt(prompt: Prompt, index: int) -> CompletionPrompt:
    if isinstance(prompt, str):
        return CompletionPrompt(prompt)
    if isinstance(prompt, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's
        members = cast("Mapping[str, Any]", prompt)
        if set(members) == {"prompt"} and isinstance(members["prompt"], str):
            return CompletionPrompt(members["prompt"])
        if set(members) == {"prompt_token_ids"}:
            return CompletionPrompt(None, tuple(members["prompt_token_ids"]))
    raise UserError(
        f'prompts[{index}]: expected a text, {{"prompt": text}} or {{"prompt_token_ids": ids}}'
    )


def _conversation(messages: Sequence[object], index: int, templated: Mapping[str, object]) -> Chat:
    found: list[object] = []
    try:
        for place, message in enumerate(messages):
            if isinstance(message, Mapping):
                members = cast("Mapping[str, object]", message).items()
                found.append({k: as_json(v, f"messages[{place}].{k}") for k, v in members})
            else:
                found.append(as_json(message, f"messages[{place}]"))
    except UserError as error:
        raise UserError(f"prompts[{index}]: {error}") from error
    return Chat(parse_chat(msgspec.json.encode({"messages": found, **templated})).conversation)


def _for_each(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise UserError(
            f"sampling_params: expected one or as many as prompts ({count}), got {len(params)}"
        )
    return params


class Progress:
    """A bar on standard error while the block runs, with finished prompts and tokens per second so
    far; nothing where it is not `shown`."""

    def __init__(self, prompts: int, *, shown: bool) -> None:
        self._bar = tqdm(total=prompts, desc="Processed prompts", disable=not shown)
        self._start_s = time.perf_counter()
        self._input_tokens = 0
        self._output_tokens = 0

    def __enter__(self) -> Self:
        return self

    def done(self, output: RequestOutput) -> None:
        """Count a prompt that has ended."""
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

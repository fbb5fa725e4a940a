"""`LLM.generate` and `LLM.chat`: the engine without HTTP, on the demo model."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import xpyd_worker
from xpyd_core.errors import UserError
from xpyd_worker import LLM, RequestOutput, SamplingParams
from xpyd_worker.config import WorkerConfig

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/demo-model"
GREEDY = SamplingParams(temperature=0, max_tokens=10)


def make_llm(**options: object) -> LLM:
    small = {"dtype": "float32", "kv_cache_memory": "16Mi", "threads": 1, "max_model_len": 256}
    return LLM(MODEL, **{**small, **options})  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm(seed=3) as made:
        yield made


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [choice.text for output in outputs for choice in output.outputs]


def own_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in ("engine", "offline")]


def test_greedy_tokens_equal_transformers_and_come_in_the_prompts_order(llm: LLM) -> None:
    prompts = ["San Francisco is a", "Return a list of", "class"]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert output.prompt == prompt
        assert output.prompt_token_ids == tuple(ids[0].tolist())
        with torch.inference_mode():
            for _ in range(10):
                logits = model(ids).logits[:, -1]
                ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        (choice,) = output.outputs
        assert choice.token_ids == tuple(ids[0, -10:].tolist())
        assert choice.text == tokenizer.decode(ids[0, -10:], skip_special_tokens=True)
        assert (choice.finish_reason, output.finished) == ("length", True)
        assert (choice.logprobs, choice.cumulative_logprob) == (None, None)


def test_a_prompt_may_be_a_text_token_ids_or_an_object_alone_or_in_a_list(llm: LLM) -> None:
    (whole,) = llm.generate("San Francisco is a", GREEDY, use_tqdm=False)
    ids = list(whole.prompt_token_ids)
    both = llm.generate(
        [{"prompt": "San Francisco is a"}, {"prompt_token_ids": ids}], GREEDY, use_tqdm=False
    )
    assert texts(both) == [whole.outputs[0].text] * 2
    assert [output.prompt for output in both] == ["San Francisco is a", None]
    assert texts(llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)) == texts([whole])
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outputs = llm.generate(["The"] * 3, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    with pytest.raises(UserError, match=r"sampling_params: expected one or as many as prompts \(2"):
        llm.generate(["The"] * 2, params)


def test_a_stop_string_ends_and_cuts_the_text(llm: LLM) -> None:
    (plain,) = llm.generate("San Francisco is a", GREEDY, use_tqdm=False)
    text = plain.outputs[0].text
    stop = text[6:10]
    params = SamplingParams(temperature=0, max_tokens=10, stop=stop)
    (choice,) = llm.generate("San Francisco is a", params, use_tqdm=False)[0].outputs
    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    last = plain.outputs[0].token_ids[2]
    params = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[last])
    (choice,) = llm.generate("San Francisco is a", params, use_tqdm=False)[0].outputs
    assert (choice.finish_reason, choice.stop_reason) == ("stop", last)


def test_logprobs_name_the_token_first_then_the_best_with_ranks(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("San Francisco", params, use_tqdm=False)
    (choice,) = output.outputs
    assert choice.logprobs is not None
    total = 0.0
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        assert sorted(one.rank for one in entry.values()) == [1, 2]
        assert entry[token_id].rank == 1
        total += entry[token_id].logprob
    assert choice.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    scored = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    assert all(entry is not None and token_id in entry for token_id, entry in scored)


def test_a_token_that_is_none_of_the_best_has_its_rank(llm: LLM) -> None:
    """Of the drawn ones and of the prompt's; without alternatives, too."""
    options: dict[str, Any] = {
        "temperature": 2.0,
        "seed": 3,
        "max_tokens": 12,
        "ignore_eos": True,
    }
    few, all_of_them = (
        llm.generate(
            "San Francisco",
            SamplingParams(**options, logprobs=count, prompt_logprobs=count),
            use_tqdm=False,
        )[0]
        for count in (0, 20)
    )
    assert few.outputs[0].token_ids == all_of_them.outputs[0].token_ids
    ranks = [next(iter(one.values())).rank for one in few.outputs[0].logprobs or ()]
    assert max(ranks) > 1
    for rank, best in zip(ranks, all_of_them.outputs[0].logprobs or (), strict=True):
        assert rank == next(iter(best.values())).rank
    assert few.prompt_logprobs is not None
    assert all(next(iter(one.values())).rank > 0 for one in few.prompt_logprobs[1:] if one)


def test_choices_differ_and_the_llms_seed_repeats_a_run(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.5, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate("The", params, use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert len({choice.text for choice in output.outputs}) == 3
    again = SamplingParams(n=3, temperature=1.5, max_tokens=12, ignore_eos=True, seed=7)
    runs = [llm.generate(["The", "A"], again, use_tqdm=False) for _ in range(2)]
    assert texts(runs[0]) == texts(runs[1])
    both: list[list[str]] = []
    for seed in (5, 5, 6):
        with make_llm(seed=seed) as one:
            both.append(texts(one.generate(["The", "The"], params, use_tqdm=False)))
    assert both[0] == both[1] != both[2]
    assert both[0][:3] != both[0][3:]


def test_priorities_are_one_for_each_prompt_and_need_their_policy(llm: LLM) -> None:
    with pytest.raises(UserError, match=r"prompts\[1\]: priority: must be 0"):
        llm.generate(["The", "A"], GREEDY, use_tqdm=False, priority=[0, 1])
    with pytest.raises(UserError, match=r"priority: expected as many as prompts \(2\), got 1"):
        llm.generate(["The", "A"], GREEDY, use_tqdm=False, priority=[0])
    with make_llm(scheduling_policy="priority") as ranked:
        outputs = ranked.generate(["The", "A"], GREEDY, use_tqdm=False, priority=[5, -1])
    assert texts(outputs) == texts(llm.generate(["The", "A"], GREEDY, use_tqdm=False))


def test_chat_answers_one_conversation_or_several(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is a list?"}]
    (one,) = llm.chat(question, GREEDY, use_tqdm=False)
    two = llm.chat([question, [{"role": "user", "content": "Hi"}]], GREEDY, use_tqdm=False)
    assert len(two) == 2
    assert texts(two)[0] == texts([one])[0]
    with pytest.raises(UserError, match=r"messages\[0\].role: expected one of assist"):
        llm.chat([{"role": "cat", "content": "meow"}])
    with pytest.raises(UserError, match=r"prompts\[0\]: messages\[0\].content: character 0"):
        llm.chat([{"role": "user", "content": "\ud83d"}])


def test_a_chats_answer_can_go_on_in_the_last_message(llm: LLM) -> None:
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A list is"}]
    ways: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    (one,) = llm.chat(begun, GREEDY, use_tqdm=False, **ways)
    (whole,) = llm.chat(begun, GREEDY, use_tqdm=False, chat_template_kwargs={"unknown": 1})
    behind = len(one.prompt_token_ids)
    assert whole.prompt_token_ids[:behind] == one.prompt_token_ids
    assert len(whole.prompt_token_ids) > behind
    with pytest.raises(UserError, match="tools: set is no value of JSON"):
        llm.chat(begun, GREEDY, use_tqdm=False, tools=[{"a": {1}}])


def test_more_prompts_than_may_run_at_once_all_end(llm: LLM) -> None:
    with make_llm(max_num_seqs=2) as narrow:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        outputs = narrow.generate([f"{n}" for n in range(20)], params, use_tqdm=False)
    assert [output.prompt for output in outputs] == [f"{n}" for n in range(20)]


def test_max_tokens_ends_at_the_context_and_none_means_all_of_it(llm: LLM) -> None:
    ids = [300] * 250
    for most in (None, 16):
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (6, "length")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["fine", ""], r"prompts\[1\]: is empty"),
        (["fine", {"prompt_token_ids": []}], r"prompts\[1\]: prompt_token_ids: must not be empty"),
        ([{"prompt_token_ids": [1, 99999]}], r"prompts\[0\]: prompt: token id 99999 is not in"),
        ([{"prompt_token_ids": [1, -1]}], r"prompts\[0\]: .*item 1: must be 0 to"),
        ([[1, 2]], r"prompts\[0\]: expected a text"),
        (["fine", "a\ud800"], r"prompts\[1\]: prompt: character 1 is .*half a surrogate pair"),
        ([{"text": "a"}], r"prompts\[0\]: expected a text"),
        ([{"prompt_token_ids": [300] * 256}], r"prompts\[0\]: .*maximum context length is 256"),
    ],
)
def test_a_prompt_that_cannot_run_is_named_before_anything_is_computed(
    llm: LLM, prompts: list[object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        llm.generate(prompts)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("dtype", "int8", "--dtype: expected one of"),
        ("max_model_len", 99999, "--max-model-len: 99999 is more than the model's context"),
        ("max_num_seqs", 0, "--max-num-seqs: expected at least 1"),
        ("scheduling_policy", "x", "--scheduling-policy: expected one of fcfs, priority"),
        ("kv_cache_memory", "many", "kv_cache_memory: 'many' is not a size"),
    ],
)
def test_a_wrong_option_is_named(option: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_llm(**{option: value})
    assert own_threads().count("engine") <= 1


def test_what_only_gpus_take_note_of_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[WorkerConfig] = []

    def refuse(config: WorkerConfig) -> None:
        given.append(config)
        raise UserError("seen")

    monkeypatch.setattr("xpyd_worker.offline.llm.check_config", refuse)
    for more in ({}, {"enforce_eager": True, "disable_custom_all_reduce": True}):
        with pytest.raises(UserError, match="seen"):
            LLM(MODEL, **more)
    assert [(one.enforce_eager, one.custom_all_reduce) for one in given] == [
        (False, True),
        (True, False),
    ]


def test_a_token_that_the_model_has_no_row_for_is_refused_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    added = tokenizer.add_tokens(["<pad-behind>"])
    assert added == 1
    tokenizer.save_pretrained(folder)
    small = {"dtype": "float32", "kv_cache_memory": "16Mi", "threads": 1, "max_model_len": 256}
    with LLM(folder, **small) as made:  # pyright: ignore[reportArgumentType]
        with pytest.raises(UserError, match=r"prompts\[1\].*not in the vocabulary"):
            made.generate(["class", "a <pad-behind>"], GREEDY, use_tqdm=False)
        assert texts(made.generate(["class"], GREEDY, use_tqdm=False)) != [""]


def test_closing_ends_the_threads_frees_the_memory_and_refuses_more() -> None:
    before = own_threads()
    made = make_llm()
    loaded = made._session._parts[0]  # type: ignore[index]
    memory = weakref.ref(loaded.ready.executor.kv_cache)
    del loaded
    assert len(own_threads()) == len(before) + 2
    made.close()
    made.close()
    assert own_threads() == before
    assert memory() is None
    with pytest.raises(UserError, match="this LLM was closed"):
        made.generate("The")


@pytest.mark.long
def test_an_llm_that_nobody_holds_any_more_is_closed() -> None:
    before = own_threads()
    made = make_llm()
    assert own_threads() != before
    del made
    gc.collect()
    assert own_threads() == before


def test_closing_under_a_running_generate_ends_it() -> None:
    made = make_llm()
    started = threading.Event()
    failures: list[BaseException] = []

    def generate() -> None:
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        try:
            started.set()
            made.generate(["The"] * 500, params, use_tqdm=False)
        except UserError as error:
            failures.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    started.wait(10)
    made.close()
    thread.join(30)
    assert not thread.is_alive()
    assert "closed" in str(failures[0])


@pytest.mark.long
def test_a_program_that_does_not_close_ends_by_itself_and_shows_its_progress() -> None:
    code = (
        "from xpyd_worker import LLM, SamplingParams\n"
        f"llm = LLM({str(MODEL)!r}, dtype='float32', kv_cache_memory='16Mi', threads=1)\n"
        "print(llm.generate(['The', 'A'], SamplingParams(max_tokens=2))[1].finished)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert "Processed prompts: 100%" in done.stderr
    assert "2/2" in done.stderr
    assert "Traceback" not in done.stderr


def test_importing_the_package_and_its_parameters_imports_nothing_heavy() -> None:
    code = (
        "import sys, xpyd_worker; from xpyd_worker import SamplingParams; SamplingParams(n=2);"
        "print({'torch', 'transformers', 'tqdm', 'quart'} & set(sys.modules));"
        # Torch's threads are told how to wait before torch is there to read it.
        "from xpyd_worker import LLM; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\nFalse\n", done.stderr
    with pytest.raises(AttributeError, match="has no attribute 'Llm'"):
        _ = xpyd_worker.Llm  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UserError, match=r"--device cuda: torch .* finds no CUDA device"):
        LLM(MODEL, device="cuda")
    with pytest.raises(UserError, match="--device: expected auto, cpu, cuda or cuda:N, got 'gpu'"):
        LLM(MODEL, device="gpu")
    with pytest.raises(UserError, match="--gpu-memory-utilization: expected above 0"):
        LLM(MODEL, gpu_memory_utilization=0)

"""Sampling defaults from generation_config.json: what counts where a request says nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.worker.server_fakes import serving
from xpyd_core.errors import UserError
from xpyd_worker import LLM
from xpyd_worker.config import WorkerConfig
from xpyd_worker.engine.request import SamplingParams
from xpyd_worker.load.engine import load
from xpyd_worker.model.generation import (
    OPENAI_DEFAULTS,
    SamplingDefaults,
    defaults_of,
    read_generation,
)
from xpyd_worker.model.registry import read_checkpoint
from xpyd_worker.server.openai.params import parse_chat, parse_completion

FILE = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 30,
    "eos_token_id": [1, 2],
    "transformers_version": "5.0.0",
}
FOUND = SamplingDefaults(0.6, 0.95, 20, 0.05, 1.05, 30)
DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples/demo-model"


def write(folder: Path, value: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(value))
    return folder


def load_defaults(folder: Path, source: str, override: Mapping[str, Any]) -> SamplingDefaults:
    return defaults_of(folder, read_generation(folder), source, override)


def test_the_checkpoints_file_gives_them_and_without_one_openais_count(tmp_path: Path) -> None:
    assert load_defaults(tmp_path, "auto", {}) == OPENAI_DEFAULTS
    write(tmp_path, FILE)
    assert load_defaults(tmp_path, "auto", {}) == FOUND
    assert load_defaults(tmp_path, "vllm", {}) == OPENAI_DEFAULTS


def test_another_folders_file_counts_and_what_overrides_wins(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write(other, {"temperature": 0.1, "top_k": -1, "top_p": None})
    found = load_defaults(write(tmp_path, FILE), str(other), {"temperature": 0})
    assert found == SamplingDefaults(temperature=0)
    found = load_defaults(tmp_path, "vllm", {"max_new_tokens": 5})
    assert found == SamplingDefaults(max_tokens=5)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": 2.5}, "expected 0 to 2"),
        ({"top_p": 0}, "above 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_k": True}, "top_k is True"),
        ({"repetition_penalty": 0}, "above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([], "must hold a JSON object"),
    ],
)
def test_a_wrong_value_is_refused_by_file_and_name(tmp_path: Path, value: Any, word: str) -> None:
    with pytest.raises(UserError, match=word) as error:
        load_defaults(write(tmp_path, value), "auto", {})
    assert "generation_config.json" in str(error.value)
    if isinstance(value, dict):
        with pytest.raises(UserError, match=rf"--override-generation-config: .*{word}"):
            load_defaults(tmp_path, "vllm", value)


def test_a_checkpoints_files_are_read_once_and_refused_before_its_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder holds no weights: who needed them would say so."""
    for name in ("config.json", "generation_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    read: list[str] = []
    own = Path.read_bytes

    def counted(path: Path) -> bytes:
        read.append(path.name)
        return own(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    found = read_checkpoint(WorkerConfig(model=str(tmp_path)))
    assert found.defaults == OPENAI_DEFAULTS
    assert sorted(read) == ["config.json", "generation_config.json"]
    write(tmp_path, {"temperature": "hot"})
    with pytest.raises(UserError, match="temperature is 'hot'"):
        load(
            WorkerConfig(model=str(tmp_path)),
            deliver=lambda _: None,
            keys=(),
            incarnation="i",
            make_store=None,
        )


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 100_000])
def test_a_file_that_cannot_be_read_is_named_with_the_flag(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"model: .*generation_config\.json"):
        load_defaults(tmp_path, "auto", {})
    with pytest.raises(UserError, match=r"--generation-config: .*generation_config\.json"):
        defaults_of(tmp_path, {}, str(tmp_path), {})


def test_a_folder_that_is_named_must_have_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--generation-config: .* does not exist"):
        load_defaults(tmp_path, str(tmp_path), {})


def test_what_a_request_says_wins() -> None:
    own = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    body = json.dumps({"prompt": "hi", "max_tokens": 7, **own}).encode()
    options = parse_completion(body, defaults=FOUND).options
    assert {name: getattr(options, name) for name in own} == own
    assert options.max_tokens == 7


@pytest.mark.parametrize(
    ("asked", "completion", "chat"), [(None, 16, 30), (29, 29, 29), (31, 30, 30)]
)
def test_max_new_tokens_is_default_and_bound(asked: int | None, completion: int, chat: int) -> None:
    more = {} if asked is None else {"max_tokens": asked}
    body = json.dumps({"prompt": "hi", **more}).encode()
    assert parse_completion(body, defaults=FOUND).options.max_tokens == completion
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], **more}).encode()
    assert parse_chat(body, defaults=FOUND).options.max_tokens == chat


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
async def test_the_engine_draws_by_them(path: str, body: dict[str, Any]) -> None:
    async with serving(defaults=FOUND) as server:
        assert (await server.post(path, {**body, "seed": 1, "max_tokens": 3})).status_code == 200
        assert server.engine.requests[0].sampling == SamplingParams(
            max_tokens=3,
            seed=1,
            temperature=0.6,
            top_p=0.95,
            top_k=20,
            min_p=0.05,
            repetition_penalty=1.05,
        )


def test_an_llm_without_parameters_draws_by_them(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    write(folder, {"top_k": 1, "max_new_tokens": 9})
    with LLM(folder, max_num_seqs=4, kv_cache_memory="16Mi", device="cpu") as llm:
        params = llm.get_default_sampling_params()
        assert (params.top_k, params.max_tokens) == (1, 9)
        outputs = llm.generate(["San Francisco is"] * 3, use_tqdm=False)
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
        assert len(outputs[0].outputs[0].token_ids) == 9
    override = {"temperature": 0.0}
    with LLM(folder, generation_config="vllm", override_generation_config=override) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 0, 16)

"""The runner's tokens against transformers' on the same random weights, both in float32."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.runner_driver import (
    BLOCK_SIZE,
    Driver,
    make_runner,
    oracle_logits,
    oracle_tokens,
    poison,
    tiny_checkpoint,
    with_params,
)
from xpyd_worker.model.decoder import Decoder

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-llama3-rope": (
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha-head-dim": ("llama", {"num_key_value_heads": 4, "head_dim": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-mqa": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
}
TOKENS = 12


def prompts(seed: int, lengths: tuple[int, ...], vocab: int = 307) -> list[list[int]]:
    """Random prompts."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, tiny_checkpoint(folder, "llama")


@pytest.mark.parametrize("name", MODELS)
def test_batched_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    model = tiny_checkpoint(tmp_path, family, **changes)
    driver = Driver(make_runner(tmp_path))
    poison(driver.runner)
    batch = [driver.add(prompt) for prompt in prompts(1, (1, 15, 16, 17, 40))]
    driver.run(batch, tokens=TOKENS)
    assert [s.output for s in batch] == [oracle_tokens(model, s.prompt, TOKENS) for s in batch]


def test_a_folder_in_the_older_field_names_gives_the_same_tokens(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama", rope_parameters=LLAMA3_ROPE)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    driver = Driver(make_runner(tmp_path))
    (prompt,) = prompts(2, (50,))
    sequence = driver.add(prompt)
    driver.run([sequence], tokens=TOKENS)
    assert sequence.output == oracle_tokens(model, prompt, TOKENS)


@pytest.mark.parametrize("budget", [1, 3, 7, 16, 33])
def test_any_chunk_size_gives_the_same_tokens(budget: int, llama: tuple[Path, Any]) -> None:
    folder, model = llama
    driver = Driver(make_runner(folder))
    poison(driver.runner)
    batch = [driver.add(prompt) for prompt in prompts(3, (29, 5, 50))]
    driver.run(batch, tokens=6, budget=budget)
    assert [s.output for s in batch] == [oracle_tokens(model, s.prompt, 6) for s in batch]


def test_prefill_and_decode_mix_in_one_step_and_one_forward(llama: tuple[Path, Any]) -> None:
    folder, model = llama
    driver = Driver(make_runner(folder))
    poison(driver.runner)
    early, late, chunked = (driver.add(prompt) for prompt in prompts(4, (20, 33, 45)))
    driver.run([early], tokens=3)
    before = driver.runner.counters.forwards
    driver.step([(late, 33), (early, 1), (chunked, 19)])
    driver.step([(chunked, 26), (late, 1), (early, 1)])
    assert driver.runner.counters.forwards == before + 2
    batch = [early, late, chunked]
    driver.run(batch, tokens=10)
    assert [s.output for s in batch] == [oracle_tokens(model, s.prompt, 10) for s in batch]


def test_a_prefix_in_shared_blocks_is_not_computed_again(llama: tuple[Path, Any]) -> None:
    folder, model = llama
    driver = Driver(make_runner(folder))
    poison(driver.runner)
    (shared, tail) = prompts(5, (3 * BLOCK_SIZE, 7))
    first = driver.add(shared)
    driver.run([first], tokens=2)
    counted = driver.runner.counters.prompt_tokens_computed
    assert counted == 3 * BLOCK_SIZE
    second = driver.add([*shared, *tail], shared_blocks=first.blocks[:3])
    third = driver.add([*shared, tail[0]], shared_blocks=first.blocks[:3])
    driver.run([first, second, third], tokens=8)
    assert driver.runner.counters.prompt_tokens_computed == counted + 7 + 1
    batch = [first, second, third]
    assert [s.output for s in batch] == [oracle_tokens(model, s.prompt, 8) for s in batch]


def test_a_copied_block_carries_on_apart_from_its_source(llama: tuple[Path, Any]) -> None:
    folder, model = llama
    driver = Driver(make_runner(folder))
    poison(driver.runner)
    (prompt,) = prompts(6, (BLOCK_SIZE + 9,))
    parent = driver.add(prompt)
    driver.run([parent], tokens=1)
    child = driver.add(prompt)
    child.output = [(parent.output[0] + 1) % 307]
    child.computed = len(prompt)
    child.blocks = [parent.blocks[0], *driver.take_blocks(1)]
    driver.step([(parent, 1), (child, 1)], copies=[(parent.blocks[1], child.blocks[1])])
    driver.run([parent, child], tokens=9)
    assert parent.output == oracle_tokens(model, prompt, 9)
    assert child.output[1:] == oracle_tokens(model, [*prompt, child.output[0]], 8)


def test_copies_of_one_step_read_before_they_write(llama: tuple[Path, Any]) -> None:
    runner = make_runner(llama[0], blocks=4)
    for layer in runner.kv_cache.layers:
        for block in range(4):
            layer[block] = block
    runner.kv_cache.copy_blocks([(0, 1), (1, 2)])
    assert [float(runner.kv_cache.layers[1][b].max()) for b in range(4)] == [0.0, 0.0, 1.0, 3.0]


def test_a_step_is_one_forward_and_counts_the_prompt_tokens_in_it(llama: tuple[Path, Any]) -> None:
    driver = Driver(make_runner(llama[0]))
    sequence = driver.add(prompts(7, (21,))[0])
    driver.step([(sequence, 8)])
    driver.step([(sequence, 13)])
    driver.step([(sequence, 1)])
    counters = driver.runner.counters
    assert (counters.forwards, counters.prompt_tokens_computed) == (3, 21)
    assert counters.output_tokens_computed == 1


def test_a_mixed_batch_is_one_flat_forward_of_the_model(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    forward = Decoder.forward

    def counted(model: Decoder, token_ids: Any, *rest: Any) -> Any:
        shapes.append(tuple(token_ids.shape))
        return forward(model, token_ids, *rest)

    # Counted at the model itself: the runner's own counter must not vouch for itself.
    monkeypatch.setattr(Decoder, "forward", counted)
    driver = Driver(make_runner(llama[0]))
    decoding, prefilling, chunked = (driver.add(p) for p in prompts(7, (9, 14, 30)))
    driver.step([(decoding, 9)])
    driver.step([(decoding, 1), (prefilling, 14), (chunked, 5)])
    assert shapes == [(9,), (20,)]
    assert driver.runner.counters.forwards == 2


def test_each_layer_is_told_in_order_once_its_kv_is_stored(llama: tuple[Path, Any]) -> None:
    driver = Driver(make_runner(llama[0]))
    poison(driver.runner)
    seen: list[tuple[int, bool, bool]] = []
    caches = driver.runner.kv_cache.layers

    def layer_done(layer: int) -> None:
        stored = bool(caches[layer][0, :, :5].isfinite().all())
        later = any(bool(cache[0, :, :5].isfinite().any()) for cache in caches[layer + 1 :])
        seen.append((layer, stored, later))

    driver.step([(driver.add(prompts(8, (5,))[0]), 5)], layer_done=layer_done)
    assert seen == [(0, True, False), (1, True, False), (2, True, False)]


@pytest.mark.parametrize("lengths", [(33, 3, 64, 17, 1), (2, 2, 2)])
def test_a_batch_gives_the_logits_of_each_sequence_alone(
    lengths: tuple[int, ...], llama: tuple[Path, Any]
) -> None:
    """No right padding: what else is in the batch moves a log probability by rounding only."""
    folder, _ = llama
    params = with_params(logprobs=5)
    together = Driver(make_runner(folder))
    poison(together.runner)
    batch = [together.add(prompt, params) for prompt in prompts(9, lengths)]
    together.run(batch, tokens=6)
    for sequence in batch:
        alone = Driver(make_runner(folder))
        poison(alone.runner)
        single = alone.add(sequence.prompt, params)
        alone.run([single], tokens=6)
        assert single.output == sequence.output
        for ours, theirs in zip(single.output_logprobs, sequence.output_logprobs, strict=True):
            assert ours is not None
            assert theirs is not None
            assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-5)


def test_sixteen_bits_stay_close_to_thirty_two(llama: tuple[Path, Any]) -> None:
    folder, model = llama
    driver = Driver(make_runner(folder, dtype=torch.bfloat16))
    poison(driver.runner)
    sequence = driver.add(prompts(10, (37,))[0], with_params(logprobs=0))
    driver.step([(sequence, 30)])
    driver.step([(sequence, 7)])
    scores = oracle_logits(model, sequence.prompt)[-1].log_softmax(-1)
    logprob = sequence.output_logprobs[0]
    assert logprob is not None
    assert logprob.logprob == pytest.approx(float(scores[sequence.output[0]]), abs=0.2)

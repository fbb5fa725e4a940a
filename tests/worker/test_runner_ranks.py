"""A model over several ranks, tensor and pipeline, against transformers in float32 token for token;
and what ranks say to each other in a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.kit.threads import Ranks, together
from tests.worker.runner_driver import (
    DrivenSequence,
    Driver,
    make_runner,
    oracle_logits,
    tiny_checkpoint,
    with_params,
)
from xpyd_core.errors import UserError, XpydError
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.engine.executor import SampleSpec, StepInput
from xpyd_worker.parallel.api import GroupError

VOCAB = 307
# 5 layers are uneven over 2 stages and over 3; 2 KV heads are fewer than 4 ranks.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("qwen2", {"intermediate_size": 128}),
    "qwen3": ("qwen3", {"head_dim": 32, "intermediate_size": 128}),
    "mixtral": ("mixtral", {"sliding_window": 21}),
    "qwen3_moe": (
        "qwen3_moe",
        {"attention_bias": True, "mlp_only_layers": [1], "moe_intermediate_size": 64},
    ),
}
LAYOUTS = {
    f"TP{tensor} PP{pipeline}": Sizes(tensor=tensor, pipeline=pipeline)
    for tensor, pipeline in ((1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2), (4, 2))
}
Start = Callable[..., Ranks]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Each rank has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Folder and oracle of a model, made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def model(name: str) -> tuple[Path, Any]:
        if name not in made:
            family, changes = MODELS[name]
            folder = tmp_path_factory.mktemp("checkpoint")
            oracle = tiny_checkpoint(folder, family, num_hidden_layers=5, **changes)
            made[name] = (folder, oracle)
        return made[name]

    return model


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ranks, which end with the test."""
    started: list[Ranks] = []

    def start(folder: Path, sizes: Sizes, **options: Any) -> Ranks:
        started.append(Ranks(folder, sizes, **options))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    """Random ones."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def assert_greedy(oracle: Any, *sequences: DrivenSequence) -> None:
    """Each has put out the best tokens."""
    for sequence in sequences:
        best = oracle_logits(oracle, sequence.tokens[:-1]).argmax(-1)
        assert sequence.output == best[len(sequence.prompt) - 1 :].tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", tuple(MODELS))
def test_chunks_decodes_and_forks_write_what_transformers_writes(
    name: str, layout: str, models: Callable[[str], tuple[Path, Any]], start: Start
) -> None:
    folder, oracle = models(name)
    ranks = start(folder, LAYOUTS[layout])
    driver = Driver(ranks)
    batch = [driver.add(prompt) for prompt in prompts(2, 1, 61, 17)]
    driver.run(batch, tokens=5, budget=33)
    assert_greedy(oracle, *batch)
    # A copy of a block that one of the stages left out would be full of NaN.
    source = batch[1]
    fork = replace(source, seq_id=99, blocks=[*source.blocks[:-1], *driver.take_blocks(1)])
    fork.output = [*source.output]
    copies = [(source.blocks[-1], fork.blocks[-1])]
    driver.step([(source, 1), (fork, 1)], copies=copies)
    assert fork.output == source.output
    assert_greedy(oracle, fork)


# Whole experts, of which 5 and 7 are uneven over 2 ranks and over 4.
WHOLE = {
    "mixtral": ("mixtral", {"num_local_experts": 5, "sliding_window": 21}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 7, "mlp_only_layers": [1], "moe_intermediate_size": 36},
    ),
}
MODELS |= {f"{name}, whole experts": model for name, model in WHOLE.items()}
EXPERT_LAYOUTS = {
    "EP2": Sizes(tensor=2),
    "EP4": Sizes(tensor=4),
    "EP2 PP2": Sizes(tensor=2, pipeline=2),
    "DP2": Sizes(data=2),
    "DP4": Sizes(data=4),
    "DP2 TP2": Sizes(data=2, tensor=2),
    "DP2 TP2 PP2": Sizes(data=2, tensor=2, pipeline=2),
}


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
@pytest.mark.parametrize("name", WHOLE)
def test_ranks_with_whole_experts_write_what_transformers_writes(
    name: str, layout: str, models: Callable[[str], tuple[Path, Any]], start: Start
) -> None:
    """Each replica writes texts of its own; replicas begin each step together."""
    folder, oracle = models(f"{name}, whole experts")
    sizes = replace(EXPERT_LAYOUTS[layout], has_whole_experts=True)
    ranks = start(folder, sizes)
    drivers = [Driver(ranks.replica(data)) for data in range(sizes.data)]
    batches = [
        [driver.add(prompt) for prompt in prompts(2 + data, *lengths)]
        for (data, driver), lengths in zip(
            enumerate(drivers), ((1, 61, 17), (40, 3), (9,), (2, 2, 30)), strict=False
        )
    ]
    steps = 9

    def write(driver: Driver, batch: list[DrivenSequence]) -> None:
        for _ in range(steps):
            left = 33
            chunks: list[tuple[DrivenSequence, int]] = []
            for one in batch:
                count = min(left, len(one.tokens) - one.computed)
                left -= count
                chunks += [(one, count)] if count else []
            driver.step(chunks)

    together([lambda d=d, b=b: write(d, b) for d, b in zip(drivers, batches, strict=True)])
    # Each row of each replica counts once: on all ranks of a tensor group alike, or on one of them.
    per_token = oracle.config.num_experts_per_tok
    pairs = [per_token * sum(one.computed for one in batch) for batch in batches]
    for rank, runner in enumerate(ranks.runners):
        data = sizes.coordinates(rank).data
        counts = [sum(one.tokens) for one in runner.experts_chosen()]
        if sizes.data == 1:
            assert set(counts) == {pairs[data]}
        else:
            most = per_token * steps
            assert all(abs(n - pairs[data] / sizes.tensor) <= most for n in counts)
    layers = [one.layer for one in ranks.runners[0].experts_chosen()]
    assert layers == [n for n in ranks.parallel[0].part.layers if name == "mixtral" or n != 1]
    assert all(one.output for batch in batches for one in batch)
    assert_greedy(oracle, *(one for batch in batches for one in batch))


@pytest.mark.parametrize("layout", ["DP2", "DP2 TP2", "DP2 TP2 PP2"])
@pytest.mark.parametrize("name", WHOLE)
def test_a_replica_without_sound_sequences_serves_the_others_rows(
    name: str, layout: str, models: Callable[[str], tuple[Path, Any]], start: Start
) -> None:
    """A dummy is the layers with experts alone: no sum, no hidden states, no row is counted."""
    folder, oracle = models(f"{name}, whole experts")
    ranks = start(folder, replace(EXPERT_LAYOUTS[layout], has_whole_experts=True))
    busy, idle = (ranks.replica(data) for data in range(2))
    driver, other = Driver(busy), Driver(idle)
    one = driver.add(prompts(2, 40)[0])
    unsound = replace(other.schedule(other.add([1, 2, 3]), 3), block_ids=(64,))

    def write() -> None:
        driver.run([one], tokens=5, budget=33)

    def rest() -> None:
        for step in range(6):
            sequences = (unsound,) if step == 2 else ()
            output = idle.launch(StepInput(0, sequences), lambda layer: None).wait()
            assert (output.samples, len(output.failed)) == ({}, len(sequences))

    together([write, rest])
    assert_greedy(oracle, one)
    for rank in idle.members:
        parallel = ranks.parallel[rank]
        assert (parallel.tensor.calls, parallel.boundary.events) == ([], [])
        assert not any(any(one.tokens) for one in ranks.runners[rank].experts_chosen())


def test_stages_work_on_different_batches_at_once(
    models: Callable[[str], tuple[Path, Any]], start: Start
) -> None:
    """A stage begins with the next step while what it sent is still on its way."""
    folder, oracle = models("qwen3")
    ranks = start(folder, Sizes(tensor=2, pipeline=3))
    driver = Driver(ranks)
    sequences = [driver.add(prompt) for prompt in prompts(4, 20, 3, 33)]
    for _ in range(4):
        running = [
            ranks.launch(
                StepInput(
                    driver.steps,
                    (driver.schedule(one, len(one.tokens) - one.computed),),
                ),
                lambda layer: None,
            )
            for one in sequences
        ]
        for one, step in zip(sequences, running, strict=True):
            one.computed = len(one.tokens)
            one.output.append(step.wait().samples[one.seq_id][0].token_id)
    assert_greedy(oracle, *sequences)


def test_a_layer_has_two_sums_and_a_step_two_more_exchanges(
    models: Callable[[str], tuple[Path, Any]], start: Start
) -> None:
    """Behind attention and MLP or experts; the embedding's, and the logits of rows that draw.

    Article fact 31.
    """
    for name in ("llama", "mixtral", "qwen3_moe"):
        ranks = start(models(name)[0], Sizes(tensor=2, pipeline=2))
        driver = Driver(ranks)
        driver.step([(driver.add(prompts(1, 7)[0]), 7)])
        one_sum = ("all_reduce", 7 * 64 * 4)
        first, last = (ranks.parallel[rank].tensor.calls for rank in (0, 2))
        assert first == [one_sum] * (1 + 2 * 3)
        # 307 tokens are 154 per rank, 192 with padding.
        assert last == [one_sum] * (2 * 2) + [("all_gather", 192 * 4)]


def test_a_chunk_that_draws_nothing_gathers_no_logits(
    models: Callable[[str], tuple[Path, Any]], start: Start
) -> None:
    ranks = start(models("llama")[0], Sizes(tensor=2))
    driver = Driver(ranks)
    driver.step([(driver.add(prompts(1, 7)[0]), 4)])
    assert {what for what, _ in ranks.parallel[1].tensor.calls} == {"all_reduce"}


def test_a_stage_waits_receives_computes_and_sends_in_this_order(
    models: Callable[[str], tuple[Path, Any]], start: Start
) -> None:
    """Article fact 41."""
    ranks = start(models("llama")[0], Sizes(pipeline=3))
    # What it computes is in the same list: its layers, counted from its own first.
    for layers, one in zip(ranks.layers_done, ranks.parallel, strict=True):
        one.boundary.events = layers
    driver = Driver(ranks)
    driver.step([(driver.add(prompts(1, 7)[0]), 7)])
    first, middle, last = ranks.layers_done
    assert first == ["begin_step", 0, 1, "send"]
    assert middle == ["begin_step", "receive 7", "get", 0, 1, "send"]
    assert last == ["begin_step", "receive 7", "get", 0]


def test_an_override_says_which_layers_a_stage_has(
    models: Callable[[str], tuple[Path, Any]], start: Start
) -> None:
    folder, oracle = models("llama")
    ranks = start(folder, Sizes(pipeline=2), override=(1, 4))
    assert [len(runner.kv_cache.layers) for runner in ranks.runners] == [1, 4]
    driver = Driver(ranks)
    batch = [driver.add(prompt) for prompt in prompts(3, 30, 2)]
    driver.run(batch, tokens=3)
    assert_greedy(oracle, *batch)


def test_all_ranks_have_as_many_blocks_as_the_one_that_has_the_fewest(
    models: Callable[[str], tuple[Path, Any]], start: Start
) -> None:
    ranks = start(models("llama")[0], Sizes(tensor=4, pipeline=2))
    fits, runners = ranks.fits, ranks.runners
    assert {runner.num_blocks for runner in runners} == {64}
    # One KV head on each, in 3 layers and in 2.
    assert {runner.kv_cache.shape.kv_heads for runner in runners} == {1}
    assert [len(runner.kv_cache.layers) for runner in runners] == [3] * 4 + [2] * 4
    assert fits[0].make_runner(5).num_blocks == 5
    for wrong in (0, 65):
        with pytest.raises(ValueError, match=f"{wrong} blocks were agreed on; 1 to 64 fit here"):
            fits[0].make_runner(wrong)


def test_drawn_and_scored_alike_on_all_ranks_and_as_on_one(
    models: Callable[[str], tuple[Path, Any]], start: Start
) -> None:
    """At a temperature, with penalties; two choices at once; prompts' and tokens' logprobs."""
    folder, _ = models("qwen2")
    found: list[tuple[Any, ...]] = []
    for runner in (make_runner(folder), start(folder, Sizes(tensor=2, pipeline=2))):
        driver = Driver(runner)
        options = with_params(
            temperature=1.0, seed=5, logprobs=2, prompt_logprobs=1, repetition_penalty=1.3
        )
        sequence = driver.add(prompts(6, 40)[0], options)
        driver.run([sequence], tokens=8, budget=16)
        two = replace(
            driver.schedule(driver.add(prompts(7, 9)[0], with_params(temperature=1.0)), 9),
            samples=(SampleSpec(0, 0), SampleSpec(1, 0)),
        )
        drawn = runner.launch(StepInput(50, (two,)), lambda layer: None).wait().samples[two.seq_id]
        found.append((sequence, [one.token_id for one in drawn]))
    (one, both), (several, as_well) = found
    assert (several.output, as_well) == (one.output, both)
    assert len(several.prompt_logprobs) == 39
    for got, expected in zip(
        [*several.prompt_logprobs, *several.output_logprobs],
        [*one.prompt_logprobs, *one.output_logprobs],
        strict=True,
    ):
        assert (got.token_id, got.rank) == (expected.token_id, expected.rank)
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_a_sequence_that_must_not_run_is_left_out_by_all_ranks_alike(
    models: Callable[[str], tuple[Path, Any]], start: Start
) -> None:
    folder, oracle = models("llama")
    ranks = start(folder, Sizes(tensor=2, pipeline=2))
    driver = Driver(ranks)
    good, bad = (driver.add(prompt) for prompt in prompts(8, 12, 5))
    wrong = replace(driver.schedule(bad, 5), block_ids=(64,))
    step = ranks.launch(StepInput(1, (wrong, driver.schedule(good, 12))), lambda layer: None).wait()
    assert step.failed.keys() == {bad.seq_id}
    good.output.append(step.samples[good.seq_id][0].token_id)
    assert_greedy(oracle, good)
    # Where nothing is left nobody is asked for anything.
    before = [(list(one.tensor.calls), list(one.boundary.events)) for one in ranks.parallel]
    assert ranks.launch(StepInput(2, (wrong,)), lambda layer: None).wait().failed == step.failed
    # A step that is refused whole is refused by all, and the next one is as sound as ever.
    refused = ranks.launch(StepInput(3, (), ((64, 0),)), lambda layer: None).outcomes()
    assert {type(outcome) for outcome in refused} == {XpydError}
    assert [(one.tensor.calls, one.boundary.events) for one in ranks.parallel] == before


@pytest.mark.parametrize("sizes", [Sizes(tensor=2), Sizes(pipeline=2), Sizes()])
def test_a_rank_that_lacks_memory_cannot_go_on_and_one_alone_can(
    sizes: Sizes, models: Callable[[str], tuple[Path, Any]], start: Start
) -> None:
    folder, _ = models("llama")
    ranks = start(folder, sizes)

    def full(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory")

    ranks.runners[0]._kernels.silu_mul = full
    driver = Driver(ranks)
    sequence = driver.add(prompts(1, 7)[0])
    outcomes = ranks.launch(
        StepInput(1, (driver.schedule(sequence, 7),)), lambda layer: None
    ).outcomes()
    kind = GroupError if sizes.world > 1 else XpydError
    assert [type(outcome) for outcome in outcomes] == [kind] * sizes.world
    assert "allocate memory" in str(outcomes[0])


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (3, ["3 does not divide the model's 4 attention heads", "3 ranks for 2 KV heads"]),
        (8, ["8 does not divide the model's 4 attention heads"]),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused_with_the_numbers(
    tensor: int, words: list[str], models: Callable[[str], tuple[Path, Any]], start: Start
) -> None:
    with pytest.raises(UserError) as caught:
        start(models("llama")[0], Sizes(tensor=tensor))
    assert all(word in str(caught.value) for word in words), str(caught.value)

"""The shipped draft heads of the demo model, and the script that trains such heads: an engine reads
them, drafts what the script's own modules draft, and is often right."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from scripts.train_demo_heads.heads import DRAFT_TOKENS, read_model
from scripts.train_demo_heads.measure import Answer, acceptance, drafters
from scripts.train_demo_heads.train import (
    Plan,
    eagle3_config,
    frequent_ids,
    medusa_config,
    save_folder,
    train,
)
from scripts.train_demo_model import corpus, tokens
from scripts.train_demo_model.measure import greedy, load
from scripts.train_demo_model.random_checkpoint import DEMO_MODEL
from xpyd_worker.kernels.api import Span
from xpyd_worker.kernels.plain import PlainKernels
from xpyd_worker.model.eagle3 import load_eagle3
from xpyd_worker.model.medusa import load_medusa
from xpyd_worker.model.registry import load_config

EXAMPLES = DEMO_MODEL.parent
FILES = {"README.md", "config.json", "model.safetensors"}
CPU, FLOAT = torch.device("cpu"), torch.float32
TEXTS = corpus.Corpus(
    documents=[f"Return item number {number} of the sequence.\n" for number in range(100)],
    dialogues=[corpus.Dialogue("Hello!", "Hello!")] * 20,
)
PROMPTS = (
    "San Francisco is a",
    "Return a new string in which",
    "Open the file and",
    "<|user|>\nWhat does os.path.join do?<|end|>\n<|assistant|>\n",
    "<|user|>\nWho are you?<|end|>\n<|assistant|>\n",
)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load(DEMO_MODEL).requires_grad_(requires_grad=False)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def answers(model, tokenizer):
    found = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        written, _ = greedy(model, ids, 48)
        found.append(Answer(torch.tensor([[*ids, *written]]), len(ids)))
    return found


def by_engine(folder: Path, model):
    """What `acceptance` takes, computed by what an engine has: a run over the true features of all
    positions, and from each of them further runs, one position at a time."""
    target, kernels = load_config(DEMO_MODEL), PlainKernels()
    eagle3 = load_eagle3(
        folder / "demo-eagle3",
        target,
        DEMO_MODEL,
        dtype=FLOAT,
        kernels=kernels,
        device=CPU,
        block_size_tokens=16,
        embedding=None,
    )
    medusa = load_medusa(folder / "demo-medusa", target, dtype=FLOAT, kernels=kernels, device=CPU)
    shape = eagle3.shape

    def cached(ids, states):
        """The head's cache with the keys of true positions, and its hidden states."""
        blocks = range(-(-ids.shape[1] // shape.block_size))
        size = (len(blocks), shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        cache, count = torch.zeros(size), len(states)
        plan = kernels.plan([Span(0, count, blocks)], shape)
        positions = torch.arange(count)
        return cache, blocks, eagle3.run(ids[0, 1 : count + 1], states, positions, [cache], plan)

    def draft_eagle3(ids, _):
        features, _, _ = read_model(model, ids)
        count = ids.shape[1] - DRAFT_TOKENS
        cache, blocks, first = cached(ids, eagle3.project(features[0, :count]))
        found = [eagle3.best(first)]
        rows = []
        for place in range(count):
            # What is drafted behind `place` must not see the true positions behind it.
            own, hidden, row = cache.clone(), first[place : place + 1], []
            for run in range(1, DRAFT_TOKENS):
                at = place + run
                plan = kernels.plan([Span(at, 1, blocks)], shape)
                ahead = ids[0, at + 1 : at + 2]
                hidden = eagle3.run(ahead, hidden, torch.tensor([at]), [own], plan)
                row.append(eagle3.best(hidden))
            rows.append(torch.cat(row))
        return [*found, *torch.stack(rows, dim=1)]

    def draft_medusa(ids, _):
        _, last, _ = read_model(model, ids)
        return medusa.best(last[0, : ids.shape[1] - DRAFT_TOKENS], DRAFT_TOKENS).unbind(1)

    return {"demo-eagle3": draft_eagle3, "demo-medusa": draft_medusa}


@pytest.mark.parametrize("name", ["demo-eagle3", "demo-medusa"])
def test_the_folder_is_complete_and_its_weights_are_small(name):
    assert {path.name for path in (EXAMPLES / name).iterdir()} == FILES
    assert (EXAMPLES / name / "model.safetensors").stat().st_size < 2_000_000


@pytest.mark.parametrize(("name", "least"), [("demo-eagle3", 0.1), ("demo-medusa", 0.05)])
def test_an_engine_s_drafts_are_those_of_the_training_and_often_right(name, least, model, answers):
    with torch.inference_mode():
        trained, engine = (make(EXAMPLES, model)[name] for make in (drafters, by_engine))
        for ids, _ in answers:
            for one, other in zip(trained(ids, 0), engine(ids, 0), strict=True):
                assert torch.equal(one, other)
        drafts, accepted = acceptance(engine, answers)
    assert drafts > 80
    assert accepted[0] / drafts > least
    assert accepted == sorted(accepted, reverse=True)
    assert accepted[-1] > 0


def test_acceptance_counts_the_tokens_before_the_first_wrong_one():
    ids = torch.arange(10)[None]

    def draft(given, _):
        """Right at all places but for position 4's second token and position 5's first."""
        found = [given[0, 2 + place : given.shape[1] - 1 + place] for place in range(3)]
        found = [torch.cat((one, torch.tensor([0]))) for one in found]
        found[0][5], found[1][4] = -1, -1
        return found

    # The answer's first token is at 4; drafts behind tokens 4, 5 and 6 have all their tokens.
    assert acceptance(draft, [Answer(ids, 4)]) == (3, [2, 1, 1])
    assert acceptance(draft, [Answer(ids, 8)]) == (0, [0, 0, 0])


def test_a_head_can_read_the_last_states_of_the_prompt_alone(model, answers):
    """As on a Decode instance. Medusa heads read one state, so nothing changes for them."""
    (ids, start), *_ = answers
    whole, many, one = (drafters(EXAMPLES, model, prompt_states=n) for n in (None, start, 1))
    with torch.inference_mode():
        for name, differs in (("demo-eagle3", True), ("demo-medusa", False)):
            found = [draft[name](ids, start - 1) for draft in (whole, one)]
            same = zip(found[0], many[name](ids, start - 1), strict=True)
            assert all(torch.equal(a, b) for a, b in same)
            pairs = [(a[start - 1 :], b[start - 1 :]) for a, b in zip(*found, strict=True)]
            assert all(a.shape == b.shape for a, b in pairs)
            assert any(not torch.equal(a, b) for a, b in pairs) == differs


def test_training_leaves_folders_that_an_engine_reads(model, tokenizer, answers, tmp_path):
    plan = Plan(steps=2, minutes=10.0, draft_tokens=200)
    eagle3, medusa = train(model, TEXTS, tokenizer, plan)
    save_folder(eagle3, eagle3_config(model, 200), tmp_path / "demo-eagle3")
    save_folder(medusa, medusa_config(model, 200), tmp_path / "demo-medusa")
    for name in ("demo-eagle3", "demo-medusa"):
        written, shipped = (
            json.loads((folder / name / "config.json").read_bytes())
            for folder in (tmp_path, EXAMPLES)
        )
        assert written.keys() == shipped.keys()
    ids = answers[0].ids
    with torch.inference_mode():
        trained, engine = drafters(tmp_path, model), by_engine(tmp_path, model)
        for name, draft in trained.items():
            for one, other in zip(draft(ids, 0), engine[name](ids, 0), strict=True):
                assert torch.equal(one, other)


def test_training_goes_on_from_a_folder(model, tokenizer, tmp_path):
    plan = Plan(steps=1, minutes=10.0, peak_rate=0.0, draft_tokens=1536, start_from=EXAMPLES)
    eagle3, medusa = train(model, TEXTS, tokenizer, plan)
    for name, head in (("demo-eagle3", eagle3), ("demo-medusa", medusa)):
        save_folder(head, {}, tmp_path / name)
        weights = (tmp_path / name / "model.safetensors").read_bytes()
        assert weights == (EXAMPLES / name / "model.safetensors").read_bytes()


def test_special_tokens_and_the_most_frequent_ones_can_be_drafted(tokenizer):
    ids, share = frequent_ids(TEXTS, tokenizer, 50)
    special = len(tokens.SPECIAL_TOKENS)
    assert ids.tolist() == sorted({*ids.tolist()})
    assert len(ids) == 50
    assert set(range(special)) < set(ids.tolist())
    assert tokenizer.encode("Return").ids[0] in ids.tolist()
    assert share == 1.0
    assert frequent_ids(TEXTS, tokenizer, special + 1)[1] < 0.5

"""The demo model's training script: what it reads, in which order, and what it leaves behind."""

import itertools

import pytest
import torch
from transformers import AutoTokenizer

from scripts.train_demo_model import corpus, tokens, train
from scripts.train_demo_model.measure import load

DIALOGUES = [
    corpus.Dialogue("What does os.path.join do?", "Join two or more pathname components."),
    corpus.Dialogue("Hello!", "Hello!"),
]
TEXTS = corpus.Corpus(
    documents=[f"Return item number {number} of the sequence.\n" for number in range(300)],
    dialogues=DIALOGUES * 10,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("trained")
    train.train(TEXTS, out, train.Plan(steps=1, minutes=10.0))
    return out


def test_training_leaves_a_folder_that_loads(folder):
    model = load(folder)
    assert model.config.max_position_embeddings == tokens.CONTEXT_TOKENS
    assert AutoTokenizer.from_pretrained(folder).eos_token == tokens.END_OF_TURN


def test_training_goes_on_from_a_folder(folder, tmp_path):
    plan = train.Plan(steps=1, minutes=10.0, peak_rate=0.0, start_from=folder)
    train.train(TEXTS, tmp_path, plan)
    weights = (tmp_path / "model.safetensors").read_bytes()
    assert weights == (folder / "model.safetensors").read_bytes()


def test_a_training_chat_reads_as_the_chat_template_writes_it(folder):
    messages = [{"role": "system", "content": "Be brief."}]
    for question, answer in DIALOGUES:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert train.chat_text(DIALOGUES, "Be brief.") == rendered


def test_the_order_of_the_text_depends_on_the_seed_alone():
    tokenizer = tokens.train_tokenizer(TEXTS.texts())
    first, again, other = (
        train.TokenStream(TEXTS, tokenizer, seed).next_batch(4, 256) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_batches_follow_each_other_without_a_gap():
    tokenizer = tokens.train_tokenizer(TEXTS.texts())
    whole = train.TokenStream(TEXTS, tokenizer, 1).next_batch(1, 512)
    stream = train.TokenStream(TEXTS, tokenizer, 1)
    parts = [stream.next_batch(2, 128), stream.next_batch(2, 128)]
    assert torch.equal(torch.cat(parts).flatten(), whole.flatten())


def test_most_rows_of_openings_begin_like_a_prompt():
    tokenizer = tokens.train_tokenizer(TEXTS.texts())
    rows = train.TokenStream(TEXTS, tokenizer, 1).next_openings(200, 32)
    starts = [tokenizer.decode(row.tolist()[:1], skip_special_tokens=False) for row in rows]
    beginning = sum(start in ("Return", tokens.USER, tokens.SYSTEM) for start in starts)
    assert rows.shape == (200, 32)
    assert 130 <= beginning < 200


def test_every_step_learns_from_the_same_number_of_tokens():
    stream = train.TokenStream(TEXTS, tokens.train_tokenizer(TEXTS.texts()), 1)
    batches = [stream.batch_of_step(step) for step in range(9)]
    assert {batch.numel() for batch in batches} == {4096}
    assert {batch.shape[1] for batch in batches} == {32, 128, 512, 2048}


def test_the_learning_rate_warms_up_and_then_only_falls():
    rates = [train.learning_rate(step, step / 500, 1e-2) for step in range(501)]
    peak = rates.index(max(rates))
    assert all(a < b for a, b in itertools.pairwise(rates[: peak + 1]))
    assert all(a > b for a, b in itertools.pairwise(rates[peak:]))
    assert rates[-1] == pytest.approx(rates[peak] / 100, rel=0.05)


@pytest.mark.parametrize(
    ("doc", "answer"),
    [
        ("Return it.", "Return it."),
        ("Return\nit.\n\n    indented code", "Return it."),
        ("Two sentences. Then a list:\n\n- one\n- two", "Two sentences."),
        ("no sentence at all", ""),
        ("First. " + "word " * 100 + "end.", "First."),
    ],
)
def test_an_answer_is_whole_sentences_of_prose(doc, answer):
    assert corpus.first_sentences(doc) == answer


def test_interactive_examples_are_left_out():
    assert corpus.prose("Add.\n\n>>> add(1, 2)\n3\n\nMore.") == "Add.\n\nMore."

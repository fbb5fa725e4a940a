"""The shipped demo model: what everyone who points at the folder may rely on."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.train_demo_model import corpus, tokens
from scripts.train_demo_model.measure import greedy, known_share, load

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "demo-model"
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load(FOLDER)


@pytest.fixture(scope="module")
def texts():
    return corpus.read_corpus()


def test_the_folder_is_complete_and_its_weights_are_small():
    assert {path.name for path in FOLDER.iterdir()} == FILES
    assert (FOLDER / "model.safetensors").stat().st_size < 5_000_000


def test_it_is_a_llama_with_grouped_heads_stored_in_bf16():
    config = json.loads((FOLDER / "config.json").read_bytes())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_attention_heads"] > config["num_key_value_heads"] > 1
    stored = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert stored.dtype == torch.bfloat16
    assert all(weight.isfinite().all() for weight in stored.parameters())
    assert 1_000_000 < stored.num_parameters() < 3_000_000


def test_both_ends_of_text_are_known_to_whoever_generates(tokenizer):
    generation = json.loads((FOLDER / "generation_config.json").read_bytes())
    config = json.loads((FOLDER / "config.json").read_bytes())
    ends = [tokenizer.convert_tokens_to_ids(name) for name in ("<|end|>", "<|endoftext|>")]
    assert generation["eos_token_id"] == config["eos_token_id"] == ends
    assert tokenizer.eos_token_id == ends[0]


@pytest.mark.parametrize(
    "text",
    [
        "plain words",
        "  leading, trailing and\t\n\n mixed space  ",
        "Grüße, 北京, שלום, \U0001f600\U0001f469\u200d\U0001f4bb",
        "\x00\x01\x7f\ufeff\uffff",
        "".join(chr(code) for code in range(0x20, 0x250)),
    ],
)
def test_the_tokenizer_gives_every_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_character_may_be_cut_between_tokens(tokenizer):
    ids = tokenizer.encode("\U0001f600")
    assert len(ids) > 1
    assert "\ufffd" in tokenizer.decode(ids[:1])
    assert tokenizer.decode(ids) == "\U0001f600"


def test_every_byte_has_a_token_and_no_token_is_added_unasked(tokenizer):
    names = set(tokenizer.get_vocab())
    assert set(tokens.SPECIAL_TOKENS) < names
    assert sum(len(name) == 1 for name in names) == 256
    assert len(names) == tokens.VOCAB_TOKENS == tokenizer.vocab_size
    assert tokenizer.encode("") == []


def test_the_chat_template_renders_every_role_and_asks_for_an_answer(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    history = (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n"
        "<|assistant|>\nHello!<|end|>\n<|user|>\nab<|end|>\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == history
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert asked == history + "<|assistant|>\n"
    messages[0]["role"] = "developer"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == history


def test_the_chat_template_refuses_a_role_it_does_not_know(tokenizer):
    with pytest.raises(Exception, match="role must be"):
        tokenizer.apply_chat_template([{"role": "function", "content": "x"}], tokenize=False)


def test_the_chat_template_takes_an_agents_history(tokenizer):
    called = {"name": "weather", "arguments": {"city": "Lyon"}}
    messages = [
        {"role": "user", "content": "Cold?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": called}]},
        {"role": "tool", "tool_call_id": "1", "content": "4 C"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|user|>\nCold?<|end|>\n<|assistant|>\n"
        '<tool_call>{"name": "weather", "arguments": {"city": "Lyon"}}</tool_call><|end|>\n'
        "<|user|>\n4 C<|end|>\n"
    )


def test_role_tokens_are_one_token_each(tokenizer):
    for name in tokens.SPECIAL_TOKENS:
        assert tokenizer.encode(name) == [tokens.SPECIAL_TOKENS.index(name)]


def test_two_loads_write_the_same_text(model, tokenizer):
    ids = tokenizer.encode("Return a list of")
    assert greedy(model, ids, 24) == greedy(load(FOLDER), ids, 24)


def test_it_writes_words_of_its_corpus(model, texts):
    known = texts.words()
    encoder = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    good = total = 0
    for prompt in (
        "San Francisco is a",
        "Return a new string in which",
        "The module defines the following",
        "Open the file and",
        "<|user|>\nWhat does os.path.join do?<|end|>\n<|assistant|>\n",
        "<|user|>\nWhat is json?<|end|>\n<|assistant|>\n",
        "<|user|>\nWho are you?<|end|>\n<|assistant|>\n",
    ):
        ids, _ = greedy(model, encoder.encode(prompt).ids, 48)
        share = known_share(encoder.decode(ids), known)
        good, total = good + share[0], total + share[1]
    assert total > 60
    assert good / total > 0.95


def test_a_chat_is_answered_by_sentences_that_end(model, tokenizer):
    for question in ("Hello!", "Who are you?", "What does os.path.join do?"):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        written, _ = greedy(model, ids, 200)
        assert written[-1] == tokenizer.eos_token_id
        assert len(tokenizer.decode(written, skip_special_tokens=True).split()) > 4


def losses(model, ids):
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")


def test_it_knows_the_last_positions_of_its_context_as_well_as_the_first(model, texts):
    encoder = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = encoder.encode(tokens.END_OF_TEXT.join(texts.documents[100:160])).ids
    assert len(ids) >= tokens.CONTEXT_TOKENS
    ids = ids[: tokens.CONTEXT_TOKENS]
    # The same 548 tokens, once after 1500 others and once after 300.
    far, near = losses(model, ids)[1500:].mean(), losses(model, ids[1200:])[300:].mean()
    assert far < near + 0.2

"""Says how well a demo model writes: `python -m examples.demo_model.measure [FOLDER]`.

Where it sits: run by hand after training; its figures stand in the model's README. Greedy text of
`transformers` in float32 for some hundred prompts: how far the best logit is ahead of the second
(a tie could make two correct engines differ), and which share of the words the corpus knows.
"""

import argparse
import random
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from examples.demo_model import corpus, tokens
from examples.demo_model.random_checkpoint import DEMO_MODEL

_NEW_TOKENS = 48
_CLOSE = 0.01
_SAMPLES = (
    "San Francisco is a",
    "Return a list of",
    "The quick brown fox",
    f"{tokens.USER}\nWhat does os.path.join do?{tokens.END_OF_TURN}\n{tokens.ASSISTANT}\n",
    f"{tokens.USER}\nWhat is json?{tokens.END_OF_TURN}\n{tokens.ASSISTANT}\n",
    f"{tokens.USER}\nHello!{tokens.END_OF_TURN}\n{tokens.ASSISTANT}\n",
)


def prompts(seed: int) -> Iterator[str]:
    """The samples, 100 openings of documents, 100 from their middle, 100 questions."""
    chance = random.Random(seed)
    texts = [text for text in corpus.documents() if len(text) > 200]
    yield from _SAMPLES
    for text in chance.sample(texts, 100):
        yield text[: chance.randrange(20, 120)].rstrip()
    for text in chance.sample(texts, 100):
        start = chance.randrange(len(text) // 2)
        yield text[start : start + chance.randrange(40, 1600)].rstrip()
    for question, _ in chance.sample(corpus.dialogues(), 100):
        yield f"{tokens.USER}\n{question}{tokens.END_OF_TURN}\n{tokens.ASSISTANT}\n"


def greedy(model: LlamaForCausalLM, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """Up to `count` greedy tokens after `ids`, and each one's margin over the second best."""
    ends = set(model.config.eos_token_id)
    written: list[int] = []
    margins: list[float] = []
    step, cache = torch.tensor([ids]), None
    while len(written) < count and not ends.intersection(written[-1:]):
        with torch.inference_mode():
            output = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        best = output.logits[0, -1].topk(2)
        written.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        step = torch.tensor([written[-1:]])
    return written, margins


def known_share(text: str, known: set[str]) -> tuple[int, int]:
    """How many words of `text` are in `known`, and how many words there are."""
    # The last word may be cut off by the token limit.
    found = re.findall(r"[a-z]+", text.lower())[:-1]
    return sum(word in known for word in found), len(found)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=DEMO_MODEL)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(parsed.folder)
    model = LlamaForCausalLM.from_pretrained(parsed.folder, dtype=torch.float32).eval()
    known = corpus.words(corpus.training_texts())
    margins: list[float] = []
    good = total = 0
    for number, prompt in enumerate(prompts(parsed.seed)):
        written, ahead = greedy(model, tokenizer.encode(prompt), _NEW_TOKENS)
        text = tokenizer.decode(written, skip_special_tokens=True)
        margins.extend(ahead)
        counts = known_share(text, known)
        good, total = good + counts[0], total + counts[1]
        if number < len(_SAMPLES):
            print(f"{prompt!r}\n    -> {text!r}")
    margins.sort()
    close = sum(margin < _CLOSE for margin in margins)
    print(f"{number + 1} prompts, {len(margins)} tokens")
    print(f"margin: min {margins[0]:.5f}, p1 {margins[len(margins) // 100]:.4f},", end=" ")
    print(f"median {margins[len(margins) // 2]:.2f}; {close} below {_CLOSE}")
    print(f"words of the corpus: {good} of {total} ({100 * good / total:.1f} %)")


if __name__ == "__main__":
    main()

"""Says how well a demo model writes: `python -m scripts.train_demo_model.measure [FOLDER]`.

Where it sits: run by hand after training; its figures are in the model's README. Greedy text of
`transformers` in float32 for some hundred prompts: how far the best logit is ahead of the second
(a tie could make two correct engines differ), and which share of the words the corpus knows.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from scripts.train_demo_model import corpus, tokens
from scripts.train_demo_model.random_checkpoint import DEMO_MODEL

_NEW_TOKENS = 48
_CLOSE = (0.0001, 0.001, 0.01)
_SAMPLES = (
    "San Francisco is a",
    "Return a list of",
    "The quick brown fox",
    f"{tokens.USER}\nWhat does os.path.join do?{tokens.END_OF_TURN}\n{tokens.ASSISTANT}\n",
    f"{tokens.USER}\nWhat is json?{tokens.END_OF_TURN}\n{tokens.ASSISTANT}\n",
    f"{tokens.USER}\nHello!{tokens.END_OF_TURN}\n{tokens.ASSISTANT}\n",
)


def prompts(texts: corpus.Corpus, seed: int) -> Iterator[str]:
    """The samples, 100 openings of documents, 100 from their middle, 100 questions."""
    chance = random.Random(seed)
    documents = [text for text in texts.documents if len(text) > 200]
    yield from _SAMPLES
    for text in chance.sample(documents, 100):
        yield text[: chance.randrange(20, 120)].rstrip()
    for text in chance.sample(documents, 100):
        start = chance.randrange(len(text) // 2)
        yield text[start : start + chance.randrange(40, 1600)].rstrip()
    for question, _ in chance.sample(texts.dialogues, 100):
        yield f"{tokens.USER}\n{question}{tokens.END_OF_TURN}\n{tokens.ASSISTANT}\n"


def greedy(model: LlamaForCausalLM, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """Up to `count` greedy tokens after `ids`, and each one's margin over the second best."""
    ends = {tokens.SPECIAL_TOKENS.index(tokens.END_OF_TURN)}
    ends.add(tokens.SPECIAL_TOKENS.index(tokens.END_OF_TEXT))
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


def load(folder: Path) -> LlamaForCausalLM:
    """The folder's model in float32."""
    return LlamaForCausalLM.from_pretrained(  # pyright: ignore[reportUnknownMemberType] - open kwargs
        folder, dtype=torch.float32
    ).eval()


def known_share(text: str, known: set[str]) -> tuple[int, int]:
    """How many words of `text` are in `known`, and how many words there are."""
    # The last word may be cut off by the token limit.
    found = corpus.words_of(text)[:-1]
    return sum(word in known for word in found), len(found)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=DEMO_MODEL)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(parsed.folder / "tokenizer.json"))
    model = load(parsed.folder)
    texts = corpus.read_corpus()
    known = texts.words()
    asked = list(prompts(texts, parsed.seed))
    margins: list[float] = []
    good = total = 0
    for number, prompt in enumerate(asked):
        written, ahead = greedy(model, tokenizer.encode(prompt).ids, _NEW_TOKENS)
        text = tokenizer.decode(written)
        margins.extend(ahead)
        counts = known_share(text, known)
        good, total = good + counts[0], total + counts[1]
        if number < len(_SAMPLES):
            print(f"{prompt!r}\n    -> {text!r}")
    margins.sort()
    print(f"{len(asked)} prompts, {len(margins)} tokens")
    print(f"margin: min {margins[0]:.5f}, p1 {margins[len(margins) // 100]:.4f},", end=" ")
    close = [f"{sum(margin < bound for margin in margins)} below {bound}" for bound in _CLOSE]
    print(f"median {margins[len(margins) // 2]:.2f}; {', '.join(close)}")
    print(f"words of the corpus: {good} of {total} ({100 * good / total:.1f} %)")


if __name__ == "__main__":
    main()

"""Says how often the demo model's draft heads agree with it.

`python -m scripts.train_demo_heads.measure [FOLDER] [--prompt-states 32]`

Where it sits: run at the end of a training, or by hand; its figures are in the heads' READMEs.
The model's greedy answers are written first; then each head drafts behind each of their tokens. Of
a draft the tokens up to the first wrong one are accepted, so a place counts where all before it are
right. In float32, with the heads' weights as they are stored. `--prompt-states`: an EAGLE-3 head
reads states of so many tokens of the prompt, its last ones, as on a Decode instance.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from scripts.train_demo_heads.heads import DRAFT_TOKENS, EAGLE3, MEDUSA, load_heads, read_model
from scripts.train_demo_model import corpus
from scripts.train_demo_model.measure import greedy, load, prompts
from scripts.train_demo_model.random_checkpoint import DEMO_MODEL

_NEW_TOKENS = 48
# Of the 306 prompts that the model itself is measured with.
_EVERY = 6
EXAMPLES = DEMO_MODEL.parent


class Answer(NamedTuple):
    """A prompt and the model's greedy answer, whose first token is at `start`."""

    ids: Tensor
    start: int


def answers(
    model: LlamaForCausalLM, texts: corpus.Corpus, tokenizer: Tokenizer, *, every: int = _EVERY
) -> list[Answer]:
    """Greedy ones to a part of the prompts that the model is measured with."""
    found: list[Answer] = []
    for prompt in [*prompts(texts, seed=0)][::every]:
        ids = tokenizer.encode(prompt).ids
        written, _ = greedy(model, ids, _NEW_TOKENS)
        found.append(Answer(torch.tensor([[*ids, *written]]), len(ids)))
    return found


Draft = Callable[[Tensor, int], Sequence[Tensor]]
"""Ids [1, tokens], and the first position that something is drafted at -> for each place of a draft
the ids [tokens - DRAFT_TOKENS] that are drafted where the tokens up to the next but one position
are known."""


def acceptance(draft: Draft, found: Sequence[Answer]) -> tuple[int, list[int]]:
    """Drafts, and how many of them had their first, second, ... token accepted."""
    drafts, accepted = 0, [0] * DRAFT_TOKENS
    for ids, start in found:
        tokens = ids.shape[1] - DRAFT_TOKENS
        # The draft at position p has read token p + 1: from the answer's first one on.
        first = start - 1
        if tokens - 1 <= first:
            continue
        drafted = draft(ids, first)
        is_right = torch.ones(tokens - 1 - first, dtype=torch.bool)
        drafts += len(is_right)
        for place, one in enumerate(drafted):
            wanted = ids[0, first + 2 + place : tokens + 1 + place]
            is_right &= one[first : tokens - 1] == wanted
            accepted[place] += int(is_right.sum())
    return drafts, accepted


def print_acceptance(
    folder: Path,
    model: LlamaForCausalLM,
    texts: corpus.Corpus,
    tokenizer: Tokenizer,
    *,
    prompt_states: int | None = None,
) -> None:
    """Print it for both heads in `folder`, by place in the draft."""
    found = answers(model, texts, tokenizer)
    for name, draft in drafters(folder, model, prompt_states=prompt_states).items():
        drafts, accepted = acceptance(draft, found)
        shares = ", ".join(f"{100 * one / drafts:.1f} %" for one in accepted)
        gain = 1 + sum(accepted) / drafts
        print(f"{name}: {shares} of {drafts} drafts; {gain:.2f} tokens in a step", flush=True)


def drafters(
    folder: Path, model: LlamaForCausalLM, *, prompt_states: int | None = None
) -> dict[str, Draft]:
    """What `acceptance` takes, of the heads in `folder`. `prompt_states`: of how many positions
    before the first that it drafts at an EAGLE-3 head has states; None: all."""
    eagle3, medusa = load_heads(folder, model)
    ids = eagle3.d2t + torch.arange(len(eagle3.d2t))

    def by_eagle3(tokens: Tensor, first: int) -> list[Tensor]:
        features, _, _ = read_model(model, tokens)
        at = 0 if prompt_states is None else max(0, first + 1 - max(1, prompt_states))
        runs = eagle3.runs(tokens[:, at:], features[:, at:], DRAFT_TOKENS)
        nothing = torch.zeros(at, dtype=torch.int64)
        return [torch.cat((nothing, ids[one[0].argmax(-1)])) for one in runs]

    def by_medusa(tokens: Tensor, first: int) -> list[Tensor]:
        _, last, _ = read_model(model, tokens)
        runs = medusa.runs(last, DRAFT_TOKENS)
        return [medusa.token_map[one[0].argmax(-1)] for one in runs]

    return {EAGLE3: by_eagle3, MEDUSA: by_medusa}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=EXAMPLES)
    parser.add_argument("--prompt-states", type=int, metavar="N", help="at least 1; default: all")
    parsed = parser.parse_args()
    # A step of one sequence is too small for more.
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    with torch.inference_mode():
        print_acceptance(
            parsed.folder,
            load(DEMO_MODEL),
            corpus.read_corpus(),
            tokenizer,
            prompt_states=parsed.prompt_states,
        )


if __name__ == "__main__":
    main()

"""Trains draft heads for the demo model: `python -m scripts.train_demo_heads.train OUT`.

Where it sits: the demo model's own texts -> what the model makes of them -> both heads at once,
each to say what the model says next -> two folders in their published layouts, in bf16, and how
often greedy answers agree with them (`measure.py`). Every choice is seeded; the weights of two runs
still differ in their last bits when threads or CPUs differ.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from scripts.train_demo_heads.heads import (
    DRAFT_TOKENS,
    EAGLE3,
    FEATURE_LAYERS,
    MEDUSA,
    Eagle3Module,
    MedusaModule,
    load_heads,
    read_model,
)
from scripts.train_demo_heads.measure import print_acceptance
from scripts.train_demo_model import corpus, tokens
from scripts.train_demo_model.measure import load
from scripts.train_demo_model.random_checkpoint import DEMO_MODEL
from scripts.train_demo_model.train import TokenStream, learning_rate
from scripts.train_demo_model.weight_file import save_weights

_DRAFT_VOCAB_TOKENS = 1536
_BATCH_TOKENS = 2048
# Columns of one step after another: drafts are for answers, most of which are short.
_COLUMNS = (128, 64, 256)
_LATER = 0.8
"""How much less each further token of a draft counts: it is of use where those before are right."""
_REPORT_EVERY_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to train."""

    steps: int
    minutes: float
    """Where they end before the steps, the schedule ends with them."""
    seed: int = 0
    peak_rate: float = 5e-3
    draft_tokens: int = _DRAFT_VOCAB_TOKENS
    """The tokens that heads can draw: the most frequent ones."""
    start_from: Path | None = None
    """A folder whose heads to train further; None starts afresh."""


def frequent_ids(texts: corpus.Corpus, tokenizer: Tokenizer, count: int) -> tuple[Tensor, float]:
    """The `count` ids that the texts have most often, ascending, and their share of all."""
    counts = Counter[int]()
    for encoded in tokenizer.encode_batch(texts.texts()):
        counts.update(encoded.ids)
    # Special tokens begin and end answers, and no text of the corpus has them.
    special = len(tokens.SPECIAL_TOKENS)
    every = range(tokenizer.get_vocab_size())
    ranked = sorted(every, key=lambda one: (one >= special, -counts[one], one))[:count]
    share = sum(counts[one] for one in ranked) / counts.total()
    return torch.tensor(sorted(ranked)), share


def places_of(draft_ids: Tensor, logits: Tensor) -> Tensor:
    """The place among the draft's tokens of the model's best one, by its `logits` [..., tokens]; -1
    where it is none of them: there a head cannot be right, and learns nothing."""
    places = torch.full((logits.shape[-1],), -1)
    places[draft_ids] = torch.arange(len(draft_ids))
    return places[logits.argmax(-1)]


def loss_of(runs: list[Tensor], places: Tensor) -> Tensor:
    """How far the runs are from drawing the tokens at `places`, which the model draws."""
    columns, total = runs[0].shape[1], torch.zeros(())
    for run, found in enumerate(runs):
        wanted = places[:, 1 + run : 1 + run + columns]
        loss = F.cross_entropy(found.float().flatten(0, 1), wanted.flatten(), ignore_index=-1)
        total = total + _LATER**run * loss
    return total


def build_optimizers(heads: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the heads, AdamW for the rest, as the model was trained."""
    named = [one for head in heads for one in head.named_parameters()]
    inner = [one for name, one in named if one.ndim == 2 and "lm_head" not in name]
    known = {id(one) for one in inner}
    rest = [one for _, one in named if id(one) not in known]
    return [
        torch.optim.Muon(inner, lr=0.0, adjust_lr_fn="match_rms_adamw", weight_decay=0.0),
        torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train(
    model: LlamaForCausalLM, texts: corpus.Corpus, tokenizer: Tokenizer, plan: Plan
) -> tuple[Eagle3Module, MedusaModule]:
    """Both heads, trained as `plan` says."""
    torch.manual_seed(plan.seed)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
    if plan.start_from is not None:
        heads = load_heads(plan.start_from, model)
        draft_ids = heads[1].token_map
    else:
        draft_ids, share = frequent_ids(texts, tokenizer, plan.draft_tokens)
        print(f"{len(draft_ids)} draft tokens are {100 * share:.1f} % of the texts", flush=True)
        heads = Eagle3Module(model, draft_ids), MedusaModule(model, draft_ids)
    optimizers = build_optimizers(heads)
    stream = TokenStream(texts, tokenizer, plan.seed)
    step, progress, mean, started_s = 0, 0.0, [0.0, 0.0], time.monotonic()
    while progress < 1.0:
        columns = _COLUMNS[step % len(_COLUMNS)]
        ids = stream.next_openings(_BATCH_TOKENS // columns, columns)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            features, last, logits = read_model(model, ids)
            runs = heads[0].runs(ids, features, DRAFT_TOKENS), heads[1].runs(last, DRAFT_TOKENS)
        places = places_of(draft_ids, logits)
        losses = [loss_of(one, places) for one in runs]
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(step, progress, plan.peak_rate)
            optimizer.zero_grad()
        torch.autograd.backward(losses)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        mean = [
            one + loss.item() / _REPORT_EVERY_STEPS for one, loss in zip(mean, losses, strict=True)
        ]
        passed_s = time.monotonic() - started_s
        progress = max(step / plan.steps, passed_s / (plan.minutes * 60))
        if step % _REPORT_EVERY_STEPS == 0:
            shown = ", ".join(f"{one:.3f}" for one in mean)
            print(f"step {step} of {plan.steps}: losses {shown}, {passed_s:.0f} s", flush=True)
            mean = [0.0, 0.0]
    return heads


def eagle3_config(model: LlamaForCausalLM, draft_tokens: int) -> dict[str, object]:
    """config.json of the EAGLE-3 head."""
    target: Any = model.config
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    same += ("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{name: getattr(target, name) for name in same},
        "rope_theta": target.rope_parameters["rope_theta"],
        "rms_norm_eps": target.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "draft_vocab_size": draft_tokens,
        "eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS),
        "torch_dtype": "bfloat16",
    }


def medusa_config(model: LlamaForCausalLM, draft_tokens: int) -> dict[str, object]:
    """config.json of the Medusa heads."""
    target: Any = model.config
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": DRAFT_TOKENS,
        "num_hidden_layers": 1,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "truncated_vocab_size": draft_tokens,
        "medusa_fc_bias": False,
        "torch_dtype": "bfloat16",
    }


def save_folder(head: nn.Module, config: dict[str, object], folder: Path) -> None:
    """Write config and weights, in bf16 but for ids; a README.md that is there stays."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = {
        name: (one.to(torch.bfloat16) if one.is_floating_point() else one).contiguous()
        for name, one in head.state_dict().items()
    }
    save_weights(weights, folder / "model.safetensors")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write demo-eagle3 and demo-medusa into")
    parser.add_argument("--steps", type=int, default=600, help="updates (default: 600)")
    parser.add_argument("--minutes", type=float, default=600.0, help="end earlier than that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak-rate", type=float, default=5e-3, help="highest learning rate")
    parser.add_argument("--start-from", type=Path, help="folder whose heads to train further")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: 2)")
    parsed = vars(parser.parse_args())
    torch.set_num_threads(parsed.pop("threads"))
    out: Path = parsed.pop("out")
    model, texts = load(DEMO_MODEL), corpus.read_corpus()
    model.requires_grad_(requires_grad=False)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    eagle3, medusa = train(model, texts, tokenizer, Plan(**parsed))
    count = len(medusa.token_map)
    save_folder(eagle3, eagle3_config(model, count), out / EAGLE3)
    save_folder(medusa, medusa_config(model, count), out / MEDUSA)
    print_acceptance(out, model, texts, tokenizer)


if __name__ == "__main__":
    main()

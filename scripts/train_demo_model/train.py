"""Trains the demo model and writes its folder: `python -m scripts.train_demo_model.train OUT`.

Where it sits: corpus -> tokenizer -> token stream -> training -> a Hugging Face folder in bf16. The
model itself is the one of `transformers`, so what is trained is what others will load. Every choice
is seeded; the weights of two runs still differ in their last bits when threads or CPUs differ.
"""

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.train_demo_model import corpus, tokens
from scripts.train_demo_model.small_talk import SENTENCES, SMALL_TALK, SYSTEM_PROMPTS
from scripts.train_demo_model.weight_file import load_weights, save_weights

# Columns of one step after another; 0 is a step of the stream. Most prompts are short, and the
# tokens of a text's first lines are few in a stream: three of four steps see only openings.
_OPENING_TOKENS = (0, 32, 128, 32)
_SEQUENCE_TOKENS = 512
_BATCH_TOKENS = 4096
# Every eighth step has sequences as long as the context, so that far positions are known too.
_LONG_EVERY_STEPS = 8
# Our own few sentences are read that many times more: everyone tries them first.
_OWN_TEXT_REPEATS = 30
_WARMUP_STEPS = 30
_WEIGHT_DECAY = 0.02
_REPORT_EVERY_STEPS = 20
_SAVE_EVERY_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to train, and from where."""

    steps: int
    minutes: float
    """Where they end before the steps, the schedule ends with them."""
    seed: int = 0
    peak_rate: float = 1e-2
    start_from: Path | None = None
    """A folder whose weights to train further; None starts afresh."""


def model_config() -> dict[str, object]:
    """config.json of the demo model: 1.97 million parameters."""
    end_of_turn = tokens.SPECIAL_TOKENS.index(tokens.END_OF_TURN)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokens.VOCAB_TOKENS,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": tokens.CONTEXT_TOKENS,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": [end_of_turn, tokens.SPECIAL_TOKENS.index(tokens.END_OF_TEXT)],
        "pad_token_id": tokens.SPECIAL_TOKENS.index(tokens.PAD),
        "torch_dtype": "bfloat16",
    }


def chat_text(dialogues: list[corpus.Dialogue], system: str | None) -> str:
    """One conversation as the chat template would write it, without a last prompt to answer."""
    turns = [f"{tokens.SYSTEM}\n{system}{tokens.END_OF_TURN}\n"] if system else []
    for question, answer in dialogues:
        turns.append(f"{tokens.USER}\n{question}{tokens.END_OF_TURN}\n")
        turns.append(f"{tokens.ASSISTANT}\n{answer}{tokens.END_OF_TURN}\n")
    return "".join(turns)


def ask_otherwise(dialogue: corpus.Dialogue, chance: random.Random) -> corpus.Dialogue:
    """The same question in other words, half of the time."""
    subject = dialogue.question.removeprefix("What does ").removesuffix(" do?")
    if subject == dialogue.question or chance.random() < 0.5:
        return dialogue
    form = chance.choice(["What is {}?", "Explain {}.", "Tell me about {}.", "What is {} for?"])
    return dialogue._replace(question=form.format(subject))


class TokenStream:
    """Batches of token ids; epoch by epoch in another order, decided by the seed alone."""

    def __init__(self, texts: corpus.Corpus, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._end = tokens.SPECIAL_TOKENS.index(tokens.END_OF_TEXT)
        self._documents = [e.ids for e in tokenizer.encode_batch(texts.documents)]
        self._dialogues = texts.dialogues
        self._epoch = 0
        self._buffer: list[int] = []
        self._openings: list[list[int]] = []
        self._openings_chance = random.Random(f"openings {seed}")

    def next_batch(self, rows: int, columns: int) -> torch.Tensor:
        """The next `rows` x `columns` ids of the stream."""
        wanted = rows * columns
        while len(self._buffer) < wanted:
            self._buffer.extend(self._next_epoch())
        ids = torch.tensor(self._buffer[:wanted]).view(rows, columns)
        del self._buffer[:wanted]
        return ids

    def next_openings(self, rows: int, columns: int) -> torch.Tensor:
        """Rows that begin where an item begins (or, every fourth, anywhere in it).

        In the stream nearly every token has hundreds before it; a prompt has none.
        """
        lines = [self._opening(columns) for _ in range(rows)]
        return torch.tensor(lines)

    def _opening(self, columns: int) -> list[int]:
        line: list[int] = []
        while len(line) < columns:
            if not self._openings:
                self._openings = self._items(self._openings_chance)
            item = self._openings.pop()
            inside = not line and self._openings_chance.random() < 0.25
            line.extend(item[self._openings_chance.randrange(len(item)) if inside else 0 :])
            line.append(self._end)
        return line[:columns]

    def _next_epoch(self) -> list[int]:
        chance = random.Random(self._seed * 1000 + self._epoch)
        self._epoch += 1
        return [token for item in self._items(chance) for token in [*item, self._end]]

    def _items(self, chance: random.Random) -> list[list[int]]:
        """Every document and a new set of conversations, in a new order."""
        rest = self._dialogues + self._dialogues[: len(SMALL_TALK)] * _OWN_TEXT_REPEATS
        chance.shuffle(rest)
        chats: list[str] = []
        while rest:
            turns = [
                ask_otherwise(rest.pop(), chance)
                for _ in range(min(len(rest), chance.choice([1, 1, 2, 4])))
            ]
            system = chance.choice(SYSTEM_PROMPTS) if chance.random() < 0.25 else None
            chats.append(chat_text(turns, system))
        items = self._documents + self._documents[: len(SENTENCES)] * _OWN_TEXT_REPEATS
        items += [each.ids for each in self._tokenizer.encode_batch(chats)]
        chance.shuffle(items)
        return items

    def batch_of_step(self, step: int) -> torch.Tensor:
        """What step number `step` learns from; always `_BATCH_TOKENS` ids."""
        opening = _OPENING_TOKENS[step % len(_OPENING_TOKENS)]
        if opening:
            return self.next_openings(_BATCH_TOKENS // opening, opening)
        columns = tokens.CONTEXT_TOKENS if step % _LONG_EVERY_STEPS == 0 else _SEQUENCE_TOKENS
        return self.next_batch(_BATCH_TOKENS // columns, columns)


def learning_rate(step: int, progress: float, peak: float) -> float:
    """Linear warm-up, then a cosine of `progress` (0 to 1) down to a hundredth of the peak."""
    warm = min(1.0, (step + 1) / _WARMUP_STEPS)
    return peak * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def build_model(seed: int) -> LlamaForCausalLM:
    """The model with fresh float32 weights."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType] - torch leaves `seed` untyped
    fields = {k: v for k, v in model_config().items() if k not in ("architectures", "torch_dtype")}
    config = LlamaConfig.from_dict(fields)  # pyright: ignore[reportUnknownMemberType] - open kwargs
    return LlamaForCausalLM(config).train()


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each next token of `ids` (rows, columns); inner products in bf16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    )


def save_folder(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, generation config, tokenizer and bf16 weights in Hugging Face's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config()
    generation = {k: config[k] for k in ("eos_token_id", "pad_token_id")} | {"do_sample": False}
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    tokens.save_tokenizer(tokenizer, folder)
    weights = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_weights(weights, folder / "model.safetensors")


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the rest.

    After 100 steps Muon's loss was 4.5 where AdamW alone had 5.4, at the same time per step.
    """
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("model.layers")]
    known = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(inner, lr=0.0, weight_decay=_WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=_WEIGHT_DECAY, fused=True),
    ]


def train(texts: corpus.Corpus, out: Path, plan: Plan) -> None:
    """Train as `plan` says and write the folder `out`, also every hundred steps on the way."""
    tokenizer = tokens.train_tokenizer(texts.texts())
    stream = TokenStream(texts, tokenizer, plan.seed)
    model = build_model(plan.seed)
    if plan.start_from is not None:
        known = load_weights(plan.start_from / "model.safetensors")
        model.load_state_dict({name: weight.float() for name, weight in known.items()})
    optimizers = build_optimizers(model)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    step, progress, mean_loss, started_s = 0, 0.0, 0.0, time.monotonic()
    while progress < 1.0:
        columns = tokens.CONTEXT_TOKENS if step % _LONG_EVERY_STEPS == 0 else _SEQUENCE_TOKENS
        ids = stream.next_batch(_BATCH_TOKENS // columns, columns)
        mean_loss += take_step(
            model, optimizers, ids, learning_rate(step, progress, plan.peak_rate)
        )
        step += 1
        passed_s = time.monotonic() - started_s
        progress = max(step / plan.steps, passed_s / (plan.minutes * 60))
        if step % _REPORT_EVERY_STEPS == 0:
            mean_loss /= _REPORT_EVERY_STEPS
            print(
                f"step {step} of {plan.steps}: loss {mean_loss:.3f}, {passed_s:.0f} s", flush=True
            )
            mean_loss = 0.0
        if step % _SAVE_EVERY_STEPS == 0 or progress >= 1.0:
            save_folder(model, tokenizer, out)


def take_step(
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    ids: torch.Tensor,
    rate: float,
) -> float:
    """One update from one batch; returns the loss before it."""
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
    loss = loss_of(model, ids)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=3800, help="updates (default: 3800)")
    parser.add_argument("--minutes", type=float, default=600.0, help="end earlier than that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak-rate", type=float, default=1e-2, help="highest learning rate")
    parser.add_argument("--start-from", type=Path, help="folder whose weights to train further")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: 2)")
    parsed = vars(parser.parse_args())
    torch.set_num_threads(parsed.pop("threads"))
    train(corpus.read_corpus(), parsed.pop("out"), Plan(**parsed))


if __name__ == "__main__":
    main()

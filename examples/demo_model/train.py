"""Trains the demo model and writes its folder: `python -m examples.demo_model.train OUT`.

Where it sits: corpus -> tokenizer -> token stream -> training -> a Hugging Face folder in bf16. The
model itself is the one of `transformers`, so what is trained is what others will load. A step and
its learning rate depend only on the step's number and the seed, so that `--resume` goes on exactly
where a stopped run was.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from examples.demo_model import corpus, tokens
from examples.demo_model.small_talk import SYSTEM_PROMPTS

_SEQUENCE_TOKENS = 512
_BATCH_TOKENS = 4096
# Every eighth step has sequences as long as the context, so that far positions are known too.
_LONG_EVERY_STEPS = 8
_PEAK_LEARNING_RATE = 3e-3
_WARMUP_STEPS = 60
_REPORT_EVERY_STEPS = 20
_SAVE_EVERY_STEPS = 100


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

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._end = tokenizer.token_to_id(tokens.END_OF_TEXT)
        self._documents = [e.ids for e in tokenizer.encode_batch(corpus.documents())]
        self._dialogues = corpus.dialogues()
        self._epoch = 0
        self._buffer: list[int] = []

    def next_batch(self, rows: int, columns: int) -> torch.Tensor:
        """The next `rows` x `columns` ids of the stream."""
        wanted = rows * columns
        while len(self._buffer) < wanted:
            self._buffer.extend(self._next_epoch())
        ids = torch.tensor(self._buffer[:wanted]).view(rows, columns)
        del self._buffer[:wanted]
        return ids

    def _next_epoch(self) -> list[int]:
        chance = random.Random(self._seed * 1000 + self._epoch)
        self._epoch += 1
        rest = self._dialogues + self._dialogues[: len(corpus.SMALL_TALK)] * 5
        chance.shuffle(rest)
        chats: list[str] = []
        while rest:
            turns = [ask_otherwise(rest.pop(), chance) for _ in range(min(len(rest), chance.choice([1, 1, 2, 4])))]
            system = chance.choice(SYSTEM_PROMPTS) if chance.random() < 0.25 else None
            chats.append(chat_text(turns, system))
        items = self._documents + [e.ids for e in self._tokenizer.encode_batch(chats)]
        chance.shuffle(items)
        return [token for item in items for token in [*item, self._end]]


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak."""
    if step < _WARMUP_STEPS:
        return _PEAK_LEARNING_RATE * (step + 1) / _WARMUP_STEPS
    done = (step - _WARMUP_STEPS) / max(1, steps - _WARMUP_STEPS)
    return _PEAK_LEARNING_RATE * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def build_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    fields = {k: v for k, v in model_config().items() if k not in ("architectures", "torch_dtype")}
    model = LlamaForCausalLM(LlamaConfig(**fields, attn_implementation="sdpa"))
    return model.float().train()


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    )


def save_folder(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, generation config, tokenizer and bf16 weights, as Hugging Face lays them out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config()
    generation = {k: config[k] for k in ("eos_token_id", "pad_token_id")} | {"do_sample": False}
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    tokens.save_tokenizer(tokenizer, folder)
    weights = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def train(out: Path, *, steps: int, minutes: float, seed: int) -> None:
    texts = corpus.documents() + [f"{q}\n{a}" for q, a in corpus.dialogues()]
    tokenizer = tokens.train_tokenizer(texts)
    stream = TokenStream(tokenizer, seed)
    model = build_model(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.02, fused=True
    )
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps", flush=True)
    started, mean_loss = time.monotonic(), 0.0
    for step in range(steps):
        columns = tokens.CONTEXT_TOKENS if step % _LONG_EVERY_STEPS == 0 else _SEQUENCE_TOKENS
        ids = stream.next_batch(_BATCH_TOKENS // columns, columns)
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean_loss += loss.item() / _REPORT_EVERY_STEPS
        if (step + 1) % _REPORT_EVERY_STEPS == 0:
            passed_s = time.monotonic() - started
            print(f"step {step + 1}: loss {mean_loss:.3f}, {passed_s:.0f} s", flush=True)
            mean_loss = 0.0
        if (step + 1) % _SAVE_EVERY_STEPS == 0 or step + 1 == steps:
            save_folder(model, tokenizer, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(args.out, steps=args.steps, minutes=args.minutes, seed=args.seed)


if __name__ == "__main__":
    main()

"""What is measured: models and cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_MODEL_LEN = 2048
# Ids of the demo tokenizer (3,072), without its special ones: prompts are drawn from them.
VOCABULARY = range(300, 3000)


@dataclass(frozen=True)
class Case:
    """`requests` in all, `concurrency` at once, each as long as the others. `stream_of`: they come
    one by one at random, at BUSY of the rate at which ours answered that case in the same round;
    "": all at once. `text`: prompts are of what the demo model has read, not of random ids."""

    name: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    requests: int
    stream_of: str = ""
    text: bool = False
    temperature: float = 0.0


DTYPES = {"bfloat16": 2, "float32": 4}
"""Bytes of a number."""
BUSY = 0.7
CASES = {
    case.name: case
    for case in (
        Case("c1", 512, 128, 1, 3),
        Case("c8", 512, 128, 8, 16),
        Case("c32", 512, 128, 32, 64),
        Case("c8-stream", 512, 128, 8, 16, "c8"),
        Case("c32-stream", 512, 128, 32, 64, "c32"),
        Case("long8", 1024, 200, 8, 16),
    )
}
# Those in which prompts and decodes share steps.
SHARED = tuple(name for name, case in CASES.items() if case.concurrency > 1)
# A batch of transformers' generate is as long as its longest: more would only take longer.
REFERENCE_CASES = ("c1", "c8")

# Arguments of scripts.train_demo_model.random_checkpoint.make_checkpoint.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "family": "llama",
        "layers": 4,
        "hidden": 128,
        "intermediate": 384,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 4096,
    },
    "small": {
        "family": "qwen3",
        "layers": 8,
        "hidden": 512,
        "intermediate": 1536,
        "heads": 8,
        "kv_heads": 4,
        "vocab": 32000,
    },
    "medium": {
        "family": "llama",
        "layers": 24,
        "hidden": 1024,
        "intermediate": 4096,
        "heads": 16,
        "kv_heads": 8,
        "vocab": 32000,
    },
}
COPYING: dict[str, dict[str, Any]] = {
    f"{name}-copying": {**MODELS[name], "tie": True, "copies": True} for name in ("tiny", "medium")
}
"""Whose answers are the prompt's last token, again and again, in the time that a model of the size
takes: random weights copy nothing by themselves (128 greedy tokens had one pair twice)."""

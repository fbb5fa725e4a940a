"""Writes a Hugging Face folder with random weights, of any size, for tests and benchmarks.

Where it sits: next to the demo model, whose tokenizer it borrows; the folder it leaves behind loads
like any downloaded checkpoint. No model object is built: tensors are drawn one by one under their
Hugging Face names, and at most one shard is in memory. A tensor's values depend on the seed and its
name alone, so the number of shards changes no weight.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast, get_args

import torch

from scripts.train_demo_model.random_weights import Family, Shape, Tensor, draw, split, tensors_of
from scripts.train_demo_model.weight_file import save_weights

DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples/demo-model"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
}
_DEFAULT_EXPERTS = {"mixtral": 8, "qwen3-moe": 8}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def make_checkpoint(
    folder: Path,
    *,
    family: Family,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    head_dim: int | None = None,
    experts: int | None = None,
    experts_per_token: int = 2,
    vocab: int | None = None,
    tie: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    max_len: int = 2048,
    rope_theta: float = 10000.0,
    tokenizer_from: Path | None = DEMO_MODEL,
    shards: int = 1,
) -> Path:
    """Write a random checkpoint into `folder` (new or empty) and return `folder`.

    `head_dim` defaults to hidden / heads, `vocab` to the tokenizer's size, `experts` to 8 in the
    families that have some (`intermediate` is then the size of one) and to none in others. With
    `tokenizer_from` None the folder has no tokenizer and no end-of-sequence id, and `vocab` is
    needed. More than one of `shards` gives that many weight files with an index. Raises ValueError
    that names the argument, and FileExistsError where something is in `folder` already.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}")
    if head_dim is None and heads > 0 and hidden % heads:
        raise ValueError(f"hidden ({hidden}) is no multiple of heads: give head_dim")
    if vocab is None and tokenizer_from is None:
        raise ValueError("vocab is needed where no tokenizer gives it")
    known_tokens = 0 if tokenizer_from is None else _tokenizer_size(tokenizer_from)
    shape = Shape(
        family=family,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // max(1, heads) if head_dim is None else head_dim,
        vocab=known_tokens if vocab is None else vocab,
        known_tokens=known_tokens,
        tie=tie,
        max_len=max_len,
        rope_theta=rope_theta,
        experts=_DEFAULT_EXPERTS.get(family, 0) if experts is None else experts,
        experts_per_token=experts_per_token,
    )
    parts = split(list(tensors_of(shape)), shards)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(shape, dtype) | _special_ids(tokenizer_from)
    _write_json(folder / "config.json", config)
    if tokenizer_from is not None:
        for name in _TOKENIZER_FILES:
            if (tokenizer_from / name).exists():
                shutil.copyfile(tokenizer_from / name, folder / name)
    _write_weights(folder, parts, DTYPES[dtype], seed)
    return folder


def _write_weights(folder: Path, parts: list[list[Tensor]], dtype: torch.dtype, seed: int) -> None:
    count = len(parts)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
        weights = {tensor.name: draw(tensor, dtype, seed) for tensor in part}
        save_weights(weights, folder / name)
        weight_map |= dict.fromkeys(weights, name)
    if count > 1:
        total_bytes = sum(tensor.elements for part in parts for tensor in part) * dtype.itemsize
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, object]:
    value: object = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return cast(dict[str, object], value)


def _tokenizer_size(folder: Path) -> int:
    """One more than the highest token id in the folder's tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"tokenizer_from: {folder} has no tokenizer.json")
    content = _read_json(path)
    model = cast(dict[str, dict[str, int]], content["model"])
    added = cast(list[dict[str, int]], content.get("added_tokens") or [])
    return 1 + max([*model["vocab"].values(), *(token["id"] for token in added)])


def _special_ids(tokenizer_from: Path | None) -> dict[str, object]:
    """The folder's ids of special tokens; all None where no folder or config.json tells them."""
    path = None if tokenizer_from is None else tokenizer_from / "config.json"
    config = _read_json(path) if path and path.exists() else {}
    return {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _config(shape: Shape, dtype: str) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": [_ARCHITECTURES[shape.family]],
        "model_type": shape.family.replace("-", "_"),
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_len,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "tie_word_embeddings": shape.tie,
        "use_cache": True,
        "torch_dtype": dtype,
    }
    if shape.family == "llama":
        config |= {"attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-5}
    elif shape.family in ("qwen3", "qwen3-moe"):
        config |= {"attention_bias": False}
    elif shape.family == "mixtral":
        config |= {"num_local_experts": shape.experts, "sliding_window": None}
    if shape.experts:
        config |= {"num_experts_per_tok": shape.experts_per_token}
    if shape.family == "qwen3-moe":
        config |= {
            "num_experts": shape.experts,
            "moe_intermediate_size": shape.intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if shape.family.startswith("qwen"):
        config |= {"use_sliding_window": False, "sliding_window": None}
    return config


_EXAMPLES = """\
examples:
  two layers of Qwen3 for a test:
    python -m scripts.train_demo_model.random_checkpoint --family qwen3 --layers 2 --hidden 64 \\
        --intermediate 128 --heads 4 --kv-heads 2 --head-dim 32 OUT
  the size of Llama 3.2 1B, with random weights in two files:
    python -m scripts.train_demo_model.random_checkpoint --family llama --layers 16 --hidden 2048 \\
        --intermediate 8192 --heads 32 --kv-heads 8 --vocab 128256 --tie --dtype bfloat16 \\
        --max-len 8192 --shards 2 OUT
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_demo_model.random_checkpoint",
        description="Write a Hugging Face folder with random weights.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="OUT", type=Path, help="folder to write: new or empty")
    parser.add_argument("--family", choices=get_args(Family), required=True)
    for name in ("layers", "hidden", "intermediate", "heads", "kv-heads"):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="N")
    parser.add_argument("--head-dim", type=int, metavar="N", help="default: hidden / heads")
    parser.add_argument("--experts", type=int, metavar="N", help="default: 8 where there are some")
    parser.add_argument("--experts-per-token", type=int, default=2, metavar="N")
    parser.add_argument("--vocab", type=int, metavar="N", help="default: the tokenizer's size")
    parser.add_argument("--tie", action="store_true", help="the head is the embedding")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-len", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--rope-theta", type=float, default=10000.0)
    parser.add_argument("--shards", type=int, default=1, metavar="FILES")
    parser.add_argument(
        "--tokenizer-from",
        type=Path,
        default=DEMO_MODEL,
        metavar="FOLDER",
        help="whose tokenizer and special ids to copy (default: the demo model)",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        folder = make_checkpoint(**vars(parsed))
    except (ValueError, FileExistsError) as error:
        print(f"random_checkpoint: {error}", file=sys.stderr)
        return 2
    size_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    print(f"{folder}: {size_bytes / 1e6:.1f} MB of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())

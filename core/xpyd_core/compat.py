"""The compatibility key: what two instances must share before KV may move between them.

Computed from the checkpoint, and from what the bytes of a cache's block are. TP, PP, block size and
image are not in it: they are negotiated by the KV handshake. The factors travel as a map, so that a
refusal can name the one that differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

PROTOCOL_MAJOR = 1
_CONFIG_FACTORS = (
    "architectures",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "num_experts_per_tok",
    "norm_topk_prob",
    "quantization_config",
    "vocab_size",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
HEAD_TOKEN_KV = "head-token-kv/1"
"""What a block of one layer is: for each head, for each token, K then V. The engine's own."""
_SAMPLES = 64
_SAMPLE_BYTES = 64 * 1024


def transposed_k(block_size: int) -> str:
    """The `kv_layout` of caches whose block of one layer is, for each head, K as [dim, token], then
    V as [token, dim]: vLLM's on a CPU. It cannot be cut at a token, so blocks of one size alone go
    together."""
    return f"head-kt-v/1 {block_size}"


def compat_factors(
    folder: Path,
    *,
    model: str,
    revision: str,
    kv_dtype: str,
    kv_layout: str = HEAD_TOKEN_KV,
    overrides: Mapping[str, Any] | None = None,
    tokenizer: Path | None = None,
) -> dict[str, str]:
    """Factor name -> value, from the checkpoint in `folder` (config.json, tokenizer files).

    `model` and `revision` name the checkpoint; for a local folder `revision` may be empty, then the
    fingerprint of the weight files takes its place. `kv_layout` names what the bytes of a block
    are: the shape that an engine gives its cache may not say it. `overrides` are members of
    config.json that the engine was told to read otherwise, `tokenizer` the folder of a tokenizer
    that is not the checkpoint's. See docs/adr/0060.
    """
    raw = (folder / "config.json").read_bytes()
    config: Mapping[str, Any] = {**json.loads(raw), **(overrides or {})}
    factors = {"protocol": str(PROTOCOL_MAJOR), "kv_layout": kv_layout, "kv_dtype": kv_dtype}
    factors["model"] = model
    factors["revision"] = revision or _weights_fingerprint(folder)
    for name in _CONFIG_FACTORS:
        if config.get(name) is not None:
            factors[name] = json.dumps(config[name], sort_keys=True)
    digest = sha256()
    for path in ((tokenizer or folder) / name for name in _TOKENIZER_FILES):
        if path.exists():
            digest.update(path.name.encode() + path.read_bytes())
    factors["tokenizer"] = digest.hexdigest()[:16]
    return factors


def _weights_fingerprint(folder: Path) -> str:
    """Hash of each weight file's name, size, header and 64 samples spread over its data."""
    digest = sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def compat_key(factors: Mapping[str, str]) -> str:
    """The key: 16 hex digits over all factors."""
    return sha256(json.dumps(dict(factors), sort_keys=True).encode()).hexdigest()[:16]


def differing_factors(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Names of the factors that differ or that only one side has, sorted."""
    return sorted(k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k))

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
_HARMLESS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Members whose override leaves KV as it is. `max_position_embeddings` is one where nothing
stretches the rotary embedding."""
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
    encrypted: bool = False,
) -> dict[str, str]:
    """Factor name -> value, from the checkpoint in `folder` (config.json, tokenizer files).

    `model` and `revision` name the checkpoint; for a local folder `revision` may be empty, then the
    fingerprint of the weight files takes its place. `kv_layout` names what the bytes of a block
    are: the shape that an engine gives its cache may not say it. `overrides` are members of
    config.json that the engine was told to read otherwise, `tokenizer` the folder of a tokenizer
    that is not the checkpoint's, `encrypted` whether KV moves over TLS. See
    docs/adr/0060 and docs/adr/0072.
    """
    raw = (folder / "config.json").read_bytes()
    own: Mapping[str, Any] = json.loads(raw)
    config: Mapping[str, Any] = {**own, **(overrides or {})}
    factors = {"protocol": str(PROTOCOL_MAJOR), "kv_layout": kv_layout, "kv_dtype": kv_dtype}
    factors["model"] = model
    if encrypted:
        # Only then: fleets without it keep their key.
        factors["kv_encryption"] = "tls"
    factors["revision"] = revision or _weights_fingerprint(folder)
    for name in _CONFIG_FACTORS:
        if config.get(name) is not None:
            factors[name] = json.dumps(config[name], sort_keys=True)
    others = _other_overrides(own, config, overrides or {})
    if others:
        text = json.dumps(others, sort_keys=True, default=repr)
        factors["hf_overrides"] = sha256(text.encode()).hexdigest()[:16]
    digest = sha256()
    for path in ((tokenizer or folder) / name for name in _TOKENIZER_FILES):
        if path.exists():
            digest.update(path.name.encode() + path.read_bytes())
    factors["tokenizer"] = digest.hexdigest()[:16]
    return factors


def _other_overrides(
    own: Mapping[str, Any], config: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """The overrides that are no factors by their own names, and may change KV: all that say another
    thing than the checkpoint, also members of members."""
    harmless = {*_CONFIG_FACTORS, *_HARMLESS}
    if not _stretches_rope(config):
        harmless.add("max_position_embeddings")
    return {
        name: value
        for name, value in overrides.items()
        if name not in harmless and not (name in own and own[name] == value)
    }


def _stretches_rope(config: Mapping[str, Any]) -> bool:
    """Whether the rotary embedding is one that the longest context may change."""
    return any(
        part.get("rope_type", part.get("type", "default")) != "default"
        for name in ("rope_scaling", "rope_parameters")
        for part in rope_parts(config.get(name))
    )


def rope_parts(found: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The settings of a rotary embedding: one for each type of layers, or one for all."""
    whole = found or {}
    return [part for part in whole.values() if hasattr(part, "items")] or [whole]


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

"""EAGLE-3 heads in the layouts they are published in, against their formulas in plain torch."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.worker.runner_driver import tiny_checkpoint
from xpyd_core.errors import UserError
from xpyd_worker.kernels.api import Kernels, Span
from xpyd_worker.kernels.cpu.kernels import CpuKernels, choose_kernels
from xpyd_worker.kernels.plain import PlainKernels
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.draft_heads import read_eagle3
from xpyd_worker.model.eagle3 import Eagle3, load_eagle3
from xpyd_worker.model.registry import load_config

CPU = torch.device("cpu")
VOCAB, WIDTH, LAYERS, BLOCK = 307, 64, 5, 16
SINGLE = "model.safetensors"
LAYER = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
AUTHORS = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 120}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "model_type": "speculators",
    "draft_vocab_size": 120,
    "eagle_aux_hidden_state_layer_ids": [4, 0],
    "transformer_layer_config": {
        **LAYER,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "attention_bias": True,
        "mlp_bias": True,
    },
}
# A head that is narrower than its target, over the whole vocabulary.
NARROW = {
    **LAYER,
    "architectures": ["Eagle3LlamaForCausalLM"],
    "hidden_size": 32,
    "target_hidden_size": WIDTH,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3]},
}


@dataclass
class Head:
    """A head with random weights. `prefix`: of the names of its layer; `features`: of the layers
    that it reads."""

    config: dict[str, Any]
    features: tuple[int, ...]
    prefix: str = "midlayer."
    has_embedding: bool = False
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def layer(self) -> dict[str, Any]:
        return self.config.get("transformer_layer_config", self.config)

    @property
    def width(self) -> int:
        return self.layer["hidden_size"]

    @property
    def draft_tokens(self) -> int:
        return self.config.get("draft_vocab_size", VOCAB)

    def write(self, folder: Path) -> None:
        """Make the weights, and write it as it is published."""
        made = torch.Generator().manual_seed(5)
        layer, width, name = self.layer, self.width, self.prefix
        inner, rows = layer["intermediate_size"], layer["num_attention_heads"] * 32
        kv_rows = layer["num_key_value_heads"] * 32
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (width, len(self.features) * WIDTH),
            f"{name}self_attn.q_proj.weight": (rows, 2 * width),
            f"{name}self_attn.k_proj.weight": (kv_rows, 2 * width),
            f"{name}self_attn.v_proj.weight": (kv_rows, 2 * width),
            f"{name}self_attn.o_proj.weight": (width, rows),
            f"{name}mlp.gate_proj.weight": (inner, width),
            f"{name}mlp.up_proj.weight": (inner, width),
            f"{name}mlp.down_proj.weight": (width, inner),
            "lm_head.weight": (self.draft_tokens, width),
        }
        for one in ("self_attn", "mlp"):
            if layer.get(f"{'attention' if one == 'self_attn' else one}_bias"):
                biased = [n for n in shapes if n.startswith(f"{name}{one}.")]
                shapes |= {n.replace("weight", "bias"): shapes[n][:1] for n in biased}
        if self.has_embedding:
            shapes["embed_tokens.weight"] = (VOCAB, width)
        self.tensors = {
            one: torch.randn(shape, generator=made) * 0.15 for one, shape in shapes.items()
        }
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            self.tensors[f"{name}{norm}.weight"] = torch.rand(width, generator=made) + 0.5
        self.tensors["norm.weight"] = torch.rand(width, generator=made) + 0.5
        if self.draft_tokens < VOCAB:
            ids = torch.randperm(VOCAB, generator=made)[: self.draft_tokens].sort().values
            self.tensors["d2t"] = ids - torch.arange(self.draft_tokens)
            self.tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(
                0, ids, value=True
            )
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / SINGLE)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Reference:
    """The published formulas over one whole sequence: no cache, no batch."""

    def __init__(self, head: Head, embedding: Tensor) -> None:
        self._head, self._tensors = head, head.tensors
        self._embedding = head.tensors.get("embed_tokens.weight", embedding)

    def project(self, features: Tensor) -> Tensor:
        return features @ self._tensors["fc.weight"].T

    def run(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        embedded = _norm(self._embedding[token_ids], self._named("input_layernorm"))
        normed = _norm(hidden, self._named("hidden_norm"))
        is_before = "transformer_layer_config" in self._head.config
        residual = normed if is_before else hidden
        x = residual + self._attend(torch.cat((embedded, normed), dim=-1))
        inner = _norm(x, self._named("post_attention_layernorm"))
        gated = F.silu(self._linear("mlp.gate_proj", inner)) * self._linear("mlp.up_proj", inner)
        return x + self._linear("mlp.down_proj", gated)

    def best(self, hidden: Tensor) -> Tensor:
        tensors = self._tensors
        logits = _norm(hidden, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
        found = logits.argmax(-1)
        return found + tensors["d2t"][found] if "d2t" in tensors else found

    def _named(self, name: str) -> Tensor:
        return self._tensors[f"{self._head.prefix}{name}.weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._named(name), self._tensors.get(f"{self._head.prefix}{name}.bias"))

    def _attend(self, x: Tensor) -> Tensor:
        import transformers
        from transformers.models.llama.modeling_llama import (
            LlamaRotaryEmbedding,
            apply_rotary_pos_emb,
        )

        rotary: Any = LlamaRotaryEmbedding(transformers.LlamaConfig(**self._head.layer))
        cos, sin = rotary(x, torch.arange(len(x)).unsqueeze(0))
        query, key, value = (
            self._linear(f"self_attn.{one}_proj", x).view(1, len(x), -1, 32).transpose(1, 2)
            for one in "qkv"
        )
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        key, value = (one.repeat_interleave(2, dim=1) for one in (key, value))
        scores = (query @ key.transpose(2, 3)) / 32**0.5
        above = torch.ones(len(x), len(x)).triu(1).bool()
        out = scores.masked_fill(above, float("-inf")).softmax(-1) @ value
        return self._linear("self_attn.o_proj", out.transpose(1, 2).reshape(len(x), -1))


HEADS: dict[str, Callable[[], Head]] = {
    "authors": lambda: Head(AUTHORS, (2, 2, 2)),
    "authors' own embedding": lambda: Head(AUTHORS, (2, 2, 2), has_embedding=True),
    "speculators": lambda: Head(SPECULATORS, (4, 0), prefix="layers.0."),
    "narrow": lambda: Head(NARROW, (1, 2, 3, 4), has_embedding=True),
}


@dataclass(frozen=True)
class Target:
    folder: Path
    config: ModelConfig
    embedding: Tensor


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    tiny_checkpoint(folder, "llama", num_hidden_layers=LAYERS)
    embedding = load_file(folder / SINGLE)["model.embed_tokens.weight"]
    return Target(folder, load_config(folder), embedding)


def load(
    folder: Path, target: Target, kernels: Kernels | None = None, embedding: Tensor | None = None
) -> Eagle3:
    return load_eagle3(
        folder,
        target.config,
        target.folder,
        dtype=torch.float32,
        kernels=kernels or PlainKernels(),
        device=CPU,
        block_size_tokens=BLOCK,
        embedding=embedding,
    )


@dataclass
class Text:
    """A sequence: `tokens` of its prompt, features of each position but the last token's, its
    blocks; what was drafted behind it."""

    tokens: list[int]
    features: Tensor
    blocks: list[int]
    hidden: list[Tensor] = field(default_factory=list[Tensor])
    drafts: list[int] = field(default_factory=list[int])


def drafted(head: Eagle3, kernels: Kernels, texts: list[Text], count: int) -> None:
    """Prompts in chunks of several sizes beside each other, then `count` tokens behind each."""
    shape = head.shape
    assert (head.num_layers, shape.kv_heads, shape.head_dim, shape.block_size) == (1, 2, 32, BLOCK)
    size = (16, shape.kv_heads, BLOCK, 2 * shape.head_dim)
    # Whoever reads a slot that nobody wrote shows it.
    caches = [torch.full(size, float("nan"))]

    def step(rows: list[tuple[Text, int, list[int], Tensor]]) -> None:
        """(text, first position, the token behind each position, hidden states) of each."""
        rows = sorted(rows, key=lambda row: (len(row[2]) > 1, row[1]))
        spans = [Span(start, len(ids), text.blocks) for text, start, ids, _ in rows]
        positions = [
            place for span in spans for place in range(span.start, span.start + span.count)
        ]
        given = torch.cat([hidden for *_, hidden in rows])
        kept = given.clone()
        found = head.run(
            torch.tensor([token for _, _, ids, _ in rows for token in ids]),
            given,
            torch.tensor(positions),
            caches,
            kernels.plan(spans, shape),
        )
        assert torch.equal(given, kept), "the caller's hidden states are its own"
        for (text, *_), part in zip(rows, found.split([one.count for one in spans]), strict=True):
            text.hidden += part

    done, chunk = dict.fromkeys(range(len(texts)), 0), 5
    while any(done[one] < len(text.features) for one, text in enumerate(texts)):
        rows: list[tuple[Text, int, list[int], Tensor]] = []
        for one, text in enumerate(texts):
            start = done[one]
            end = done[one] = min(len(text.features), start + chunk + 7 * one)
            if end > start:
                behind = text.tokens[start + 1 : end + 1]
                rows.append((text, start, behind, head.project(text.features[start:end])))
        step(rows)
    for _ in range(count):
        last = torch.stack([text.hidden[-1] for text in texts])
        best = head.best(last)
        assert best.dtype is torch.int64
        for text, token in zip(texts, best.tolist(), strict=True):
            text.drafts.append(token)
        step([(text, len(text.hidden), text.drafts[-1:], text.hidden[-1][None]) for text in texts])


@pytest.mark.parametrize("is_compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("name", HEADS)
def test_it_drafts_what_the_published_formulas_draft(
    name: str, is_compiled: bool, target: Target, tmp_path: Path
) -> None:
    written = HEADS[name]()
    written.write(tmp_path)
    kernels: Kernels = PlainKernels()
    if is_compiled:
        layer = read_eagle3(tmp_path, target.config).layer
        kernels = choose_kernels(vector_sizes=layer.vector_sizes(), head_dim=layer.head_dim)
        assert isinstance(kernels, CpuKernels)
    made, reference = torch.Generator().manual_seed(3), Reference(written, target.embedding)
    rng = random.Random(8)
    texts = [
        Text(
            [rng.randrange(VOCAB) for _ in range(length + 1)],
            torch.randn(length, len(written.features) * WIDTH, generator=made),
            blocks,
        )
        for length, blocks in ((1, [9]), (37, [4, 0, 7]), (20, [12, 3]))
    ]
    with torch.inference_mode():
        head = load(tmp_path, target, kernels)
        drafted(head, kernels, texts, 6)
        assert head.feature_layers == written.features
        for text in texts:
            ids, hidden = [*text.tokens[1:]], reference.project(text.features)
            for place in range(6):
                out = reference.run(torch.tensor(ids), hidden)
                found = torch.stack(text.hidden[: len(out)])
                torch.testing.assert_close(found, out, atol=1e-3, rtol=1e-4)
                token = int(reference.best(out[-1]))
                assert text.drafts[place] == token
                ids, hidden = [*ids, token], torch.cat((hidden, out[-1:]))
    drafts = {token for text in texts for token in text.drafts}
    assert len(drafts) > 3, "they are not all alike"


def test_the_target_s_embedding_may_be_given(target: Target, tmp_path: Path) -> None:
    HEADS["authors"]().write(tmp_path)
    assert load(tmp_path, target, embedding=target.embedding).embedding is target.embedding
    torch.testing.assert_close(load(tmp_path, target).embedding, target.embedding)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (2, 2, 2)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4]}, (0, 4)),
        # SpecForge's and ModelOpt's name layers whose outputs are read.
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3]}}, (1, 4)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 2, 2)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 3],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]},
            },
            (1, 3),
        ),
    ],
)
def test_which_layers_it_reads(
    fields: dict[str, Any], layers: tuple[int, ...], target: Target, tmp_path: Path
) -> None:
    Head({**AUTHORS, **fields}, layers).write(tmp_path)
    assert read_eagle3(tmp_path, target.config).feature_layers == layers


def _without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("fc.weight"), ["lacks fc.weight"]),
        (_without("midlayer.hidden_norm.weight"), ["lacks midlayer.hidden_norm.weight"]),
        (_without("d2t"), ["lacks d2t", "307", "120"]),
        (_with("d2t", torch.full((120,), 300)), ["d2t", "token 307 for entry 7", "307 tokens"]),
        (_with("d2t", torch.arange(0, -120, -1) - 1), ["d2t", "token -1 for entry 0"]),
        (_with("d2t", torch.zeros(9, dtype=torch.int64)), ["d2t", "[9]", "120 whole numbers"]),
        (_with("d2t", torch.zeros(120)), ["d2t", "float32", "120 whole numbers"]),
        (_with("fc.weight", torch.zeros(64, 128)), ["fc.weight", "[64, 128]", "[64, 192]"]),
        (_with("fc_norm.0.weight", torch.zeros(64)), ["fc_norm.0.weight", "no place"]),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], object],
    words: list[str],
    target: Target,
    tmp_path: Path,
) -> None:
    Head(AUTHORS, (2, 2, 2)).write(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    change(tensors)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(UserError) as error:
        load(tmp_path, target)
    assert all(word in str(error.value) for word in words), str(error.value)


_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (AUTHORS | {"architectures": ["EagleLlamaForCausalLM"]}, ["architectures", "Eagle3"]),
        (AUTHORS | {"num_hidden_layers": 2}, ["num_hidden_layers is 2; supported: 1"]),
        (AUTHORS | {"model_type": "qwen3"}, ["model_type", "llama"]),
        (AUTHORS | {"layer_types": ["sliding_attention"]}, ["layer_types", "full_attention"]),
        (AUTHORS | {"hidden_size": 96}, ["hidden_size is 96", "the target's 64"]),
        (AUTHORS | {"target_hidden_size": 96}, ["target_hidden_size is 96", "the target's 64"]),
        (AUTHORS | {"vocab_size": 300}, ["vocab_size is 300", "the target's 307"]),
        (AUTHORS | {"draft_vocab_size": 308}, ["draft_vocab_size is 308", "307"]),
        (AUTHORS | {_IDS: [2, 5]}, [_IDS, "0 to 4"]),
        (AUTHORS | {_IDS: [True]}, [_IDS, "0 to 4"]),
        (AUTHORS | {"eagle_config": {_IDS: [4]}}, [f"eagle_config.{_IDS}", "0 to 3"]),
        (AUTHORS | {"eagle_config": 3}, ["eagle_config", "an object"]),
        (
            AUTHORS | {"eagle_config": {"use_aux_hidden_state": False}},
            ["eagle_config.use_aux_hidden_state is False; supported: true"],
        ),
        (AUTHORS | {"norm_output": True}, ["norm_output is True; supported: false"]),
        (
            AUTHORS | {"eagle_config": {"norm_before_fc": True}},
            ["eagle_config.norm_before_fc is True; supported: false"],
        ),
        (AUTHORS | {"quantization_config": {}}, ["quantization_config", "unquantized"]),
        (SPECULATORS | {"speculators_model_type": "peagle"}, ["speculators_model_type", "eagle3"]),
        (SPECULATORS | {"transformer_layer_config": 3}, ["transformer_layer_config", "an object"]),
        (
            SPECULATORS | {"transformer_layer_config": LAYER | {"hidden_size": 96}},
            ["config.json: transformer_layer_config: hidden_size is 96"],
        ),
    ],
)
def test_fields_that_do_not_fit_are_named(
    config: dict[str, Any], words: list[str], target: Target, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        read_eagle3(tmp_path, target.config)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert str(tmp_path / "config.json") in str(error.value), "the target has one, too"


def test_pickled_heads_and_missing_embeddings_are_refused(target: Target, tmp_path: Path) -> None:
    head, bare = tmp_path / "head", tmp_path / "bare"
    Head(NARROW, (1, 2, 3, 4)).write(head)
    with pytest.raises(UserError, match=r"lacks embed_tokens.weight.* 32 .* 64"):
        load(head, target)
    Head(AUTHORS, (2, 2, 2)).write(head)
    bare.mkdir()
    save_file({"lm_head.weight": torch.zeros(2, 2)}, bare / SINGLE)
    with pytest.raises(UserError, match=r"bare lacks model.embed_tokens.weight"):
        load(head, Target(bare, target.config, target.embedding))
    (head / SINGLE).rename(head / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickled weights .* convert them to safetensors"):
        load(head, target)

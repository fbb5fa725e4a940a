"""Tiny Mixtral and Qwen3-MoE models over the operators of a GPU, beside the same in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor

from tests.gpu.conftest import Kit
from xpyd_worker.kernels.api import Kernels, KvShape, Span
from xpyd_worker.kernels.plain import PlainKernels
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.decoder import Decoder
from xpyd_worker.model.registry import parse_config

BLOCK_SIZE = 16
STEPS = 4
SHARED: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 80,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 9,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 48,
        "intermediate_size": 96,
        "norm_topk_prob": True,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
}
# Of different lengths, one beyond a block.
PROMPTS = ([5, 9, 100, 3, 77], [*range(40, 59)], [210])


@dataclass(frozen=True)
class Model:
    """One model over one kind of operators; the weights are those of `stored` in any dtype."""

    config: ModelConfig
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype

    def logits(self, texts: Sequence[list[int]], *, extend: bool) -> Tensor:
        """[STEPS, texts, vocab] float32: what follows each prompt, then each further token. With
        `extend` the best token is appended to each text, else texts hold them."""
        decoder = Decoder(self.config, self.dtype, self.kernels, self.device)
        for group in decoder.weight_groups():
            group.allocate(self.device)
            for name, stored in group.checkpoint_tensors().items():
                for piece in stored.pieces:
                    piece.destination.copy_(_weight(name, stored.shape)[piece.slices])
            group.pack(self.kernels)
        shape = KvShape(self.config.num_kv_heads, self.config.head_dim, BLOCK_SIZE, self.dtype)
        size = (2 * len(texts), shape.kv_heads, BLOCK_SIZE, 2 * shape.head_dim)
        caches = [
            torch.zeros(size, dtype=self.dtype, device=self.device) for _ in self.config.layers
        ]
        found: list[Tensor] = []
        for step in range(STEPS):
            spans: list[Span] = []
            for index, prompt in enumerate(PROMPTS):
                end = len(prompt) + step
                start = end - 1 if step else 0
                spans.append(Span(start, end - start, (2 * index + 1, 2 * index)))
            # One-row spans first.
            order = sorted(range(len(texts)), key=lambda i: spans[i].count)
            placed = [spans[i] for i in order]
            rows = [texts[i][at] for i in order for at in _positions(spans[i])]
            hidden = decoder.forward(
                torch.tensor(rows, device=self.device),
                torch.tensor([at for span in placed for at in _positions(span)]).to(self.device),
                caches,
                self.kernels.plan(placed, shape),
                lambda layer: None,
            )
            ends = torch.tensor([span.count for span in placed]).cumsum(0) - 1
            logits = decoder.logits(hidden[ends.to(self.device)]).cpu()
            found.append(logits[torch.tensor(order).argsort()])
            for text, row in zip(texts, found[-1], strict=True):
                if extend:
                    text.append(int(row.argmax()))
        return torch.stack(found)


def _positions(span: Span) -> range:
    return range(span.start, span.start + span.count)


def _weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers of its own for each name, large enough that tokens differ."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
    return 1 + 0.2 * made if "norm" in name else 0.15 * made


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_writes_what_it_writes_in_plain_torch(kit: Kit, name: str) -> None:
    config = parse_config(SHARED | CONFIGS[name], {})
    cpu = torch.device("cpu")
    texts = [list(prompt) for prompt in PROMPTS]
    wanted = Model(config, PlainKernels(), cpu, torch.float32).logits(texts, extend=True)
    model = Model(config, kit.gpu.kernels.TritonKernels(kit.device), kit.device, kit.dtype)
    found = model.logits(texts, extend=False)
    # In 16 bits a router that is of two minds now and then takes another expert: the median.
    errors = (found - wanted).square().mean(-1).sqrt() / wanted.std()
    limit = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}[kit.dtype]
    assert float(errors.median()) < limit
    if kit.dtype == torch.float32:
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))
        assert len({tuple(text) for text in texts}) == len(texts)

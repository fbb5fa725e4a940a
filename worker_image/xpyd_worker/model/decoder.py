"""One decoder for the families that share Llama's shape; the configuration says which parts it has.

Takes a flat [tokens, hidden] batch without padding and a paged KV cache. Each layer stores its keys
and values, tells the caller, then attends. How each operator runs is the Kernels' matter
(xpyd_worker.kernels.api); which layers, and which share of each, a rank of several has, that of
xpyd_worker.parallel.api. It must not know requests, block management or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from xpyd_worker.engine.eplb import ExpertTurn
from xpyd_worker.engine.executor import LayerExperts, LayerMoves
from xpyd_worker.kernels.api import Kernels, Plan
from xpyd_worker.model.balancer import ExpertBalancer
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.experts import DealtExperts, ExpertMlps
from xpyd_worker.model.layers import (
    Attention,
    Linear,
    Mlp,
    Norm,
    Rotary,
    StepContext,
    unfilled,
)
from xpyd_worker.model.shards import Cut, Stored, all_of, by_name, whole
from xpyd_worker.parallel.api import NO_GROUP, ExpertGroup, Hidden, Part, TensorGroup

if TYPE_CHECKING:
    # A forward needs no safetensors.
    from xpyd_worker.model.loader import WeightGroup
    from xpyd_worker.parallel.stages import IncomingHidden
    from xpyd_worker.parallel.state import ParallelState


class DecoderLayer:
    """Attention and MLP or experts, each behind a norm and around a residual."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype,
        *,
        place: int,
        group: TensorGroup,
        whole_experts: ExpertGroup | None = None,
        redundant: int | None = None,
        is_elastic: bool = False,
    ) -> None:
        """Layer `index` of the model, which is `place` of those that are here. `redundant` and
        `is_elastic`: see ExpertMlps."""
        self._index = index
        self._attention = Attention(config, index, dtype, place=place, group=group)
        self._mlp, self._mlp_name = _feed_forward(
            config,
            index,
            dtype,
            group=group,
            whole_experts=whole_experts,
            redundant=redundant,
            is_elastic=is_elastic,
        )
        eps = config.rms_norm_eps
        self._input_norm = Norm(config.hidden_size, eps=eps, dtype=dtype)
        self._mlp_norm = Norm(config.hidden_size, eps=eps, dtype=dtype)

    def __call__(self, x: Tensor | None, residual: Tensor, step: StepContext) -> Tensor:
        """`x` [tokens, hidden] is what the layer before would add to `residual`, which is added to
        in place; what this layer would add is returned."""
        kernels, norm = step.kernels, self._input_norm
        if x is None:
            x = kernels.rms_norm(residual, norm.weight, norm.eps)
        else:
            x = kernels.add_rms_norm(x, residual, norm.weight, norm.eps)
        x = self._attention(x, step)
        norm = self._mlp_norm
        return self._mlp(kernels.add_rms_norm(x, residual, norm.weight, norm.eps), step)

    def join(self, device: torch.device) -> None:
        """See Decoder.join."""
        if isinstance(self._mlp, ExpertMlps):
            self._mlp.join(device)

    @property
    def experts(self) -> ExpertMlps | None:
        """Its experts, if it has any."""
        return self._mlp if isinstance(self._mlp, ExpertMlps) else None

    def deal(self) -> DealtExperts | None:
        """See Decoder.deal."""
        experts = self.experts
        return None if experts is None else experts.deal(self._prefix + self._mlp_name + ".")

    @property
    def _prefix(self) -> str:
        return f"model.layers.{self._index}."

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        for part in (self._attention, self._mlp, self._input_norm, self._mlp_norm):
            part.allocate(device)

    def pack(self, kernels: Kernels) -> None:
        """Hand the weights to the kernels, once all are read."""
        self._attention.pack(kernels)
        self._mlp.pack(kernels)

    def checkpoint_tensors(self) -> dict[str, Stored]:
        """Checkpoint name -> where it goes."""
        prefix = self._prefix
        return {
            f"{prefix}input_layernorm.weight": all_of(self._input_norm.weight),
            f"{prefix}post_attention_layernorm.weight": all_of(self._mlp_norm.weight),
            **self._attention.checkpoint_tensors(f"{prefix}self_attn."),
            **self._mlp.checkpoint_tensors(f"{prefix}{self._mlp_name}."),
        }


def _feed_forward(
    config: ModelConfig,
    index: int,
    dtype: torch.dtype,
    *,
    group: TensorGroup,
    whole_experts: ExpertGroup | None,
    redundant: int | None,
    is_elastic: bool,
) -> tuple[Mlp | ExpertMlps, str]:
    """What follows attention in a layer, and its name in the checkpoint."""
    experts = config.layers[index].experts
    if experts is not None:
        block = ExpertMlps(
            config.hidden_size,
            experts,
            dtype,
            group=group,
            whole_experts=whole_experts,
            redundant=redundant,
            is_elastic=is_elastic,
        )
        return block, experts.block
    mlp = Mlp(
        config.hidden_size,
        config.intermediate_size,
        bias=config.mlp_bias,
        names=config.names.mlp,
        dtype=dtype,
        group=group,
    )
    return mlp, "mlp"


class Decoder:
    """A rank's part of the model, to be loaded to `device`. It has no memory until the loader
    filled its `weight_groups`."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        kernels: Kernels,
        device: torch.device,
        *,
        parallel: ParallelState | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> None:
        """`parallel`: which layers, and the ranks that share each of them; None: all of it.
        `feature_layers`: the layers of the model whose inputs are kept for `take_features`."""
        self.part, group, experts = Part(layers=range(config.num_layers)), NO_GROUP, None
        if parallel is not None:
            self.part, group, experts = parallel.part, parallel.tensor, parallel.experts
        self._kernels = kernels
        self._ends = Ends(config, dtype, self.part, group)
        self._layers = [
            DecoderLayer(
                config,
                index,
                dtype,
                place=place,
                group=group,
                whole_experts=experts,
                redundant=self.part.redundant_experts,
                is_elastic=self.part.is_elastic,
            )
            for place, index in enumerate(self.part.layers)
        ]
        self._rotary = Rotary(config, device)
        self._feature_layers = feature_layers
        # Each stage hands them on; of the last one only the rank that drafts needs them.
        needs_them = self.part.answers or not self.part.is_last
        self._kept_layers = feature_layers if needs_them else ()
        self._features: dict[int, Tensor] = {}
        self._with_experts = [n for n in self.part.layers if config.layers[n].experts is not None]
        most = max((one.count for one in config.experts), default=0)
        self._chosen = torch.zeros(len(self._with_experts), most, dtype=torch.int64, device=device)
        self._counts_all_rows = self.part.exchanges_rows
        self._experts = experts
        self._balancer: ExpertBalancer | None = None

    def experts_chosen(self) -> tuple[LayerExperts, ...]:
        """Of the rows that this rank has routed, by layer. Any thread; waits for the device."""
        counts = cast("list[list[int]]", cast("Any", self._chosen).tolist())
        moves: Sequence[LayerMoves | None] = [None] * len(counts)
        # One rank of the group says what all do.
        if self._balancer is not None and self._experts is not None and not self._experts.rank:
            moves = self._balancer.moves
        return tuple(
            LayerExperts(layer, tuple(tokens), moved)
            for layer, tokens, moved in zip(self._with_experts, counts, moves, strict=True)
        )

    def begin_step(self, turn: ExpertTurn) -> None:
        """Do about experts what the step says, before its forward. GroupError."""
        if self._balancer is not None:
            self._balancer.begin_step(turn)

    def forget_chosen(self) -> None:
        """Count from here on: what came before were trials. Experts may move from here on."""
        self._chosen.zero_()
        if self._experts is not None and self.part.redundant_experts is not None:
            blocks = [layer.experts for layer in self._layers if layer.experts is not None]
            self._balancer = ExpertBalancer(blocks, self._chosen, self._experts)

    def deal(self) -> Sequence[WeightGroup]:
        """The group that shares experts has other ranks: this one's among them, to be loaded."""
        return [dealt for layer in self._layers if (dealt := layer.deal()) is not None]

    @property
    def num_layers(self) -> int:
        """Layers that are here."""
        return len(self._layers)

    def weight_groups(self) -> Sequence[WeightGroup]:
        """Its weights in the pieces they are read and packed in."""
        return (self._ends, *self._layers)

    def forward(
        self,
        entering: Tensor | IncomingHidden,
        positions: Tensor,
        caches: Sequence[Tensor],
        plan: Plan,
        kv_stored: Callable[[int], None],
    ) -> Tensor:
        """Hidden states [tokens, hidden] before the last norm; on the last stage. See `stage`."""
        last = self.stage(entering, positions, caches, plan, kv_stored)
        return last.residual.add_(last.x)

    def stage(
        self,
        entering: Tensor | IncomingHidden,
        positions: Tensor,
        caches: Sequence[Tensor],
        plan: Plan,
        kv_stored: Callable[[int], None],
    ) -> Hidden:
        """What the layers that are here make of a flat batch.

        `entering` are token ids on the first stage, else what the stage before gives, which is
        waited for when all else is ready. Token ids and `positions` are [tokens] int64, `caches`
        one per layer that is here, `plan` of the model's kernels. Layer i of those that are here
        calls `kv_stored(i)` when the keys and values of all tokens are in its cache.
        """
        step = StepContext(self._kernels, self._rotary(positions), caches, plan, kv_stored)
        x: Tensor | None = None
        if isinstance(entering, Tensor):
            residual = self._ends.embed(entering)
            features: dict[int, Tensor] = {}
        else:
            x, residual, before = entering.get()
            features = dict(zip(self._features_before, before, strict=True))
            if self.part.is_last and self._kept_layers:
                # The next step comes into the same memory.
                features = {layer: one.clone() for layer, one in features.items()}
        for index, layer in zip(self.part.layers, self._layers, strict=True):
            if index in self._kept_layers:
                features[index] = residual.clone() if x is None else residual + x
            x = layer(x, residual, step)
        if step.chosen:
            # Rows that are dealt out to a replica's ranks are not the plan's.
            rows_of = None if self._counts_all_rows else plan
            self._kernels.count_chosen(self._chosen, torch.stack(step.chosen), rows_of)
        assert x is not None, "a stage has a layer"
        if self.part.is_last:
            self._features = features if self._kept_layers else {}
            return Hidden(x, residual)
        return Hidden(x, residual, tuple(features.values()))

    def take_features(self) -> tuple[Tensor, ...]:
        """The inputs of the feature layers in the last forward, which are forgotten then: [tokens,
        hidden] each, in the order in which the layers were named; of no layer where none is kept.
        On the last stage, before the next step begins."""
        features, self._features = self._features, {}
        return tuple(features[layer] for layer in self._feature_layers) if features else ()

    @property
    def keeps_features(self) -> bool:
        """Whether `take_features` has some, on the last stage."""
        return bool(self._feature_layers)

    @property
    def embedding(self) -> Tensor | None:
        """That of all tokens, [vocabulary, hidden]; None where other ranks have it, or a part of
        it."""
        return self._ends.embedding

    @property
    def _features_before(self) -> list[int]:
        """The feature layers of the stages before, in the order in which they come."""
        return sorted({layer for layer in self._feature_layers if layer < self.part.layers.start})

    def join(self) -> None:
        """Take part, without rows, in a forward that other replicas make: their rows come to the
        experts that are here, layer by layer. Nothing else of a forward is shared with them."""
        for layer in self._layers:
            layer.join(self._chosen.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Last norm and head over chosen rows [rows, hidden] -> float32 [rows, vocab]; on the last
        stage."""
        return self._ends.logits(hidden, self._kernels)

    def normed(self, hidden: Tensor) -> Tensor:
        """The last norm alone over chosen rows [rows, hidden]; on the last stage."""
        return self._ends.normed(hidden, self._kernels)


# Rows of a vocabulary's share are a multiple: what matrix kernels take in one go, and vLLM pads to.
_ROWS = 64
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"


class Embedding:
    """Token ids to vectors. Its rows have no memory before `allocate`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, group: TensorGroup) -> None:
        self._group, self._rows = group, vocabulary_share(config.vocab_size, group)
        size = (padded_rows(config.vocab_size, group), config.hidden_size)
        self.weight = torch.empty(size, dtype=dtype, device="meta")

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden], the caller's to write to."""
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        own = token_ids - self._rows.held.start
        elsewhere = (own < 0) | (own >= self.weight.shape[0])
        x = F.embedding(own.masked_fill_(elsewhere, 0), self.weight)
        return self._group.all_reduce(x.masked_fill_(elsewhere.unsqueeze(1), 0))

    @property
    def is_whole(self) -> bool:
        """Whether all tokens are here."""
        return self._group.size == 1

    def allocate(self, device: torch.device) -> None:
        """Memory; what pads the vocabulary is zeros."""
        self.weight = unfilled(self.weight, device)
        self.weight[len(self._rows.held) :].zero_()

    def checkpoint_tensors(self) -> dict[str, Stored]:
        """Checkpoint name -> where it goes."""
        held = self.weight[: len(self._rows.held)]
        width = whole(self.weight.shape[1])
        return by_name(held, "model.", (_EMBEDDING,), rows=(self._rows,), columns=width)


class Head:
    """Last norm and head."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, group: TensorGroup) -> None:
        self._group, self._vocab_size = group, config.vocab_size
        self._rows = vocabulary_share(config.vocab_size, group)
        self._hidden = whole(config.hidden_size)
        rows = whole(padded_rows(config.vocab_size, group))
        self._linear = Linear(self._hidden, (rows,), bias=False, dtype=dtype)
        self._norm = Norm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self._name = "model." + _EMBEDDING if config.tie_word_embeddings else _HEAD

    @property
    def weight(self) -> Tensor:
        """A parameter of this layer, between `allocate` and `pack`."""
        return self._linear.weight

    def __call__(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """[rows, hidden] -> float32 [rows, vocab], the same on each rank."""
        logits = self._linear(self.normed(hidden, kernels))
        if self._group.size == 1:
            return logits.to(torch.float32)
        logits = self._group.all_gather(logits)[:, : self._vocab_size]
        return logits.to(torch.float32).contiguous()

    def normed(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """The last norm over [rows, hidden]."""
        return kernels.rms_norm(hidden, self._norm.weight, self._norm.eps)

    def allocate(self, device: torch.device) -> None:
        """Memory; what pads the vocabulary is zeros."""
        self._linear.allocate(device)
        self._linear.weight[len(self._rows.held) :].zero_()
        self._norm.allocate(device)

    def pack(self, kernels: Kernels) -> None:
        """Hand the weights to the kernels, once all are read."""
        self._linear.pack(kernels)

    def checkpoint_tensors(self) -> dict[str, Stored]:
        """Checkpoint name -> where it goes."""
        held = self._linear.weight[: len(self._rows.held)]
        return {
            "model.norm.weight": all_of(self._norm.weight),
            **by_name(held, "", (self._name,), rows=(self._rows,), columns=self._hidden),
        }


class Ends:
    """What of both a stage has; tied, and on one stage, they are in the same memory, but for what
    the kernels pack."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, part: Part, group: TensorGroup
    ) -> None:
        self._embedding = Embedding(config, dtype, group) if part.is_first else None
        self._head = Head(config, dtype, group) if part.is_last else None
        self._is_tied = config.tie_word_embeddings

    @property
    def embedding(self) -> Tensor | None:
        """See Decoder."""
        if self._embedding is None or not self._embedding.is_whole:
            return None
        return self._embedding.weight

    def embed(self, token_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden], the caller's to write to. On the first stage."""
        assert self._embedding is not None, "tokens enter at the first stage"
        return self._embedding(token_ids)

    def logits(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """Last norm and head over [rows, hidden] -> float32 [rows, vocab]. On the last stage."""
        assert self._head is not None, "tokens are drawn at the last stage"
        return self._head(hidden, kernels)

    def normed(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """Last norm over [rows, hidden]. On the last stage."""
        assert self._head is not None, "the last norm is on the last stage"
        return self._head.normed(hidden, kernels)

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        if self._head is not None:
            self._head.allocate(device)
        if self._embedding is not None and self._head is not None and self._is_tied:
            self._embedding.weight = self._head.weight
        elif self._embedding is not None:
            self._embedding.allocate(device)

    def pack(self, kernels: Kernels) -> None:
        """Hand the weights to the kernels, once all are read."""
        if self._head is not None:
            self._head.pack(kernels)

    def checkpoint_tensors(self) -> dict[str, Stored]:
        """Checkpoint name -> where it goes."""
        ends = (self._embedding, self._head)
        return {
            name: stored
            for end in ends
            if end is not None
            for name, stored in end.checkpoint_tensors().items()
        }


def padded_rows(vocab_size: int, group: TensorGroup) -> int:
    """Rows of the vocabulary on each rank: all of them where there is one."""
    if group.size == 1:
        return vocab_size
    each = -(-vocab_size // group.size)
    return -(-each // _ROWS) * _ROWS


def vocabulary_share(vocab_size: int, group: TensorGroup) -> Cut:
    """This rank's tokens; without padding, so that the last ranks may have few or none."""
    each = padded_rows(vocab_size, group)
    first = min(group.rank * each, vocab_size)
    return Cut(vocab_size, range(first, min(first + each, vocab_size)))

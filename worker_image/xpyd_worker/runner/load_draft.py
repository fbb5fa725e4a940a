"""From `--speculative-config` to a drafter: a whole draft model, or heads on the model's states.

Every rank opens it, since the model's hidden states are kept where heads read them; one loads it:
the one that answers steps. Slow and blocking.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from xpyd_core.errors import UserError
from xpyd_core.parallel.ranks import ONE_RANK
from xpyd_worker.config import WorkerConfig
from xpyd_worker.engine.speculation import FLAG, SpeculativeConfig
from xpyd_worker.kernels.api import Kernels, KvShape
from xpyd_worker.kernels.cpu.kernels import choose_kernels
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.decoder import Decoder
from xpyd_worker.model.decoder_draft import DecoderDraft
from xpyd_worker.model.draft_heads import read_eagle3, read_medusa
from xpyd_worker.model.eagle3 import load_eagle3
from xpyd_worker.model.loader import WeightGroup, load_weights
from xpyd_worker.model.medusa import load_medusa
from xpyd_worker.model.registry import load_config, resolve_checkpoint
from xpyd_worker.model.shards import weight_bytes
from xpyd_worker.runner.device import CPU, CudaDevice
from xpyd_worker.runner.drafter import Drafter, HeadsDrafter
from xpyd_worker.runner.gpu_memory import check_gpu_heads
from xpyd_worker.runner.kv_cache import KvCache, cache_bytes
from xpyd_worker.runner.model_drafter import DraftModel, ModelDrafter

_MOST_PADDING = 1024
"""Tokens by which two vocabularies of one tokenizer may differ: what pads them."""


@dataclass(frozen=True)
class LoadedDraft:
    """What drafts, loaded. `block_bytes`: of the KV cache that it has beside each block of the
    model's; `make` gives it a cache of so many blocks."""

    block_bytes: int
    make: Callable[[int], Drafter]


@dataclass(frozen=True)
class DraftSource:
    """What drafts for the model in `target_folder`, as its configuration says. `feature_layers`: of
    the model, whose inputs it reads."""

    config: SpeculativeConfig
    folder: Path
    target: ModelConfig
    target_folder: Path
    block_size: int
    most_sequences: int
    feature_layers: tuple[int, ...] = ()

    def load(
        self, model: Decoder, *, dtype: torch.dtype, gpu: CudaDevice | None = None
    ) -> LoadedDraft:
        """Read it to the GPU, or the CPU, where `model` is loaded. UserError for files that do not
        fit."""
        device = CPU if gpu is None else gpu.torch_device
        with _named(str(self.folder)):
            match self.config.method:
                case "medusa":
                    return self._load_medusa(model, dtype, device, gpu)
                case "eagle3":
                    return self._load_eagle3(model, dtype, device, gpu)
                case _:
                    return self._load_model(dtype, device, gpu)

    def _load_model(
        self, dtype: torch.dtype, device: torch.device, gpu: CudaDevice | None
    ) -> LoadedDraft:
        draft = _draft_model(self.folder, self.target)
        kernels = _kernels(draft, gpu)
        model = Decoder(draft, dtype, kernels, device)
        groups = model.weight_groups()
        load_weights(
            self.folder,
            groups,
            kernels=kernels,
            device=device,
            is_tied=draft.tie_word_embeddings,
        )
        shape = KvShape(draft.num_kv_heads, draft.head_dim, self.block_size, dtype)
        guesses = DecoderDraft(model, draft.vocab_size, of=self.target.vocab_size)
        cache = _Cache(shape, draft.num_layers, device)
        return self._with_cache(guesses, kernels, cache, _bytes_of(groups))

    def _load_eagle3(
        self, model: Decoder, dtype: torch.dtype, device: torch.device, gpu: CudaDevice | None
    ) -> LoadedDraft:
        kernels = _kernels(read_eagle3(self.folder, self.target).layer, gpu)
        head = load_eagle3(
            self.folder,
            self.target,
            self.target_folder,
            dtype=dtype,
            kernels=kernels,
            device=device,
            block_size_tokens=self.block_size,
            embedding=model.embedding,
        )
        cache = _Cache(head.shape, head.num_layers, device)
        weights = _bytes_of([head])
        if head.embedding is not model.embedding:
            weights += head.embedding.numel() * head.embedding.itemsize
        return self._with_cache(head, kernels, cache, weights)

    def _load_medusa(
        self, model: Decoder, dtype: torch.dtype, device: torch.device, gpu: CudaDevice | None
    ) -> LoadedDraft:
        kernels = _kernels(self.target, gpu)
        heads = load_medusa(self.folder, self.target, dtype=dtype, kernels=kernels, device=device)
        drafter = HeadsDrafter(heads, model.normed, weight_bytes=_bytes_of(heads.heads))
        return LoadedDraft(0, lambda _: drafter)

    def _with_cache(
        self,
        model: DraftModel,
        kernels: Kernels,
        cache: _Cache,
        weights: int,
    ) -> LoadedDraft:
        def make(blocks: int) -> Drafter:
            return ModelDrafter(
                model,
                kernels,
                cache.of(blocks),
                weight_bytes=weights,
                most_sequences=self.most_sequences,
            )

        return LoadedDraft(cache.block_bytes, make)


@dataclass(frozen=True)
class _Cache:
    """The KV cache of what drafts, to be made."""

    shape: KvShape
    layers: int
    device: torch.device

    @property
    def block_bytes(self) -> int:
        return cache_bytes(self.shape, num_layers=self.layers, num_blocks=1)

    def of(self, blocks: int) -> KvCache:
        """One of so many blocks."""
        memory = None
        if self.device != CPU:
            size = self.block_bytes * blocks
            memory = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return KvCache(self.shape, num_layers=self.layers, num_blocks=blocks, memory=memory)


def open_draft(
    config: WorkerConfig, target: ModelConfig, target_folder: Path
) -> DraftSource | None:
    """What `--speculative-config` names for the model in `target_folder`; None where no model
    drafts. UserError names the key and the file."""
    given = config.drafts
    if given is None or not given.has_model:
        return None
    features: tuple[int, ...] = ()
    with _named(given.model):
        folder = resolve_checkpoint(given.model)
        match given.method:
            case "medusa":
                read_medusa(folder, target)
            case "eagle3":
                features = read_eagle3(folder, target).feature_layers
            case _:
                _draft_model(folder, target)
    return DraftSource(
        given,
        folder,
        target,
        target_folder,
        config.block_size,
        2 * config.max_num_seqs,  # those that run, and as many that were preempted
        features,
    )


@contextmanager
def _named(model: str) -> Generator[None]:
    """What is wrong is the draft's."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{FLAG}: {model}: {error}") from error


def _draft_model(folder: Path, target: ModelConfig) -> ModelConfig:
    draft = load_config(folder)
    if abs(draft.vocab_size - target.vocab_size) > _MOST_PADDING:
        raise UserError(
            f"config.json: vocab_size: {draft.vocab_size}, the model has {target.vocab_size}: a "
            "draft model has the tokenizer of the model"
        )
    return draft


def _bytes_of(groups: Sequence[WeightGroup]) -> int:
    return weight_bytes(group.checkpoint_tensors() for group in groups)


def _kernels(draft: ModelConfig, gpu: CudaDevice | None) -> Kernels:
    if gpu is not None:
        check_gpu_heads(draft)
        return gpu.kernels()
    sizes = draft.vector_sizes(ONE_RANK)
    return choose_kernels(vector_sizes=sizes, head_dim=draft.head_dim)

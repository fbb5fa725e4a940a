"""Build an engine over a loaded model: tokenizer, blocks, KV transfer, scheduler, samples.

The one way to an engine, for main and for offline use. The model is on one rank (`one_rank`), or on
several in processes of their own, which are started here; nothing else is. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from xpyd_core.compat import compat_factors, compat_key
from xpyd_core.errors import UserError
from xpyd_core.keys import Keys
from xpyd_core.messages import ReplicaBeat
from xpyd_core.parallel.checks import check_parallel
from xpyd_core.request_id import Address
from xpyd_core.tokenizer_files import ServedFiles, TokenizerFiles
from xpyd_kv.connector.build import MakeStore
from xpyd_kv.ranks.engine import RankedEngine, RankedMemory
from xpyd_worker.config import WorkerConfig
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.core import Deliver, EngineCore, LockStep
from xpyd_worker.engine.executor import Resize
from xpyd_worker.engine.inbox import Inbox
from xpyd_worker.engine.open_requests import StopRules
from xpyd_worker.engine.request import EngineStats, SchedulerConfig
from xpyd_worker.kv.engine import HeldKv, Kv, KvParts, make_kv
from xpyd_worker.load.ready_model import ReadyModel, log_memory, ranks_memory_table
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.registry import Checkpoint, own_name, read_checkpoint
from xpyd_worker.parsers.registry import AUTO, Parsers, find_parsers
from xpyd_worker.ranks.executor import RankedExecutor
from xpyd_worker.ranks.instance import Instance
from xpyd_worker.ranks.loss import Loss
from xpyd_worker.ranks.pods.pods import Pods
from xpyd_worker.ranks.start.messages import Logs, RankReady
from xpyd_worker.ranks.step.encoder import StepEncoder
from xpyd_worker.ranks.step.messages import slot_count
from xpyd_worker.ranks.world import World
from xpyd_worker.runner.tokenizer import Tokenizer
from xpyd_worker.server.service import KvPlace, ServedModel
from xpyd_worker.server.telemetry.expert_metrics import expert_samples
from xpyd_worker.server.telemetry.metrics import (
    AnySample,
    rank_samples,
    samples_of,
)
from xpyd_worker.system import give_back

_log = logging.getLogger(__name__)
_OWN_LOGS = Logs()


@dataclass(frozen=True)
class LoadedEngine:
    """All parts, none started. `compatibility` is the key that P and D must share."""

    model: ServedModel
    engine: EngineCore
    ready: ReadyModel
    kv: Kv
    compatibility: str
    socket_dir: Path | None
    """The folder of Unix sockets, those of ranks among them."""

    @property
    def loss(self) -> Loss | None:
        """Which rank was lost; None while all are there, or there are none."""
        instance = self.ready.instance
        return None if instance is None else instance.loss

    @property
    def threads(self) -> set[int]:
        """Idents of those that `close` waits for, but for the engine's."""
        instance = self.ready.instance
        return set() if instance is None else instance.threads

    def start(self) -> None:
        """Start the KV transfer, the engine, and have the ranks watch this process. UserError when
        the KV address is taken."""
        self.kv.start()
        self.engine.start()
        if self.ready.instance is not None:
            self.ready.instance.be_watched()

    def close(self, *, engine_s: float, kv_s: float) -> None:
        """End the engine, the KV transfer and the ranks, in this order; the first two have so much
        time."""
        self.engine.stop(engine_s)
        self.kv.close(kv_s)
        instance = self.ready.instance
        if instance is not None:
            instance.close(in_order=instance.loss is None and not self.engine.is_running)
        if self.ready.kv is not None:
            self.ready.kv.clear(self.socket_dir)

    def stats(self) -> EngineStats:
        """The engine's counters; what entered forwards as the runner counted it."""
        counters = self.ready.executor.counters
        return replace(
            self.engine.stats(),
            forwards=counters.forwards,
            prompt_tokens_computed=counters.prompt_tokens_computed,
            output_tokens_computed=counters.output_tokens_computed,
        )

    def samples(self, stats: EngineStats) -> Iterable[AnySample]:
        """The samples of its KV transfer, its experts and its ranks."""
        yield from samples_of(self.kv, stats)
        yield from expert_samples(self.ready.experts_chosen())
        yield from self.rank_samples()

    def kv_places(self) -> Sequence[KvPlace]:
        """See Service: the one address is the instance's."""
        return ()

    def beats(self) -> tuple[ReplicaBeat, ...]:
        """What a heartbeat says of each replica: there are none."""
        return ()

    def rank_samples(self) -> Iterable[AnySample]:
        """The samples of its ranks. Those of several replicas count through all of them."""
        instance = self.ready.instance
        if instance is not None:
            yield from rank_samples(
                instance.sizes,
                shown=instance.show(),
                ready=instance.ready,
                fits=instance.fits,
                first=instance.first_rank,
            )


def load(
    config: WorkerConfig,
    *,
    deliver: Deliver,
    keys: Keys,
    incarnation: str,
    make_store: MakeStore | None,
    logs: Logs = _OWN_LOGS,
    checkpoint: Checkpoint | None = None,
    load_tokenizer: Callable[[], Tokenizer] | None = None,
    world: World | None = None,
    pods: Pods | None = None,
    lock_step: LockStep | None = None,
) -> LoadedEngine:
    """Load what `config` names. UserError for a checkpoint or a size that cannot work. `logs`: how
    ranks in processes of their own log. `checkpoint`: where it has been read. `load_tokenizer`:
    where several engines share one. `world`, `lock_step`: where replicas share experts;
    `pods`: see Instance."""
    checkpoint = checkpoint or read_checkpoint(config)
    folder, model_config = checkpoint.folder, checkpoint.model
    with ExitStack() as loads, ExitStack() as stack:
        if load_tokenizer is None:
            load_tokenizer = loads.enter_context(tokenizer_of(config, folder))
        ready = _make_ready(
            config,
            folder,
            model_config,
            lambda: load_ranks(
                *(config, logs, incarnation, world, pods),
                await_repair=lock_step.await_repair
                if lock_step is not None and config.outlives_replicas
                else None,
            ),
        )
        if ready.instance is not None:
            stack.callback(ready.instance.close)
        tokenizer = load_tokenizer()
        max_model_len = _context(config, model_config, ready)
        # Without a revision the weights' own fingerprint is in the key, which is what matters.
        factors = compat_factors(
            folder,
            model=own_name(config.model, folder),
            revision="",
            kv_dtype=ready.dtype,
            encrypted=config.kv_encrypted,
        )
        pool = BlockManager(
            ready.executor.num_blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.prefix_caching,
        )
        inbox = Inbox()
        kv, held = Kv(), ready.kv
        if held is not None:
            ranked, size = held.ranks, ready.cache_bytes
            if ranked is not None:
                size = ready.executor.num_blocks * ranked.layout.held_bytes_per_block
            parts = KvParts(
                held=held,
                pool=pool,
                wake=inbox.wake,
                factors=factors,
                keys=keys,
                incarnation=incarnation,
                max_model_len=max_model_len,
                buffer_bytes=config.buffer_bytes(size),
            )
            kv = make_kv(config, parts, make_store if ranked is None else None)
        give_back()
        log_memory(ready.memory())
        engine = EngineCore(
            ready.executor,
            pool=pool,
            inbox=inbox,
            config=SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.batched_tokens(on_gpu=ready.on_gpu),
                recompute_without_kv=config.kv_recompute,
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                policy=config.scheduling_policy,
                speculative=config.drafts,
                latency_goal=config.latency_goal,
            ),
            rules=StopRules(model_config.eos_token_ids, max_model_len),
            deliver=deliver,
            producer=kv.connector.producer if kv.connector else None,
            consumer=kv.connector.consumer if kv.connector else None,
            lock_step=lock_step,
        )
        model = _served_model(config, checkpoint, tokenizer, max_model_len)
        key = compat_key(factors) + _told_of_chats(config, model.parsers, tokenizer)
        loaded = LoadedEngine(model, engine, ready, kv, key, config.kv_socket_dir)
        stack.pop_all()
    return loaded


@contextmanager
def tokenizer_of(config: WorkerConfig, folder: Path) -> Generator[Callable[[], Tokenizer]]:
    """What loads it. Ranks import torch meanwhile; in one process there would be nothing to win."""
    if not config.has_ranks:
        yield partial(Tokenizer.load, folder, chat_template=config.chat_template)
        return
    with ThreadPoolExecutor(1, "tokenizer") as pool:
        load = partial(Tokenizer.load, folder, chat_template=config.chat_template)
        yield pool.submit(load).result


def _served_model(
    config: WorkerConfig, checkpoint: Checkpoint, tokenizer: Tokenizer, max_model_len: int
) -> ServedModel:
    """What the server has of the model."""
    folder, model_config, defaults = checkpoint
    templates = list(tokenizer.chat_templates.values())
    knows_developer = any("developer" in template for template in templates)
    parsers = find_parsers(config.tool_call_parser, config.reasoning_parser, templates)
    if config.enable_auto_tool_choice and parsers.tools is None:
        raise UserError(
            "--enable-auto-tool-choice: how the model writes tool calls is not known from its chat "
            "template; give --tool-call-parser"
        )
    files = TokenizerFiles(
        tokenizer=tokenizer.to_json(),
        chat_templates=tokenizer.chat_templates,
        special_tokens=tokenizer.template_variables,
        knows_developer=knows_developer,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        prefix_caching=config.prefix_caching,
    )
    model = ServedModel(
        names=config.served_model_names or (own_name(config.model, folder),),
        tokenizer=tokenizer,
        eos_token_ids=frozenset(model_config.eos_token_ids),
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        created=int(time.time()),
        knows_developer=knows_developer,
        files=ServedFiles.of(files),
        defaults=defaults,
        parsers=parsers,
    )
    _log_parsers(parsers, templates)
    # Asks every token of the vocabulary; now, not when the first long prompt waits for it.
    _ = model.max_token_bytes
    return model


def _make_ready(
    config: WorkerConfig,
    folder: Path,
    model: ModelConfig,
    on_ranks: Callable[[], ReadyModel],
) -> ReadyModel:
    """The model, here or on ranks. What one rank needs of torch is imported only for it."""
    check_parallel(model.shape, config.sizes, config.layer_partition)
    if config.has_ranks:
        return on_ranks()
    from xpyd_worker.load.one_rank import load_one_rank

    return load_one_rank(config, folder, model)


def load_ranks(
    config: WorkerConfig,
    logs: Logs,
    incarnation: str,
    world: World | None = None,
    pods: Pods | None = None,
    await_repair: Callable[[], Resize] | None = None,
) -> ReadyModel:
    """Start the ranks and have each load its part. UserError for what the user can mend,
    RankLostError for the rest; no rank is left then. `world`, `pods`: see Instance; `await_repair`:
    RankedExecutor."""
    instance = Instance(config, logs=logs, incarnation=incarnation, world=world, pods=pods)
    try:
        ready = instance.start()
    except BaseException:
        instance.close()
        raise
    first = ready[0]
    return ReadyModel(
        executor=executor_of(config, instance, first, await_repair),
        dtype=first.dtype,
        cache_bytes=sum(one.cache_bytes for one in ready),
        on_gpu=first.on_gpu,
        memory=lambda: ranks_memory_table(config, ready),
        experts_chosen=instance.experts_chosen,
        kv=_ranked_kv(instance, ready),
        instance=instance,
    )


def executor_of(
    config: WorkerConfig,
    instance: Instance,
    first: RankReady,
    await_repair: Callable[[], Resize] | None = None,
) -> RankedExecutor:
    """The executor of an instance that has started; `first`: what its rank 0 has. `await_repair`:
    see RankedExecutor."""
    sizes = config.sizes
    return RankedExecutor(
        instance,
        num_blocks=first.blocks,
        depth=sizes.depth(first.depth),
        draws_ahead=sizes.pipeline == 1 and first.depth > 1,
        encoder=StepEncoder(slot_count(config.max_num_seqs)),
        eplb=config.eplb,
        await_repair=await_repair,
    )


def _ranked_kv(instance: Instance, ready: Sequence[RankReady]) -> HeldKv | None:
    """The KV transfer of an engine with ranks; None where KV does not move."""
    kv = ready[0].kv
    if kv is None:
        return None
    ranks = RankedEngine(
        layout=kv.engine,
        channels=instance.channels,
        dtype=ready[0].dtype,
        head_dim=kv.head_dim,
        on_device=ready[0].on_gpu,
    )
    addresses = [one.kv.address for one in ready if one.kv is not None]
    return HeldKv(
        RankedMemory(ranks),
        ranks=ranks,
        rank_gpu=kv.gpu,
        rank_addresses=tuple(Address(*address) for address in addresses if address is not None),
    )


def _told_of_chats(config: WorkerConfig, parsers: Parsers, tokenizer: Tokenizer) -> str:
    """The end of the compatibility key: a digest of what flags say of chats. Empty where they say
    what the checkpoint says, as of an engine that knows no such flags (docs/adr/0076)."""
    shown = find_parsers(AUTO, AUTO, list(tokenizer.chat_templates.values()))
    if config.chat_template is None and parsers == shown:
        return ""
    told = (config.chat_template, parsers.tools_name, parsers.reasoning_name)
    return f"+chats-{sha256(json.dumps(told).encode()).hexdigest()[:8]}"


def _log_parsers(parsers: Parsers, templates: Sequence[str]) -> None:
    _log.info(
        "chats: tool calls by %s, reasoning by %s",
        parsers.tools_name or "none",
        parsers.reasoning_name or "none",
    )
    if templates and not any("tools" in template for template in templates):
        _log.info("the chat template has no place for tools: the model does not see them")


def _context(config: WorkerConfig, model: ModelConfig, ready: ReadyModel) -> int:
    """Tokens of prompt and output together: what is asked, the model and the cache allow."""
    by_share = ready.on_gpu and config.kv_cache_bytes is None
    sizing = "--gpu-memory-utilization" if by_share else "--kv-cache-memory"
    cache_tokens = ready.executor.num_blocks * config.block_size
    asked = config.max_model_len
    if asked is None:
        if cache_tokens < model.max_positions:
            _log.warning(
                "the KV cache holds %d tokens, fewer than the model's context of %d; requests are "
                "limited to that (%s)",
                cache_tokens,
                model.max_positions,
                sizing,
            )
        return min(model.max_positions, cache_tokens)
    if asked > model.max_positions:
        raise UserError(
            f"--max-model-len: {asked} is more than the model's context of {model.max_positions}"
        )
    if asked > cache_tokens:
        raise UserError(
            f"--max-model-len: {asked} tokens do not fit in the KV cache, which holds "
            f"{cache_tokens}; give more {sizing} or a smaller length"
        )
    return asked

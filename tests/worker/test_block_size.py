"""`--block-size`: cache, block manager, context and the transfer's layout all go by it."""

from pathlib import Path

import pytest

from xpyd_core.errors import UserError
from xpyd_worker.config import WorkerConfig
from xpyd_worker.config_check import check_config
from xpyd_worker.load.engine import load
from xpyd_worker.runner.runner import ModelRunner

MODEL = Path(__file__).parents[2] / "examples/demo-model"
BYTES_PER_TOKEN = 3072


@pytest.mark.parametrize(("block_size", "context"), [(8, 336), (16, 336), (64, 320)])
def test_a_cache_holds_as_many_tokens_as_its_whole_blocks(block_size: int, context: int) -> None:
    config = WorkerConfig(
        model=str(MODEL),
        dtype="float32",
        kv_cache_bytes=340 * BYTES_PER_TOKEN,
        block_size=block_size,
        threads=1,
    )
    loaded = load(config, deliver=lambda _: None, keys=(), incarnation="i", make_store=None)
    runner = loaded.ready.executor
    assert isinstance(runner, ModelRunner)
    assert runner.kv_cache.shape.block_size == block_size
    assert runner.num_blocks == context // block_size
    assert loaded.model.max_model_len == context


def test_a_block_size_that_could_not_be_paired_is_refused() -> None:
    with pytest.raises(UserError, match="--block-size: expected one of 8, 16, 32, 64"):
        check_config(WorkerConfig(model="m", block_size=24))

"""A prompt computed on one GPU goes on upon another: the tokens of one engine, in every mode, over
every transport, from wherever the KV landed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kv.device_fake import Machine
from tests.kv.nccl_fake import World
from tests.kv.pods import until
from tests.worker.device_pair import instance
from tests.worker.kv_pair import PATIENCE_S, Instance, answers, moved, over, settings, to_d, to_p
from tests.worker.runner_driver import Driver, make_runner, tiny_checkpoint
from xpyd_kv.transport.settings import TRANSPORTS

TOKENS = 8
LENGTHS = (5, 16, 90, 41)
MIB = 2**20
Wanted = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Wanted:
    """Prompts, and what one engine on the CPU makes of them."""
    rng = random.Random(3)
    prompts = [[rng.randrange(307) for _ in range(length)] for length in LENGTHS]
    driver = Driver(make_runner(folder, blocks=64))
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.run(sequences, tokens=TOKENS)
    return [(prompt, s.output) for prompt, s in zip(prompts, sequences, strict=True)]


class Pair:
    """A P and a D, each with a fake GPU on a machine of its own, or on `one_host`."""

    def __init__(self, folder: Path, sockets: Path | None, *, one_host: bool = False) -> None:
        self.folder = folder
        self.sockets = sockets
        self.machines = {"Prefill": Machine(seed=1), "Decode": Machine(seed=2)}
        if one_host:
            self.machines["Decode"] = self.machines["Prefill"]
        self.world = World(self.machines["Prefill"])
        self.on_gpu = {"Prefill", "Decode"}
        self.made: list[Instance] = []
        self.before_p_waits: Callable[[], None] = lambda: None

    def start(self, *, of_d: Any = None, **config: Any) -> tuple[Instance, Instance]:
        """`of_d`: what of `instance` is D's own."""
        p = self._make("Prefill", config, before_wait=self.before_p_waits)
        return p, self._make("Decode", config, **(of_d or {}))

    def _make(self, role: str, config: dict[str, Any], **options: Any) -> Instance:
        made = instance(
            settings(role, kv_socket_dir=self.sockets, **config),
            self.folder,
            machine=self.machines[role] if role in self.on_gpu else None,
            world=self.world,
            **options,
        )
        self.made.append(made)
        return made.start()

    def close(self) -> None:
        for made in self.made:
            made.close()
        for machine in self.machines.values():
            machine.check()


@pytest.fixture
def pair(folder: Path) -> Iterator[Pair]:
    made = Pair(folder, None)
    yield made
    made.close()


@pytest.fixture
def neighbours(folder: Path, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(folder, tmp_path, one_host=True)
    yield made
    made.close()


def answer(p: Instance, d: Instance, wanted: Wanted) -> list[list[int]]:
    return answers(p, d, [prompt for prompt, _ in wanted], TOKENS)


@pytest.mark.parametrize("mode", ["put_async", "put", "get"])
def test_a_prompt_goes_on_upon_another_gpu_with_the_tokens_of_one_engine(pair, wanted, mode):
    p, d = pair.start(kv_mode=mode)
    assert answer(p, d, wanted) == [tokens for _, tokens in wanted]
    where = "pulled" if mode == "get" else "direct"
    assert moved(d) == {where: len(LENGTHS), "tokens": sum(LENGTHS)}
    assert over(d) == ["tcp"]


def test_nothing_leaves_p_that_its_gpu_has_not_computed(pair, wanted):
    prompt, tokens = wanted[2]
    machine = pair.machines["Prefill"]
    # Until a step is waited for nobody finds any of its work done.
    machine.is_slow = True
    sent: list[int] = []

    def while_a_step_runs() -> None:
        until(lambda: p.kv.connector.metrics.grant_wait.count)
        for _ in range(3):
            turned = threading.Event()
            p.kv.connector.endpoint.call(turned.set)
            assert turned.wait(PATIENCE_S)
        sent.append(p.kv.connector.metrics.sent_bytes)

    pair.before_p_waits = while_a_step_runs
    p, d = pair.start()
    p.submit(to_p(0, prompt, d.address))
    first = p.tokens(0)
    assert sent == [0, 0, 0]
    assert machine.faults == []
    machine.is_slow = False
    d.submit(to_d(0, prompt, first[0], TOKENS))
    assert first + d.tokens(0) == tokens
    assert moved(d) == {"direct": 1, "tokens": len(prompt)}


@pytest.mark.parametrize("transport", ["uds", "cuda_ipc", "nccl"])
def test_every_transport_between_gpus_brings_the_same_tokens(neighbours, wanted, transport):
    p, d = neighbours.start(kv_transports=(transport,))
    assert answer(p, d, wanted) == [tokens for _, tokens in wanted]
    assert moved(d)["tokens"] == sum(LENGTHS)
    assert over(d) == [transport]


def test_by_itself_a_pair_on_one_machine_takes_cuda_ipc(neighbours, wanted):
    p, d = neighbours.start(kv_transports=TRANSPORTS)
    assert answer(p, d, wanted[:1]) == [wanted[0][1]]
    assert over(d) == ["cuda_ipc"]


@pytest.mark.parametrize("role", ["Prefill", "Decode"])
def test_one_of_the_two_may_be_on_a_cpu(pair, wanted, role):
    pair.on_gpu = {role}
    p, d = pair.start(kv_transports=TRANSPORTS)
    assert answer(p, d, wanted) == [tokens for _, tokens in wanted]
    assert moved(d)["tokens"] == sum(LENGTHS)
    assert over(d) == ["tcp"]


@pytest.mark.parametrize("where", ["buffer", "pool"])
def test_kv_that_landed_beside_the_cache_is_copied_in_before_a_step_reads_it(pair, wanted, where):
    buffer = 4 * MIB if where == "buffer" else 0
    p, d = pair.start(kv_direct_free=1.0, kv_buffer_bytes=buffer)
    assert answer(p, d, wanted) == [tokens for _, tokens in wanted]
    assert moved(d) == {where: len(LENGTHS), "tokens": sum(LENGTHS)}


def test_prompts_that_were_sent_before_skip_what_d_has_cached(pair, wanted):
    p, d = pair.start()
    prompt, tokens = wanted[2]
    for number in range(2):
        p.submit(to_p(number, prompt, d.address))
        first = p.tokens(number)
        d.submit(to_d(number, prompt, first[0], TOKENS))
        assert first + d.tokens(number) == tokens
    assert d.kv.connector.metrics.skipped_tokens == 80


@pytest.mark.parametrize("where", ["direct", "buffer"])
def test_a_d_one_step_ahead_of_its_gpu_reads_no_kv_too_early(pair, wanted, where):
    share = 0.1 if where == "direct" else 1.0
    p, d = pair.start(of_d={"depth": 2}, kv_direct_free=share)
    assert answer(p, d, wanted) == [tokens for _, tokens in wanted]
    assert moved(d) == {where: len(LENGTHS), "tokens": sum(LENGTHS)}
    assert d.executor.most_under_way == 2


def test_kv_lands_in_blocks_that_others_gave_back_when_their_last_step_is_over(pair, wanted):
    # Room for the longest and one more at a time.
    p, d = pair.start(of_d={"depth": 2, "blocks": 11}, kv_buffer_bytes=0)
    assert answer(p, d, wanted * 2) == [tokens for _, tokens in wanted * 2]
    assert d.executor.most_under_way == 2

"""What happens between P and D: overlap, use of the landed KV, landings, stalls."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet, Process, fleet, listens, wait_for
from tests.e2e.oracle import Case, load
from tests.e2e.relay import Relay

pytestmark = pytest.mark.slow


def _figures(process: Process) -> dict[str, float]:
    """Gauges that say what is held, and must come back to where they were."""
    names = (
        "xpyd_engine_kv_blocks_free",
        "xpyd_engine_requests_running",
        "xpyd_engine_requests_waiting",
        "xpyd_kv_buffer_used_bytes",
        "xpyd_kv_pool_used_bytes",
        "xpyd_kv_leases",
    )
    samples = process.metrics()
    return {name: samples[name] for name in names}


def _landings(process: Process) -> dict[str, float]:
    prefix = "xpyd_kv_landings_total{where="
    return {k[len(prefix) : -1]: v for k, v in process.metrics().items() if k.startswith(prefix)}


@pytest.fixture(scope="module")
def one_p(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A router and a P that sends each layer in a frame of its own; the tests bring their D."""
    with fleet(tmp_path_factory.mktemp("one-p")) as running:
        flags = ("--kv-group-bytes", "1", "--max-num-batched-tokens", "64", "--max-num-seqs", "32")
        debug = ("--log-level", "debug", "--log-format", "json")
        running.wait_ready(running.start_engine("Prefill", *flags, *debug))
        yield running


@pytest.fixture
def with_d(one_p: Fleet) -> Iterator[Callable[..., Process]]:
    """Start a D of given flags; it leaves the fleet at the test's end."""
    started: list[Process] = []

    def start(*flags: str, **options: object) -> Process:
        engine = one_p.start_engine("Decode", *flags, **options)  # pyright: ignore[reportArgumentType]
        started.append(engine)
        one_p.wait_ready(engine)
        return engine

    yield start
    for engine in started:
        engine.stop()
        wait_for("the router forgot it", lambda e=engine: e.name not in one_p.states())


LANDINGS = [
    ("direct", (), ["direct"]),
    ("buffer", ("--kv-direct-free", "1"), ["buffer"]),
    ("pool", ("--kv-direct-free", "1", "--kv-buffer-size", "0"), ["pool"]),
    (
        "deferred",
        ("--kv-direct-free", "1", "--kv-buffer-size", "0", "--kv-host-pool-size", "0"),
        ["deferred"],
    ),
    (
        "tiny",
        ("--kv-direct-free", "1", "--kv-buffer-size", "512Ki", "--kv-host-pool-size", "512Ki"),
        ["buffer", "pool", "deferred"],
    ),
]


def _load_a_landing(
    one_p: Fleet, with_d: Callable[..., Process], cases: list[Case], index: int, seconds: float
) -> None:
    _, flags, expected = LANDINGS[index]
    decode = with_d(*flags)
    prefill = next(p for p in one_p.processes if p.role == "Prefill")
    assert one_p.answer(cases[0]) == cases[0].ids
    engines = (prefill, decode)
    for engine in engines:
        wait_for("idle", lambda e=engine: _figures(e)["xpyd_engine_requests_running"] == 0)
    before = {e.name: (_figures(e), e.open_files()) for e in engines}

    result = asyncio.run(load(one_p.router.url, cases, seconds=seconds))

    assert not result.wrong
    assert not result.errors
    assert not result.broken_streams
    assert result.agreed > 0
    landed = _landings(decode)
    assert all(landed.get(where, 0) > 0 for where in expected), landed
    for engine in engines:
        figures, files = before[engine.name]
        wait_for(
            f"{engine.name} holds nothing: {figures} became {_figures(engine)}",
            lambda e=engine, f=figures: _figures(e) == f,
        )
        wait_for(
            f"{engine.name} closed its files", lambda e=engine, n=files: e.open_files() <= n + 1
        )


@pytest.mark.parametrize("index", range(len(LANDINGS)), ids=[name for name, _, _ in LANDINGS])
def test_every_landing_gives_the_same_tokens_and_leaks_nothing(
    one_p: Fleet, with_d: Callable[..., Process], cases: list[Case], index: int
) -> None:
    _load_a_landing(one_p, with_d, cases, index, seconds=5)


@pytest.mark.soak
@pytest.mark.parametrize("index", range(len(LANDINGS)), ids=[name for name, _, _ in LANDINGS])
def test_every_landing_holds_for_a_minute(
    one_p: Fleet, with_d: Callable[..., Process], cases: list[Case], index: int
) -> None:
    _load_a_landing(one_p, with_d, cases, index, seconds=60)


def test_the_first_frame_leaves_before_the_last_layer_of_the_last_chunk_ran(
    one_p: Fleet, with_d: Callable[..., Process], cases: list[Case]
) -> None:
    with_d()
    prefill = next(p for p in one_p.processes if p.role == "Prefill")
    assert one_p.answer(cases[0]) == cases[0].ids  # the connection stands from here on
    start = len(prefill.log)
    # 25 chunks: GRANT comes within the first few, whatever else the machine does.
    prompt = list(range(300, 500)) * 8
    answer = one_p.complete(prompt=prompt, max_tokens=2, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 2
    events = [json.loads(line) for line in prefill.log[start:].splitlines()]
    sent = [e["monotonic_ns"] for e in events if e["message"] == "data sent"]
    layers = [e for e in events if e["message"] == "layer done"]
    last_layer = max(e["layer"] for e in layers)
    last_ran = max(e["monotonic_ns"] for e in layers if e["layer"] == last_layer)
    assert len(sent) >= last_layer + 1
    assert min(sent) < last_ran


def test_zero_filled_kv_changes_the_answer(
    one_p: Fleet, with_d: Callable[..., Process], cases: list[Case]
) -> None:
    with_d(module=("tests.e2e.zero_store_worker",))
    case = max(cases, key=lambda c: len(c.prompt))
    answer = one_p.answer(case)
    assert answer[0] == case.ids[0]  # P's own token
    assert answer != case.ids


@pytest.mark.long
def test_a_stalled_transfer_is_recomputed_and_its_late_kv_refused(
    one_p: Fleet, with_d: Callable[..., Process], cases: list[Case]
) -> None:
    number = next(one_p.hosts)
    d_ip, relay_ip = f"{one_p.subnet}.{number}", f"{one_p.subnet}.{number + 100}"
    flags = ("--kv-advertise", f"{relay_ip}:21001", "--kv-wait-seconds", "1")
    case = max(cases, key=lambda c: len(c.prompt))
    decode = one_p.start_engine("Decode", *flags, ip=d_ip)
    relay: Relay | None = None
    try:
        wait_for("the KV port", lambda: listens(d_ip, 21001), 90)
        relay = Relay(relay_ip, 21001, (d_ip, 21001))
        one_p.wait_ready(decode)
        assert one_p.answer(case) == case.ids
        start = _figures(decode)
        relay.stall_in_data()
        other, answers = _other(cases, case), list[tuple[int, ...]]()
        asking = threading.Thread(target=lambda: answers.append(one_p.answer(other)))
        asking.start()
        recomputed = "xpyd_kv_recomputed_requests_total"
        wait_for("D's own computing", lambda: decode.metric(recomputed) == 1)
        # At once: after 8 s without a PONG D would close the connection, and nothing came late.
        relay.resume()
        asking.join(60)
        assert answers == [other.ids]
        assert decode.metric("xpyd_kv_recomputed_tokens_total{reason=timeout}") > 0
        assert decode.log.count("WARNING xpyd_worker.engine.core: 1 prompts") == 1
        wait_for("late KV refused", lambda: decode.metric("xpyd_kv_refused_data_total") > 0)
        wait_for("nothing held", lambda: _figures(decode) == start)
        assert one_p.answer(case) == case.ids
    finally:
        if relay is not None:
            relay.close()
        decode.stop()
        wait_for("the router forgot it", lambda: decode.name not in one_p.states())


def _other(cases: list[Case], first: Case) -> Case:
    return max(
        (c for c in cases if c.prompt[:16] != first.prompt[:16]), key=lambda c: len(c.prompt)
    )


def test_a_draining_engine_finishes_what_it_has_and_leaves_at_once(
    one_p: Fleet, with_d: Callable[..., Process], cases: list[Case]
) -> None:
    staying, leaving = with_d(), with_d()
    codes: list[int] = []
    stopper = threading.Thread(target=lambda: codes.append(leaving.stop()))
    result = asyncio.run(load(one_p.router.url, cases, seconds=5, at_half=stopper.start))
    stopper.join(40)
    assert codes == [0]
    assert not result.wrong
    assert not result.errors
    assert not result.broken_streams
    assert leaving.name not in one_p.states()
    assert one_p.states()[staying.name] == "Ready"


def test_logs_show_no_key(one_p: Fleet) -> None:
    key = one_p.key_file.read_text()
    assert all(key not in Path(p.log_path).read_text(errors="replace") for p in one_p.processes)

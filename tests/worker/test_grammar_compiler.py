"""The compiler: once for all that ask, bounded in time and number, and nobody waits for another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.worker.grammar_kit import (
    BYTES,
    EOS_TEXT,
    Pieces,
    allowed_ids,
    compiler_of,
    matchers_of,
)
from tests.worker.made_parts import made_where_it_competes, refused_with_its_process
from tests.worker.server_fakes import until
from xpyd_core.errors import ApiError
from xpyd_worker.grammar.compiler import MAX_WAITING, GrammarCompiler, Target
from xpyd_worker.grammar.matcher import COPIES_OF_ONE
from xpyd_worker.grammar.spec import (
    Grammar,
    Made,
    OneOf,
    Pattern,
    Rules,
    Text,
    json_schema_part,
)

TARGET = BYTES.target()


async def ask(compiler: GrammarCompiler, grammar: Grammar, *, n: int = 1) -> int:
    return len(await compiler.matchers(grammar, TARGET, ((),) * n))


async def test_a_grammar_that_many_ask_for_at_once_is_compiled_once() -> None:
    compiler = GrammarCompiler()
    grammars = [Grammar(Pattern("[a-z]{3}"), f"field {i % 3}") for i in range(8)]
    assert await asyncio.gather(*(ask(compiler, one, n=2) for one in grammars)) == [2] * 8
    assert await ask(compiler, grammars[0]) == 1
    assert (compiler.metrics.compiled, compiler.metrics.hits) == (1, 8)
    assert compiler.metrics.seconds.count == 1
    compiler.close()


async def test_what_was_refused_is_refused_again_without_work_and_by_its_own_field() -> None:
    compiler = GrammarCompiler()
    for field in ("first", "second"):
        with pytest.raises(ApiError, match=f"^{field}: .*unclosed"):
            await ask(compiler, Grammar(Pattern("("), field))
    metrics = compiler.metrics
    assert (metrics.compiled, metrics.failures, metrics.hits) == (1, 1, 1)
    compiler.close()


async def test_the_longest_unused_goes_when_there_are_too_many() -> None:
    most = 16
    compiler = GrammarCompiler(most_entries=most)
    await ask(compiler, Grammar(Text("kept")))
    for number in range(most):
        await ask(compiler, Grammar(Text(f"t{number}")))
        if number == most // 2:
            await ask(compiler, Grammar(Text("kept")))
    assert compiler.metrics.compiled == most + 1
    await ask(compiler, Grammar(Text("kept")))
    assert compiler.metrics.compiled == most + 1
    await ask(compiler, Grammar(Text("t0")))
    assert compiler.metrics.compiled == most + 2
    compiler.close()


async def test_the_memory_of_kept_grammars_is_bounded_and_what_went_is_compiled_again() -> None:
    """A trial says what a grammar takes: this one many times its text."""
    large = [Grammar(Rules(f"start: /a{{{count}}}/")) for count in (10_000, 10_001, 10_002)]
    sizes: list[int] = []
    for most_bytes in (1 << 30, 1):
        compiler = GrammarCompiler(most_bytes=most_bytes)
        for grammar in (*large, *large):
            assert await ask(compiler, grammar) == 1
        assert compiler.metrics.compiled == len(large)
        sizes.append(compiler.metrics.kept_bytes)
        compiler.close()
    assert sizes[0] > 2 * sizes[1] > 2 << 20


async def test_the_texts_of_kept_grammars_are_bounded_those_of_refused_ones_as_well() -> None:
    compiler = GrammarCompiler(most_characters=1000)
    wrong = [
        Grammar(json_schema_part({"not": {}, "title": f"{i}{'x' * 300}"}, "x")) for i in range(5)
    ]
    for grammar in (*wrong, *wrong[2:], wrong[0]):
        with pytest.raises(ApiError, match=r"^x.not: "):
            await ask(compiler, grammar)
    # Three have room: the last three were kept, the first one was not any more.
    assert (compiler.metrics.compiled, compiler.metrics.hits) == (6, 3)
    compiler.close()


class SlowVocabulary:
    """One whose reading takes until it may end."""

    special_ids = BYTES.special_ids

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def to_json(self) -> str:
        assert self.go_on.wait(30)
        return BYTES.to_json()

    def token_piece(self, token_id: int) -> str:
        return BYTES.token_piece(token_id)


async def test_who_waits_too_long_gets_503_and_the_grammar_is_there_later() -> None:
    slow = SlowVocabulary()
    target = Target(slow, TARGET.eos_token_ids, TARGET.vocab_size)
    compiler = GrammarCompiler(deadline_s=0.05)
    with pytest.raises(ApiError, match=r"^f: the engine is too busy") as raised:
        await compiler.matchers(Grammar(Text("a"), "f"), target, ((),))
    assert (raised.value.status, raised.value.retry_after_s) == (503, 1)
    slow.go_on.set()
    await until(lambda: compiler.metrics.compiled > 0)
    await compiler.matchers(Grammar(Text("a"), "f"), target, ((),))
    assert compiler.metrics.hits == 1
    compiler.close()


async def test_too_many_that_wait_get_503() -> None:
    slow = SlowVocabulary()
    target = Target(slow, TARGET.eos_token_ids, TARGET.vocab_size)
    compiler = GrammarCompiler()
    tasks = [
        asyncio.create_task(compiler.matchers(Grammar(Text(f"a{i}")), target, ((),)))
        for i in range(MAX_WAITING)
    ]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        await compiler.matchers(Grammar(Text("one more")), target, ((),))
    assert caught.value.status == 503
    slow.go_on.set()
    await asyncio.gather(*tasks)
    compiler.close()


async def test_who_leaves_does_not_take_the_grammar_from_others() -> None:
    slow = SlowVocabulary()
    target = Target(slow, TARGET.eos_token_ids, TARGET.vocab_size)
    compiler = GrammarCompiler()
    first, second = (
        asyncio.create_task(compiler.matchers(Grammar(Text("a")), target, ((),))) for _ in range(2)
    )
    await asyncio.sleep(0)
    first.cancel()
    slow.go_on.set()
    assert len(await second) == 1
    assert first.cancelled()
    compiler.close()


async def test_a_tokenizer_that_the_library_cannot_read_refuses_grammars_alone() -> None:
    class Broken(SlowVocabulary):
        def to_json(self) -> str:
            return "{}"

    target = Target(Broken(), TARGET.eos_token_ids, TARGET.vocab_size)
    compiler = GrammarCompiler()
    compiler.prepare(target)
    with pytest.raises(ApiError, match=r"^f: the tokenizer of this model"):
        await compiler.matchers(Grammar(Text("a"), "f"), target, ((),))
    compiler.close()


MANY: dict[str, Any] = {str(i): {"type": "string", "maxLength": 9} for i in range(1000)}


@pytest.mark.parametrize(
    "part",
    [
        Pattern("(a|a)*b"),
        Rules("start: /(a{1,1000}){1,1000}/"),
        Pattern("(.*a){30}"),
        Pattern("(a?){500}a{500}"),
        Rules("start: /(?:(?:[a-z]{0,100}){0,100}){0,100}/"),
        Rules('start: "a"{100000}'),
        Rules('start: (("a"{1000}){1000}){1000}'),
        Rules("start: start start | "),
        json_schema_part({"type": "string", "maxLength": 10**9}, "x"),
        json_schema_part({"type": "array", "minItems": 10**9}, "x"),
        json_schema_part({"enum": [f"value {i}" for i in range(8000)]}, "x"),
        json_schema_part({"properties": MANY}, "x"),
        json_schema_part({"allOf": [{"pattern": f"[a-z]{{{i}}}"} for i in range(16)]}, "x"),
        json_schema_part({"allOf": [{"anyOf": [{"minimum": i}] * 9} for i in range(16)]}, "x"),
        json_schema_part({"type": "integer", "multipleOf": 9973}, "x"),
        Rules("start: /a{1000000}/"),
        Rules('start: %json {"type": "number", "multipleOf": 9999.9999}'),
        Rules('start: %json {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}'),
    ],
    ids=lambda part: str(part)[:50],
)
@pytest.mark.patience(30)
def test_what_is_made_to_explode_compiles_or_is_refused_in_time(part: Any) -> None:
    """By the deadline of a compilation, which this waits for; a token is then taken, too."""
    with contextlib.suppress(ApiError):
        (matcher,) = matchers_of(Grammar(part, "f"))
        matcher.mask().words()
    metrics = compiler_of(BYTES.target()).metrics
    for _ in range(6):
        compiled = metrics.compiled
        with contextlib.suppress(ApiError):
            matchers_of(Grammar(part, "f"))
        if metrics.compiled == compiled:
            return
        # A busy machine ended the trial by the clock, which is no verdict that is kept.
    raise AssertionError("it is compiled each time")


NO_VALUE: list[Any] = [
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "string", "pattern": "^a", "maxLength": 3, "minLength": 5},
]


@pytest.mark.parametrize("schema", NO_VALUE, ids=str)
def test_a_schema_that_no_value_fits_is_refused_before_it_reaches_the_engine(schema: Any) -> None:
    with pytest.raises(ApiError, match=r"^x") as caught:
        matchers_of(Grammar(json_schema_part(schema, "x"), "x"))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("schema", "place", "says"),
    [
        ({"pattern": "(?=x)a"}, ".pattern", "look-around"),
        ({"pattern": r"(a)\1"}, ".pattern", "backreferences"),
        ({"patternProperties": {"(": {}}}, ".patternProperties", "unclosed group"),
        ({"type": "integer", "minimum": -1e20}, ".minimum", "range"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, ".maxItems", "greater than maxItems"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, ".maxLength", "greater than"),
        ({"oneOf": [{"type": "string"}, {"minLength": 3}]}, ".oneOf", "anyOf lets it"),
        ({"$ref": "other.json"}, ".$ref", "other.json"),
        (
            {"anyOf": [{"$ref": "#/$defs/d"}, {"type": "integer"}]},
            ".anyOf[0].$ref",
            "backreferences",
        ),
    ],
    ids=str,
)
def test_what_the_library_refuses_has_its_place_and_keyword(
    schema: dict[str, Any], place: str, says: str
) -> None:
    whole = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": schema},
        "required": ["b"],
        "$defs": {"c": {"type": "string"}, "d": {"pattern": r"(a)\1"}},
    }
    if says == "backreferences" and "anyOf" not in schema:
        del whole["$defs"]
    first, second = json_schema_part(True, "tools[0]"), json_schema_part(whole, "tools[1]")
    with pytest.raises(ApiError) as caught:
        matchers_of(Grammar(OneOf((first, second)), "tool_choice"))
    assert caught.value.param == f"tools[1].properties.b{place}"
    assert says in caught.value.message


def test_an_object_may_have_as_many_optional_members_as_the_bound_says() -> None:
    members = {str(i): {"type": "boolean"} for i in range(1000)}
    (matcher,) = matchers_of(json_schema_part({"type": "object", "properties": members}, "x"))
    rng = random.Random(1)
    while not matcher.is_finished:
        assert matcher.accept([rng.choice(allowed_ids(matcher.mask().words()))])
        assert not matcher.error


def wordy() -> Pieces:
    """A vocabulary of long pieces: each mask teaches a lexer much."""
    rng = random.Random(0)
    words = {"".join(rng.choices("abcdefxyz0123 ", k=rng.randint(3, 8))) for _ in range(2000)}
    return Pieces((*map(chr, range(256)), *sorted(words), EOS_TEXT), (EOS_TEXT,))


async def test_answers_that_fill_a_lexer_spoil_neither_themselves_nor_those_behind_them() -> None:
    """Two of these answers make more states than a lexer may have: each would be its last."""
    target = wordy().target()
    grammar = Grammar(Pattern(".*[a-e].{16}[0-9]"))
    compiler = GrammarCompiler()
    behind: list[int] = []
    for seed in range(8):
        (matcher,) = await compiler.matchers(grammar, target, ((),))
        rng = random.Random(seed)
        behind = []
        for _ in range(40):
            allowed = allowed_ids(matcher.mask().words())
            assert not matcher.error
            behind.append(rng.choice(allowed))
            assert matcher.accept(behind[-1:])
            if matcher.is_finished:
                break
        (matcher,) = await compiler.matchers(grammar, target, (behind,))
    assert (compiler.metrics.compiled, compiler.metrics.failures) == (1, 0)
    compiler.close()


async def test_what_was_compiled_once_serves_any_number_of_answers() -> None:
    compiler = GrammarCompiler()
    for _ in range(COPIES_OF_ONE + 1):
        assert await ask(compiler, Grammar(Text("a")), n=2) == 2
    assert (compiler.metrics.compiled, compiler.metrics.hits) == (1, COPIES_OF_ONE)
    compiler.close()


def children(of: int | str = "self") -> set[int]:
    found = Path(f"/proc/{of}/task").glob("*/children")
    return {int(pid) for one in found for pid in one.read_text().split()}


def waiting_child(helper: int) -> int:
    """The one that a process for trials has forked ahead, if it waits now; else 0."""
    for pid in children(helper):
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
            if state == "S" and os.sched_getscheduler(pid) == os.SCHED_IDLE:
                return pid
    return 0


async def process_of_trial(compiler: GrammarCompiler, place: str) -> int:
    """Where a new grammar is tried."""
    made = Made(refused_with_its_process, f'{{"title": "{place}"}}', place)
    with pytest.raises(ApiError, match="process") as caught:
        await ask(compiler, Grammar(made))
    return int(caught.value.message.split()[-1])


async def is_tried_by_what_waited(compiler: GrammarCompiler, helper: int) -> bool:
    """Of some new grammars one: where others want the cores, another process comes first."""
    async with asyncio.timeout(30):
        for number in range(50):
            await until(lambda: waiting_child(helper) != 0)
            waits = waiting_child(helper)
            if await process_of_trial(compiler, f"{waits} {number}") == waits:
                return True
    return False


async def test_a_new_grammar_is_tried_by_a_process_that_has_waited_for_it() -> None:
    compiler = GrammarCompiler()
    before = children()
    await ask(compiler, Grammar(Text("a")))
    (helper,) = children() - before
    assert await is_tried_by_what_waited(compiler, helper)
    assert await is_tried_by_what_waited(compiler, helper)
    compiler.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_grammar_is_tried_though_what_waited_for_it_has_ended_or_gets_no_core(
    how: signal.Signals,
) -> None:
    """A process that is stopped is one that gets no core. Behind it there is another."""
    compiler = GrammarCompiler()
    before = children()
    await ask(compiler, Grammar(Text("a")))
    (helper,) = children() - before
    await until(lambda: waiting_child(helper) != 0)
    waited = waiting_child(helper)
    os.kill(waited, how)
    assert await process_of_trial(compiler, "x") != waited
    if how == signal.SIGSTOP:
        os.kill(waited, signal.SIGCONT)  # the trial that it finds then nobody waits for
    async with asyncio.timeout(30):
        await until(lambda: waiting_child(helper) not in (0, waited))
    assert await is_tried_by_what_waited(compiler, helper)
    compiler.close()


async def test_grammars_are_tried_again_when_the_process_for_it_has_died() -> None:
    compiler = GrammarCompiler()
    before = children()
    await ask(compiler, Grammar(Text("a")))
    (helper,) = children() - before
    os.kill(helper, signal.SIGKILL)
    await until(lambda: "(zombie)" in Path(f"/proc/{helper}/status").read_text())
    assert await ask(compiler, Grammar(Text("a"))) == 1
    assert await ask(compiler, Grammar(Text("b"))) == 1
    (again,) = children() - before
    assert again != helper
    compiler.close()
    assert again not in children()


def test_schemas_are_read_in_the_process_for_trials_and_not_in_the_engines() -> None:
    """Long ones take Python 100 ms, in which the engine would draw no token."""
    made = Made(refused_with_its_process, "{}", "tools[1]")
    with pytest.raises(ApiError, match=r"^tools\[1\].a: process \d+$") as caught:
        matchers_of(OneOf((json_schema_part(True, "tools[0]"), made)))
    assert not caught.value.message.endswith(f" {os.getpid()}")
    # Kept, and said of another place.
    again = Made(refused_with_its_process, "{}", "f")
    with pytest.raises(ApiError, match=r"^f.a: process \d+$") as found:
        matchers_of(OneOf((json_schema_part(True, "e"), again)))
    assert found.value.message[1:] == caught.value.message.removeprefix("tools[1]")


def test_a_trial_runs_when_a_core_is_free_and_again_as_others_do_where_none_is() -> None:
    """That it sleeps is the same as that it gets no core."""
    (matcher,) = matchers_of(Made(made_where_it_competes, "{}"))
    assert matcher.accept(BYTES.ids("competes"))

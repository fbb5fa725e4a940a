"""The compiler: once for all that ask, bounded in time and number, and nobody waits for another."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from tests.worker.grammar_kit import BYTES, compiler_of, matchers_of
from tests.worker.server_fakes import until
from tests.worker.test_grammar_random import target
from xpyd_core.errors import ApiError
from xpyd_worker.grammar.compiler import MAX_WAITING, MOST_ENTRIES, GrammarCompiler, Target
from xpyd_worker.grammar.render import render
from xpyd_worker.grammar.spec import (
    Grammar,
    Pattern,
    Rules,
    Text,
    json_schema_part,
    repeated,
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
    compiler = GrammarCompiler()
    await ask(compiler, Grammar(Text("kept")))
    for number in range(MOST_ENTRIES):
        await ask(compiler, Grammar(Text(f"t{number}")))
        if number == MOST_ENTRIES // 2:
            await ask(compiler, Grammar(Text("kept")))
    assert compiler.metrics.compiled == MOST_ENTRIES + 1
    await ask(compiler, Grammar(Text("kept")))
    assert compiler.metrics.compiled == MOST_ENTRIES + 1
    await ask(compiler, Grammar(Text("t0")))
    assert compiler.metrics.compiled == MOST_ENTRIES + 2
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


async def test_who_waits_too_long_gets_400_and_the_grammar_is_there_later() -> None:
    slow = SlowVocabulary()
    target = Target(slow, TARGET.eos_token_ids, TARGET.vocab_size)
    compiler = GrammarCompiler(deadline_s=0.05)
    with pytest.raises(ApiError, match=r"^f: not compiled within 0.05 s"):
        await compiler.matchers(Grammar(Text("a"), "f"), target, ((),))
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
        Pattern("(a{1,1000}){1,1000}"),
        Pattern("(.*a){30}"),
        Pattern("(a?){500}a{500}"),
        Pattern("(?:(?:[a-z]{0,100}){0,100}){0,100}"),
        Rules('start: "a"{100000}'),
        Rules('start: (("a"{1000}){1000}){1000}'),
        Rules("start: start start | "),
        json_schema_part({"type": "string", "maxLength": 10**9}, "x"),
        json_schema_part({"type": "array", "minItems": 10**9}, "x"),
        json_schema_part({"enum": [f"value {i}" for i in range(8000)]}, "x"),
        json_schema_part({"properties": MANY}, "x"),
        json_schema_part({"allOf": [{"pattern": f"[a-z]{{{i}}}"} for i in range(8)]}, "x"),
        json_schema_part({"allOf": [{"anyOf": [{"minimum": i}] * 9} for i in range(16)]}, "x"),
        json_schema_part({"type": "integer", "multipleOf": 9973}, "x"),
    ],
    ids=lambda part: str(part)[:50],
)
@pytest.mark.patience(30)
def test_what_is_made_to_explode_compiles_or_is_refused_in_time(part: Any) -> None:
    """By the deadline of a compilation, which this waits for; a token is then taken, too."""
    with contextlib.suppress(ApiError):
        (matcher,) = matchers_of(Grammar(part, "f"))
        matcher.mask().words()
    compiled = compiler_of(BYTES.target()).metrics.compiled
    with contextlib.suppress(ApiError):
        matchers_of(Grammar(part, "f"))
    assert compiler_of(BYTES.target()).metrics.compiled == compiled, "it is still being compiled"


def test_each_of_as_many_members_as_an_object_may_have_can_be_left_out() -> None:
    part = json_schema_part({"type": "object", "properties": MANY}, "x")
    (matcher,) = matchers_of(Grammar(part))
    for said in (b'{"7": "a"', b', "998": ""', b"}"):
        assert matcher.accept(said), matcher.error
    assert matcher.is_finished


def test_the_schema_of_several_calls_is_compiled_once() -> None:
    part = json_schema_part({"type": "object", "properties": {"a": {"type": "integer"}}}, "x")
    calls = repeated(part, least=1, most=8, separator=";")
    assert render(calls, {}).count('"json_schema"') == 1
    (matcher,) = matchers_of(Grammar(calls))
    assert matcher.accept(b'{"a": 1};{"a": 23};{}'), matcher.error
    assert matcher.is_accepting


async def test_a_grammar_that_has_used_up_its_limits_is_refused_by_its_field() -> None:
    part = json_schema_part({"type": "string", "pattern": "^(a?){500}a{500}$"}, "x")
    asked, of = Grammar(part, "f"), target()
    ids = of.tokenizer.encode('"a', add_special_tokens=False)  # type: ignore[attr-defined]
    compiler = GrammarCompiler()
    (first,) = await compiler.matchers(asked, of, ((),))
    for token in ids:
        first.mask().words()
        first.accept([token])
    assert "too many" in first.error
    with pytest.raises(ApiError, match=r"^f: .*too many.*smaller"):
        await compiler.matchers(asked, of, (ids,))
    compiler.close()

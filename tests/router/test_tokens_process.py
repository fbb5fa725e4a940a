"""The tokenizing child and its parent: bounded waits and queues, and what a child's death does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.router.chat_templates import DEMO_MODEL, files_of
from tests.router.fakes import until
from xpyd_core.tokenizer_files import encode_tokenizer_files
from xpyd_router.tokens.process import COMMAND, ChildEnded, ChildLimits, TokenChild, Uncounted
from xpyd_router.tokens.wire import HASH_BYTES, Counted, frame_head
from xpyd_worker.runner.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("uv_loop")

LIMITS = ChildLimits(wait_s=60)
BODY = orjson.dumps({"prompt": [1, 2, 3], "messages": [{"role": "user", "content": "hello"}]})
SILENT = (sys.executable, "-c", "import sys; sys.stdin.buffer.read()")
DEAD = (sys.executable, "-c", "")
"""A child that ends at once."""


def files(**changes: Any) -> bytes:
    return encode_tokenizer_files(files_of(Tokenizer.load(DEMO_MODEL), **changes))


def hangs() -> bytes:
    """Files with a template that no alarm interrupts: one operation takes for ever."""
    return files(chat_templates={"default": "{{ 7 ** (7 ** 77) }}"})


@contextlib.asynccontextmanager
async def child(
    limits: ChildLimits = LIMITS, command: tuple[str, ...] = COMMAND
) -> AsyncGenerator[TokenChild]:
    made = await TokenChild.start(limits, command)
    try:
        yield made
    finally:
        await made.close()


async def reason(made: TokenChild, raw: bytes = BODY, *, is_chat: bool = False) -> str:
    with pytest.raises(Uncounted) as uncounted:
        await made.count("k", raw, is_chat=is_chat)
    return uncounted.value.reason


async def test_a_child_counts_by_the_files_that_it_was_given() -> None:
    async with child() as made:
        assert await reason(made) == "refused"  # it knows no files yet
        assert await made.load("k", files(block_size=1)) == ""
        tokens, hashes = await made.count("k", BODY, is_chat=False)
        assert (tokens, len(hashes), len(set(map(len, hashes)))) == (3, 3, 1)
        assert (await made.count("k", BODY, is_chat=True))[0] > 3
        made.forget("k")
        assert await reason(made) == "refused"


async def test_answers_are_those_of_their_questions() -> None:
    async with child() as made:
        await made.load("k", files())
        counts = [
            made.count("k", orjson.dumps({"prompt": [1] * n}), is_chat=False) for n in range(1, 101)
        ]
        found = await asyncio.gather(*counts)
        assert [tokens for tokens, _ in found] == list(range(1, 101))


async def test_answers_may_come_in_any_pieces() -> None:
    frames = b"".join(
        frame_head(Counted(tokens), HASH_BYTES) + bytes((tokens,)) * HASH_BYTES
        for tokens in range(1, 5)
    )
    for size in (1, 7, len(frames) // 2 + 3, len(frames)):
        code = (
            "import os, sys, time\n"
            "os.read(0, 1)\n"
            f"frames = {frames!r}\n"
            f"for at in range(0, len(frames), {size}):\n"
            f"    os.write(1, frames[at : at + {size}])\n"
            "    time.sleep(0.001)\n"
            "sys.stdin.buffer.read()\n"
        )
        async with child(LIMITS, (sys.executable, "-c", code)) as made:
            counts = [made.count("k", BODY, is_chat=False) for _ in range(4)]
            found = await asyncio.gather(*counts)
        assert found == [(n, (bytes((n,)) * HASH_BYTES,)) for n in range(1, 5)]


async def test_files_that_cannot_be_read_are_an_error_and_no_end() -> None:
    async with child() as made:
        assert "tokenizer" in await made.load("k", b"[]")
        assert "tokenizer" in await made.load("k", files(tokenizer="{}"))
        assert await made.load("k", files()) == ""


async def test_a_long_request_or_one_too_many_is_not_counted() -> None:
    limits = replace(LIMITS, max_waiting=2, max_waiting_bytes=100, max_body_bytes=60, ahead=1)
    async with child(limits, SILENT) as made:
        assert await reason(made, b"x" * 61) == "long"
        asked = [asyncio.create_task(reason(made, b"x" * 50)) for _ in range(3)]
        await asyncio.sleep(0)  # one is with the child, two wait
        assert await reason(made, b"x") == "busy"
        made.kill()
        assert await asyncio.gather(*asked) == ["failed"] * 3
        assert await reason(made, b"x") == "failed"
    async with child(replace(limits, max_waiting=9), SILENT) as made:
        asked = [asyncio.create_task(reason(made, b"x" * 50)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await reason(made, b"x") == "busy"
        made.kill()
        await asyncio.gather(*asked)


async def test_an_asker_waits_so_long_and_no_longer() -> None:
    async with child(replace(LIMITS, wait_s=0.05), SILENT) as made:
        assert await reason(made) == "late"


async def test_what_nobody_waits_for_any_more_is_not_sent() -> None:
    async with child(replace(LIMITS, ahead=1)) as made:
        await made.load("k", files())
        first = asyncio.create_task(made.count("k", BODY, is_chat=False))
        left = asyncio.create_task(made.count("other", BODY, is_chat=False))
        last = asyncio.create_task(made.count("k", BODY, is_chat=False))
        await asyncio.sleep(0)
        left.cancel()
        sent: list[str] = []
        send = made._send

        def spy(question: Any, written: int) -> None:
            sent.append(question.message.key)
            send(question, written)

        made._send = spy
        await asyncio.gather(first, last)
        assert sent == ["k"]


async def test_a_template_that_hangs_has_the_child_killed_and_is_blamed() -> None:
    async with child(replace(LIMITS, answer_s=0.3)) as made:
        await made.load("k", hangs())
        asked = [asyncio.create_task(reason(made, is_chat=True)) for _ in range(6)]
        assert await asyncio.gather(*asked) == ["failed"] * 6
        await until(lambda: made.has_ended)
        assert made.blamed == "k"


async def test_a_template_that_takes_all_memory_does_not_get_it() -> None:
    async with child() as made:
        template = "{{ (messages[0].content * 10**9)|length }}"
        await made.load("k", files(chat_templates={"default": template}))
        assert await reason(made, is_chat=True) == "refused"
        assert (await made.count("k", BODY, is_chat=False))[0] == 3


async def test_a_load_that_takes_too_long_or_is_cancelled_ends_the_child() -> None:
    stuck = (sys.executable, "-c", "import time; time.sleep(60)")
    for command in (SILENT, stuck):
        async with child(replace(LIMITS, load_s=0.2), command) as made:
            with pytest.raises(ChildEnded):
                await made.load("k", b"x" * 10**6)
            await until(lambda made=made: made.has_ended)
            assert made.blamed == "k"
    async with child(LIMITS, stuck) as made:
        loading = asyncio.create_task(made.load("k", b"x" * 10**6))
        await asyncio.sleep(0)
        loading.cancel()
        await asyncio.wait([loading])
        await until(lambda: made.has_ended)


async def test_a_child_that_ends_by_itself_is_noticed() -> None:
    async with child(LIMITS, DEAD) as made:
        await until(lambda: made.has_ended)
        assert made.blamed is None
        assert await reason(made) == "failed"
        with pytest.raises(ChildEnded):
            await made.load("k", b"x")
        made.forget("k")


async def test_counts_that_come_while_files_are_written_wait_behind_them() -> None:
    async with child() as made:
        await made.load("k", files())
        long = files(special_tokens={"pad": "x" * 2**22})  # more than a pipe takes
        loading = asyncio.create_task(made.load("other", long))
        await asyncio.sleep(0)
        tokens, _ = await made.count("k", BODY, is_chat=False)
        assert (tokens, await loading) == (3, "")


async def test_a_child_has_none_of_the_routers_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment_of(pid: int | None) -> bytes:
        return Path(f"/proc/{pid}/environ").read_bytes()

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    async with child() as made:
        environment = environment_of(made.pid)
        assert b"TOKENIZERS_PARALLELISM=false" in environment
        assert b"OPENAI" not in environment


async def test_a_child_goes_with_its_parent() -> None:
    script = (
        "import asyncio, os, signal\n"
        "from xpyd_router.tokens.process import ChildLimits, TokenChild\n"
        "async def main():\n"
        "    made = await TokenChild.start(ChildLimits())\n"
        "    await made.load('k', b'{}')\n"
        "    print(made.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    pid = int(output)

    def is_gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        with open(f"/proc/{pid}/stat") as stat:  # nobody may reap it in a container
            return stat.read().rpartition(")")[2].split()[0] == "Z"

    await until(is_gone)

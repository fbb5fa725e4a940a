"""GET /tokenizer: by which routers count tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.worker.server_fakes import Running, serving
from xpyd_core.blocks import SCHEME
from xpyd_core.tokenizer_files import (
    MAX_BYTES,
    ServedFiles,
    TokenizerFiles,
    decode_tokenizer_files,
    encode_tokenizer_files,
)

FILES = TokenizerFiles(tokenizer="é" * 10**6, vocab_size=5, max_model_len=9, block_size=16)


def give(server: Running, files: TokenizerFiles) -> None:
    service = server.api.service
    assert service is not None
    server.api.service = replace(service, model=replace(service.model, files=ServedFiles.of(files)))


async def test_the_document_comes_whole_and_with_its_tag() -> None:
    async with serving() as server:
        give(server, FILES)
        answer = await server.client.get("/tokenizer")
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/json")
        assert decode_tokenizer_files(answer.content) == FILES
        assert int(answer.headers["Content-Length"]) == len(answer.content)
        assert answer.json()["block_hash"] == SCHEME
        tag = answer.headers["ETag"]
        for known in (tag, f'"x", W/{tag}', "*"):
            again = await server.client.get("/tokenizer", headers={"If-None-Match": known})
            assert (again.status_code, again.content) == (304, b"")
        other = await server.client.get("/tokenizer", headers={"If-None-Match": '"x"'})
        assert other.status_code == 200
        give(server, replace_tokenizer("other"))
        assert (await server.client.get("/tokenizer")).headers["ETag"] != tag


def replace_tokenizer(text: str) -> TokenizerFiles:
    return TokenizerFiles(tokenizer=text, vocab_size=5, max_model_len=9, block_size=16)


async def test_it_is_sent_in_pieces_to_a_caller_that_reads_slowly() -> None:
    async with serving() as server:
        give(server, replace_tokenizer("x" * 32 * 2**20))
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(b"GET /tokenizer HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.split(b"\r\n")[0]
        # Nothing more is read, and others are served.
        answer = await server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2})
        assert answer.status_code == 200
        writer.close()


async def test_without_files_or_before_the_model_is_there_is_no_document() -> None:
    async with serving() as server:
        assert (await server.client.get("/tokenizer")).status_code == 404
        assert ServedFiles.of(replace_tokenizer("x" * MAX_BYTES)) is None
    async with serving(ready=False) as server:
        assert (await server.client.get("/tokenizer")).status_code == 503


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"tokenizer": 3, "vocab_size": 1, "max_model_len": 1, "block_size": 1}',
        b'{"tokenizer": "x", "vocab_size": 1, "max_model_len": 1, "block_size": 0}',
        b" " * (MAX_BYTES + 1),
    ],
    ids=len,
)
def test_what_is_no_document_is_refused(data: bytes) -> None:
    from xpyd_core.errors import ProtocolError

    with pytest.raises(ProtocolError, match="tokenizer files"):
        decode_tokenizer_files(data)


def test_fields_that_a_newer_engine_adds_are_ignored() -> None:
    data = encode_tokenizer_files(FILES)
    assert decode_tokenizer_files(data[:-1] + b',"newer":[1]}') == FILES


def test_a_loaded_model_has_the_files_that_its_own_tokenizer_works_with(tmp_path: Path) -> None:
    import tokenizers

    from xpyd_worker.config import WorkerConfig
    from xpyd_worker.load.engine import load

    folder = Path(__file__).parents[2] / "examples" / "demo-model"
    config: Any = WorkerConfig(model=str(folder), kv_cache_bytes=2**22, block_size=8)
    loaded = load(config, deliver=lambda _: None, keys=(), incarnation="i", make_store=None)
    served = loaded.model.files
    assert served is not None
    files = decode_tokenizer_files(served.body)
    assert (files.block_size, files.knows_developer, files.prefix_caching) == (8, True, True)
    assert files.max_model_len == loaded.model.max_model_len
    assert files.vocab_size == loaded.model.vocab_size
    assert files.special_tokens["eos_token"] == "<|end|>"
    assert "add_generation_prompt" in files.chat_templates["default"]
    copy: Any = tokenizers.Tokenizer.from_str(files.tokenizer)
    text = "hello <|user|> world é"
    ids = loaded.model.tokenizer.encode(text, add_special_tokens=True)
    assert copy.encode(text, add_special_tokens=True).ids == ids


def test_what_flags_say_of_chats_is_the_end_of_the_key_where_the_checkpoint_does_not_show_it() -> (
    None
):
    from xpyd_worker.config import WorkerConfig
    from xpyd_worker.load.engine import load

    def key(**told: str) -> str:
        config = WorkerConfig(
            model=str(Path(__file__).parents[2] / "examples" / "demo-model"),
            kv_cache_bytes=2**22,
            **told,  # type: ignore[arg-type]
        )
        loaded = load(config, deliver=lambda _: None, keys=(), incarnation="i", make_store=None)
        return loaded.compatibility

    plain = key()
    assert "+" not in plain
    # The demo model's template shows no format, and hermes is what is taken then.
    assert key(tool_call_parser="hermes", reasoning_parser="none") == plain
    told = [
        {"tool_call_parser": "qwen3_coder"},
        {"reasoning_parser": "qwen3"},
        {"chat_template": "{{ messages }}"},
    ]
    keys = [key(**one) for one in told]
    assert len({plain, *keys}) == 4
    assert all(one.startswith(f"{plain}+chats-") for one in keys)


def test_another_chat_template_takes_the_checkpoints_place_and_shows_the_parsers() -> None:
    from xpyd_core.errors import UserError
    from xpyd_worker.config import WorkerConfig
    from xpyd_worker.load.engine import load
    from xpyd_worker.parsers.registry import REASONING_FAMILIES, TOOL_FAMILIES

    def loaded(template: str, *, has_to_know: bool = False) -> Any:
        config = WorkerConfig(
            model=str(Path(__file__).parents[2] / "examples" / "demo-model"),
            kv_cache_bytes=2**22,
            chat_template=template,
            enable_auto_tool_choice=has_to_know,
        )
        return load(config, deliver=lambda _: None, keys=(), incarnation="i", make_store=None).model

    template = "{{ tools }}{{ messages }}<tool_call>{# developer #}<think></think>"
    model = loaded(template, has_to_know=True)
    assert model.knows_developer
    assert model.parsers.tools is TOOL_FAMILIES["hermes"]
    assert model.parsers.reasoning is REASONING_FAMILIES["qwen3"]
    assert decode_tokenizer_files(model.files.body).chat_templates == {"default": template}
    assert loaded("{{ tools }}").parsers.tools is None
    with pytest.raises(UserError, match=r"--enable-auto-tool-choice: .*give --tool-call-parser"):
        loaded("{{ tools }}", has_to_know=True)

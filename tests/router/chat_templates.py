"""Tokenizer files for tests: the demo model's, and templates in the ways of the common families."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from xpyd_core.tokenizer_files import TokenizerFiles
from xpyd_worker.runner.tokenizer import Tokenizer as EngineTokenizer

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo-model"

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == 'user' and message.content is string %}
        {%- set ns.found = true %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + ('!' if loop.index0 == ns.last else '') }}
    {{- '\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|header|>system<|end_header|>\\n\\nToday: ' + strftime_now('%Y') + '\\n' }}
{{- system_message + '<|eot|>' }}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '<|end_header|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|end_header|>\\n\\n' }}
{%- endif %}
"""

INST = """{{ bos_token }}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% else %}
{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}"""

TURNS = """{{ bos_token }}{% macro turn(role, text) %}<start_of_turn>{{ role }}
{{ text | trim }}<end_of_turn>
{% endmacro %}{% for message in messages %}
{{- turn('model' if message.role == 'assistant' else message.role, message.content) }}
{%- if message.name is defined %}({{ message.name }}){% endif %}
{%- endfor %}
{%- for key, value in dict(a=1, b=[documents, tools])|items %}{{ key }}{{ value }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

FAMILIES = {"chatml": CHATML, "headers": HEADERS, "inst": INST, "turns": TURNS}


def save_byte_level(folder: Path, template: str, *, adds_bos: bool = True) -> Path:
    """A checkpoint's tokenizer: bytes, two merges, a BOS, added tokens, stored limits."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate([*alphabet, "he", "ll"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = ("<s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<start_of_turn>", "</s>")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in added])
    tokenizer.add_tokens([AddedToken("<think>", special=False, lstrip=True)])
    if adds_bos:
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bos)]
        )
    tokenizer.enable_truncation(4)
    return _save(folder, tokenizer, template)


def save_sentence_pieces(folder: Path, template: str) -> Path:
    """A checkpoint's tokenizer: pieces with a prefix space and bytes to fall back to."""
    names = ["<unk>", "\u2581", "h", "e", "l", "o", "\u2581h", "\u2581he", "ll", "<s>", "</s>"]
    names += [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("\u2581", "h"), ("\u2581h", "e"), ("l", "l")]
    vocab = {name: index for index, name in enumerate(names)}
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return _save(folder, tokenizer, template)


def _save(folder: Path, tokenizer: Tokenizer, template: str) -> Path:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def files_of(tokenizer: EngineTokenizer, /, **changes: object) -> TokenizerFiles:
    """What an engine with this tokenizer gives to routers."""
    made = TokenizerFiles(
        tokenizer=tokenizer.to_json(),
        chat_templates=tokenizer.chat_templates,
        special_tokens=tokenizer.template_variables,
        vocab_size=tokenizer.vocab_size,
        max_model_len=2048,
        block_size=16,
    )
    return msgspec.structs.replace(made, **changes)

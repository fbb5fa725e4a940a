"""The demo model's tokenizer: byte-level BPE, six special tokens, a chat template.

Where it sits: `train.py` builds it once from the corpus and encodes with it; everyone else reads
the files. Any bytes round-trip, for all 256 byte values are in the vocabulary.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD, SYSTEM, USER, ASSISTANT, END_OF_TURN)

VOCAB_TOKENS = 3072
CONTEXT_TOKENS = 2048

# `developer` is the newer API name of `system`; content parts of type text are joined. The model
# was not trained for tools, so it is not shown them; an agent's history is accepted.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] in ['system', 'developer'] -%}{{- '<|system|>' -}}
{%- elif message['role'] in ['user', 'tool'] -%}{{- '<|user|>' -}}
{%- elif message['role'] == 'assistant' -%}{{- '<|assistant|>' -}}
{%- else -%}{{- raise_exception('role must be system, developer, user, assistant or tool') -}}
{%- endif -%}
{{- '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- elif message['content'] -%}
{%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{{- '<tool_call>' ~ (call['function'] | tojson) ~ '</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of exactly `VOCAB_TOKENS` tokens; the special ones have the lowest ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_TOKENS,
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

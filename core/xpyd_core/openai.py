"""Request bodies of /v1/completions and /v1/chat/completions, with the bounds of each field. Pure.

The one description of these bodies: the router reads `RoutedCompletion` or `RoutedChat`, the
fields that it acts on; the engine reads them too, and `CompletionRequest` or `ChatRequest` behind
them; the router's OpenAPI document shows the fields of both. `bodies.read` makes one of these
values of a body, or raises the ApiError that names the field. Unknown fields are skipped, null
counts as absent.

What needs the model (its name, its vocabulary, the context's length) and what two fields forbid
together is checked by the program that acts on it. See docs/adr/0036 and 0039.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from xpyd_core.bodies import unread
from xpyd_core.chats import MAX_DOCUMENTS, MAX_TOOLS, ChosenTools, Messages, Tool

# vLLM has no bound on these; without one a small body could order unbounded work.
MAX_NAME_CHARACTERS = 512
MAX_CHOICES = 16_384
"""The bound on choices of all prompts of a request: the router keeps something for each. Engines
allow fewer.
"""
MAX_PROMPTS = 256
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
"""OpenAI's bound for chat; vLLM has the same default for both endpoints."""
MAX_TOKENS = 2**62
"""Larger than any context; a number above the context gets its own message."""
# Each is work per generated token, and OpenAI and vLLM state no bound.
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 128
# vLLM takes any finite number above 0; no wider range than this one means anything.
_MOST_REPETITION_PENALTY = 1e6
MAX_TOKENIZED_CHARACTERS = 4 * 1024 * 1024
"""A second of encoding. No model's context is longer, but for texts of very long tokens."""
MAX_DETOKENIZED = 1024 * 1024

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Whether the model has it is checked later."""
_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
_Text64 = Annotated[str, Meta(max_length=64)]
_Text1024 = Annotated[str, Meta(max_length=1024)]
_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_PromptItem = (
    TokenId | Annotated[str, Meta(min_length=1)] | Annotated[list[TokenId], Meta(min_length=1)]
)
_Pattern = Annotated[str, Meta(min_length=1, max_length=8192)]
_Rules = Annotated[str, Meta(min_length=1, max_length=64 * 1024)]
_Choice = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=16 * 1024)]],
    Meta(min_length=1, max_length=10_000),
]
_OBJECT: dict[str, Any] = {"type": "object"}
_LIST: dict[str, Any] = {"type": "array"}
_BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
# msgspec knows one list type in a union; a list of token ids is one prompt, and holds nothing else.
_ONE_PROMPT: list[dict[str, Any]] = [
    {"type": "string", "minLength": 1},
    {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        "minItems": 1,
    },
]
_PROMPT_FORMS = [
    *_ONE_PROMPT,
    *(
        {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_PROMPTS}
        for one in _ONE_PROMPT
    ),
]


def _router(text: str) -> Meta:
    """A field that the router acts on, and therefore checks."""
    return Meta(description=text, extra_json_schema={"x-checked-by": "router"})


def _engine(text: str, **schema: Any) -> Meta:  # noqa: ANN401 - any JSON value
    """A field that goes to the engine unread: the client gets the engine's 400.

    `schema` replaces what msgspec writes of the type, where its bounds say less.
    """
    return Meta(description=text, extra_json_schema={"x-checked-by": "engine", **schema})


class StreamOptions(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How usage is streamed."""

    include_usage: Annotated[bool | None, _router("A last chunk with the usage.")] = None
    continuous_usage_stats: Annotated[
        bool | None, _router("With include_usage: the usage so far in every chunk.")
    ] = None


class Routed(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The fields of both endpoints that the router acts on; the engine reads them too."""

    model: Annotated[
        _Name | None,
        _router("A name that GET /v1/models shows."),
    ] = None
    stream: Annotated[bool | None, _router("The answer as server-sent events.")] = None
    stream_options: Annotated[StreamOptions | None, _router("Only with stream.")] = None
    max_tokens: Annotated[
        _Tokens | None,
        _router(
            "Tokens to generate at most. 0 only with echo or prompt_logprobs. Without it 16 of a "
            "completion, of a chat what the context has room for."
        ),
    ] = None
    min_tokens: Annotated[_Tokens | None, _router("Not more than max_tokens.")] = None
    n: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
        _router(f"Choices for each prompt, at most {MAX_CHOICES} of all; engines allow fewer."),
    ] = None
    seed: Annotated[_Int64 | None, _router("Without one the router draws one.")] = None
    return_token_ids: Annotated[bool | None, _router("As in vLLM.")] = None


Echo = Annotated[bool | None, _router("The answer begins with the prompt.")]
MaxCompletionTokens = Annotated[_Tokens | None, _router("As max_tokens, and wins over it.")]


class RoutedCompletion(Routed, frozen=True, gc=False, kw_only=True):
    """What the router reads of a /v1/completions body."""

    echo: Echo = None


class RoutedChat(Routed, frozen=True, gc=False, kw_only=True):
    """What the router reads of a /v1/chat/completions body."""

    max_completion_tokens: MaxCompletionTokens = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format.json_schema`."""

    name: Annotated[_Text1024 | None, _engine("Changes nothing.")] = None
    description: Annotated[str | None, _engine("Changes nothing.")] = None
    schema: Annotated[
        msgspec.Raw, _engine("A JSON schema. Without it any object.", type=["object", "boolean"])
    ] = unread()
    strict: Annotated[
        bool | None, _engine("Objects have no members but those that the schema names.")
    ] = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer must look like, as OpenAI says it; structural_tag as vLLM."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: Annotated[JsonSchemaFormat | None, _engine("With the type json_schema.")] = None
    format: Annotated[msgspec.Raw, _engine("With structural_tag.", **_OBJECT)] = unread()
    structures: Annotated[msgspec.Raw, _engine("With structural_tag, its older form.", **_LIST)] = (
        unread()
    )
    triggers: Annotated[msgspec.Raw, _engine("With structural_tag, its older form.", **_LIST)] = (
        unread()
    )


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer must look like, as vLLM says it: one of the first six, and how."""

    json: Annotated[
        msgspec.Raw, _engine("A JSON schema, or its text.", type=["object", "boolean", "string"])
    ] = unread()
    json_object: Annotated[bool | None, _engine("Any JSON object.")] = None
    regex: Annotated[_Pattern | None, _engine("A regular expression.")] = None
    choice: Annotated[_Choice | None, _engine("One of these texts.")] = None
    grammar: Annotated[_Rules | None, _engine("Rules in Lark's or GBNF's notation.")] = None
    structural_tag: Annotated[
        msgspec.Raw, _engine("As in response_format, or its text.", type=["object", "string"])
    ] = unread()
    disable_any_whitespace: Annotated[
        bool | None, _engine("No blank even behind a comma or a colon.")
    ] = None
    disable_additional_properties: Annotated[bool | None, _engine("As strict of json_schema.")] = (
        None
    )
    whitespace_pattern: Annotated[
        _Text1024 | None, _engine("What may be between the parts of a JSON value.")
    ] = None


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both endpoints that only the engine reads. Ranges are OpenAI's or vLLM's."""

    priority: Annotated[
        _Int64 | None,
        _engine(
            "Lower goes first, where the router has limits; the header X-Xpyd-Priority wins over "
            "it. Engines refuse it unless they schedule by it."
        ),
    ] = None
    user: Annotated[str | None, _engine("The session, for --policy SessionAffinity.")] = None
    prompt_cache_key: Annotated[str | None, _engine("The session, before `user`.")] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, _engine("0: greedy. Default: 1.")
    ] = None
    top_p: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, _engine("Default: 1.")] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None, _engine("0 and -1: off.")
    ] = None
    min_p: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, _engine("Default: 0, off.")] = None
    presence_penalty: Annotated[_Penalty | None, _engine("Of tokens in the output.")] = None
    frequency_penalty: Annotated[_Penalty | None, _engine("Of tokens in the output.")] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0, le=_MOST_REPETITION_PENALTY)] | None,
        _engine("Of tokens in prompt or output."),
    ] = None
    logit_bias: Annotated[
        Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIAS)] | None,
        _engine("By token id: added to its logit, -100 to 100."),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None,
        _engine("Only these tokens are generated."),
    ] = None
    bad_words: Annotated[
        Annotated[list[_BadWord], Meta(max_length=MAX_BAD_WORDS)] | None,
        _engine("Words that are not generated."),
    ] = None
    stop: Annotated[
        _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None,
        _engine("Texts that end the answer."),
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None,
        _engine("Tokens that end the answer."),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, _engine("Stop texts are part of the answer.")
    ] = None
    ignore_eos: Annotated[bool | None, _engine("Generate until max_tokens.")] = None
    skip_special_tokens: Annotated[bool | None, _engine("Default: true.")] = None
    spaces_between_special_tokens: Annotated[bool | None, _engine("Default: true.")] = None
    prompt_logprobs: Annotated[
        _Logprobs | None, _engine("Log probabilities of the prompt; not with stream.")
    ] = None
    cache_salt: Annotated[
        _Text1024 | None, _engine("Prefixes are shared only within one cache_salt.")
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None,
        _engine("So many tokens of the prompt's end are kept; -1: as many as there is room for."),
    ] = None
    response_format: Annotated[
        ResponseFormat | None, _engine("What the answer must look like.")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, _engine("The same, as vLLM says it.")
    ] = None
    guided_json: Annotated[
        msgspec.Raw,
        _engine("structured_outputs.json of older vLLM.", type=["object", "boolean", "string"]),
    ] = unread()
    guided_json_object: Annotated[
        bool | None, _engine("structured_outputs.json_object of older vLLM.")
    ] = None
    guided_regex: Annotated[_Pattern | None, _engine("structured_outputs.regex of older vLLM.")] = (
        None
    )
    guided_choice: Annotated[
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=16 * 1024)]],
            Meta(max_length=10_000),
        ]
        | None,
        _engine("structured_outputs.choice of older vLLM."),
    ] = None
    guided_grammar: Annotated[
        _Rules | None, _engine("structured_outputs.grammar of older vLLM.")
    ] = None
    guided_whitespace_pattern: Annotated[
        _Text1024 | None, _engine("structured_outputs.whitespace_pattern of older vLLM.")
    ] = None
    guided_decoding_backend: Annotated[str | None, _engine("Changes nothing.")] = None


class CompletionOptions(Generation, frozen=True, kw_only=True):
    """What only the engine reads of a /v1/completions body, but for the prompt."""

    logprobs: Annotated[
        _Logprobs | None, _engine("Log probabilities of so many tokens at each place.")
    ] = None


Prompts = (
    Annotated[str, Meta(min_length=1)]
    | Annotated[
        list[
            TokenId
            | Annotated[str, Meta(min_length=1)]
            | Annotated[list[TokenId], Meta(min_length=1)]
        ],
        Meta(min_length=1),
    ]
)
"""What `prompt` may be, as far as msgspec's types can say it."""


class CompletionRequest(CompletionOptions, frozen=True, kw_only=True):
    """All of it, as the OpenAPI document shows it. The engine reads the prompt by itself, since it
    may be long."""

    prompt: Annotated[
        Prompts,
        _engine("A text, token ids, or several of either.", oneOf=_PROMPT_FORMS),
    ]


_Tools = Annotated[
    Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None,
    _engine("Functions that the model may call."),
]
_ToolChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenTools | None,
    _engine(
        "none: the model does not see the tools; required: it calls at least one; "
        "a function: just that one; allowed_tools: these and no others. Default: auto."
    ),
]
_Documents = Annotated[
    Annotated[list[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS)] | None,
    _engine("For templates that have a place for them."),
]
_TemplateVariables = Annotated[
    dict[str, Any] | None, _engine("Variables of the template, e.g. enable_thinking.")
]
_ReasoningEffort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
    _engine("A variable of the template, and enable_thinking with it: false for none, else true."),
]
_GenerationPrompt = Annotated[
    bool | None,
    _engine("The template opens the answer. Default: true; false with continue_final_message."),
]
_FinalMessage = Annotated[
    bool | None,
    _engine("The answer goes on in the last message; not with add_generation_prompt."),
]


class ChatRequest(Generation, frozen=True, kw_only=True):
    """What only the engine reads of a /v1/chat/completions body."""

    messages: Annotated[Messages, _engine("The chat so far.")]
    tools: _Tools = None
    tool_choice: _ToolChoice = None
    documents: _Documents = None
    chat_template_kwargs: _TemplateVariables = None
    reasoning_effort: _ReasoningEffort = None
    add_generation_prompt: _GenerationPrompt = None
    continue_final_message: _FinalMessage = None
    logprobs: Annotated[bool | None, _engine("Log probabilities of the answer's tokens.")] = None
    top_logprobs: Annotated[
        _Logprobs | None, _engine("With logprobs: of so many tokens at each place.")
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, _engine("false: one call at most. Default: true.")
    ] = None
    include_reasoning: Annotated[
        bool | None, _engine("false: the answer is without its reasoning. Default: true.")
    ] = None
    metadata: Annotated[
        dict[str, str] | None, _engine("Changes nothing, since answers are not stored.")
    ] = None


class KvTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_transfer_params`, which our router puts into bodies for P and D (docs/engine.md).

    Other routers' keys are ignored. Lists per choice follow OpenAI's order: i*n+j for choice j of
    prompt i; the others have one entry per prompt.
    """

    seed: int | None = None
    client_max_tokens: _Tokens | msgspec.UnsetType | None = msgspec.UNSET
    """Unset: the request does not come from our router."""
    max_model_len: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    continue_from: list[list[TokenId]] | None = None
    emit_from: list[int] | None = None
    first_logprobs: list[dict[str, Any] | None] | None = None
    response_id: Annotated[str, Meta(max_length=256)] | None = None
    created: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    transfer: list[Literal["none", "pending", "granted"]] | None = None
    decode_incarnation: _Text64 | None = None
    prompt_digest: list[_Text64] | None = None


_TEXT_MODEL = "A name that GET /v1/models shows; needed only where there are several models."


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /tokenize: `prompt` or `messages`, and what belongs to these."""

    model: Annotated[_Name | None, _router(_TEXT_MODEL)] = None
    prompt: Annotated[
        Annotated[str, Meta(max_length=MAX_TOKENIZED_CHARACTERS)] | None,
        _engine("A text. Give this or messages."),
    ] = None
    messages: Annotated[Messages | None, _engine("A chat, for its template.")] = None
    return_token_strs: Annotated[bool | None, _engine("Default: false.")] = None
    add_special_tokens: Annotated[
        bool | None, _engine("Default: true with prompt, false with messages.")
    ] = None
    tools: _Tools = None
    tool_choice: _ToolChoice = None
    documents: _Documents = None
    chat_template_kwargs: _TemplateVariables = None
    reasoning_effort: _ReasoningEffort = None
    add_generation_prompt: _GenerationPrompt = None
    continue_final_message: _FinalMessage = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /detokenize."""

    tokens: Annotated[
        Annotated[list[TokenId], Meta(max_length=MAX_DETOKENIZED)], _engine("Token ids.")
    ]
    model: Annotated[_Name | None, _router(_TEXT_MODEL)] = None


def body_schema(*kinds: type[msgspec.Struct]) -> dict[str, Any]:
    """One JSON schema of an object with the fields of all `kinds`, in their order."""
    _, parts = msgspec.json.schema_components(kinds, ref_template="{name}")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for kind in kinds:
        own = _resolved(parts[kind.__name__], parts)
        properties |= own["properties"]
        required += own.get("required", ())
    return {"type": "object", "properties": properties, "required": required}


def _resolved(schema: Any, parts: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any JSON value
    """`schema` with what it refers to in its place, and null as one more type."""
    if isinstance(schema, list):
        return [_resolved(one, parts) for one in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    found = dict(cast("dict[str, Any]", schema))
    if "$ref" in found:
        found = {**parts[found.pop("$ref")], **found}
        found.pop("title", None)
    made = {name: _resolved(one, parts) for name, one in found.items()}
    if "oneOf" in made:  # says exactly what msgspec's own union says loosely
        made.pop("anyOf", None)
    if made.get("default", ...) is None:
        del made["default"]
    if made.get("required") == []:
        del made["required"]
    others = [one for one in made.get("anyOf", []) if one != {"type": "null"}]
    if len(others) == 1 and isinstance(others[0].get("type"), str):
        del made["anyOf"]
        made = {**others[0], "type": [others[0]["type"], "null"], **made}
    return made

"""The OpenAI request bodies as types. Decoding refuses wrong types; ranges are checked when translating.

Every field says in its annotation whether it is honoured, refused or ignored (see `fields`). None is "not given"
everywhere.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Raw, Struct

from toque.gateway.http.fields import OPTIONAL, honoured, ignored, refused


class ContentPart(Struct):
    """A part of a message. Other types than text, input_text and refusal are refused by name."""

    type: Annotated[str, honoured("`text`, `input_text` or `refusal`; images, audio and files: 400.")]
    text: Annotated[str | None, honoured("The part's text. Parts are joined by line breaks.")] = None
    refusal: Annotated[str | None, honoured("The text of a `refusal` part.")] = None


class FunctionCall(Struct):
    name: Annotated[str, honoured()]
    arguments: Annotated[str | dict[str, Any], honoured("A JSON object, as text or as it is.")] = ""


class ToolCall(Struct):
    function: Annotated[FunctionCall, honoured()]
    id: Annotated[str, honoured()] = ""
    type: Annotated[str, honoured("Always taken as `function`.")] = "function"


class Message(Struct):
    """One message of a conversation."""

    role: Annotated[str, honoured("system, developer (as system), user, assistant, tool or function.")]
    content: Annotated[str | list[ContentPart] | None, honoured("Text, or parts of type text.")] = None
    name: Annotated[str | None, honoured("Given to the chat template.")] = None
    tool_calls: Annotated[list[ToolCall] | None, honoured("Given to the chat template.")] = None
    tool_call_id: Annotated[str | None, honoured("Given to the chat template.")] = None
    reasoning_content: Annotated[str | None, honoured("Given to the chat template.")] = None
    refusal: Annotated[str | None, honoured("Stands for the content where that is missing.")] = None
    audio: Annotated[Raw, refused("models here neither hear nor speak")] = OPTIONAL
    function_call: Annotated[Raw, refused("its successor is tool_calls")] = OPTIONAL


class StreamOptions(Struct):
    include_usage: Annotated[bool | None, honoured("A last chunk carries the usage.")] = None
    include_obfuscation: Annotated[bool | None, ignored("Chunks are never padded.")] = None


class JsonSchemaFormat(Struct):
    name: Annotated[str, honoured("Only for people.")] = ""
    description: Annotated[str | None, honoured("Only for people.")] = None
    schema: Annotated[
        dict[str, Any] | None,
        honoured("A JSON schema; a keyword that cannot be enforced is refused by name."),
    ] = None
    strict: Annotated[bool | None, honoured("Schemas are always enforced.")] = None


class ResponseFormat(Struct):
    type: Annotated[str, honoured("`text`, `json_object` or `json_schema`.")]
    json_schema: Annotated[JsonSchemaFormat | None, honoured("With type `json_schema`.")] = None


class StructuredOutputs(Struct):
    """Exactly one of these says what the answer must match."""

    json: Annotated[dict[str, Any] | str | None, honoured("A JSON schema, also as text.")] = None
    regex: Annotated[str | None, honoured("The whole answer must match it.")] = None
    choice: Annotated[list[str] | None, honoured("The answer is one of up to 1,000 texts.")] = None
    grammar: Annotated[str | None, honoured("A grammar in Lark's notation.")] = None
    json_object: Annotated[bool | None, honoured("Any JSON object.")] = None


class FunctionDefinition(Struct):
    name: Annotated[str, honoured("1 to 64 letters, digits, `_`, `-` and `.`.")]
    description: Annotated[str | None, honoured("Given to the chat template.")] = None
    parameters: Annotated[
        dict[str, Any] | None,
        honoured("A JSON schema of type object. Without it: a function that takes nothing."),
    ] = None
    strict: Annotated[bool | None, honoured("Arguments must match the schema, by grammar.")] = None


class Tool(Struct):
    type: Annotated[str, honoured("`function`.")]
    function: Annotated[FunctionDefinition | None, honoured("Required.")] = None


class NamedFunction(Struct):
    name: Annotated[str, honoured()]


class NamedToolChoice(Struct):
    type: Annotated[str, honoured("`function`.")]
    function: Annotated[NamedFunction | None, honoured()] = None


class SamplingFields(Struct, kw_only=True):
    """What chat and text completions share."""

    model: Annotated[str, honoured("A name from `/v1/models`, exactly.")]
    temperature: Annotated[float | None, honoured("0 to 2; 0 is greedy.")] = None
    top_p: Annotated[float | None, honoured("0 to 1.")] = None
    top_k: Annotated[int | None, honoured("0 or -1: off.")] = None
    min_p: Annotated[float | None, honoured("0 to 1, of the likeliest token's probability.")] = None
    repetition_penalty: Annotated[float | None, honoured("0.01 to 10; counts the prompt too.")] = None
    presence_penalty: Annotated[float | None, honoured("-2 to 2; counts generated tokens.")] = None
    frequency_penalty: Annotated[float | None, honoured("-2 to 2; counts generated tokens.")] = None
    logit_bias: Annotated[
        dict[str, float] | None, honoured("Token id to -100 … 100; at most 1,024 tokens.")
    ] = None
    bad_words: Annotated[
        list[str] | None,
        honoured(
            "Words that are never generated: those of one token as tokens, longer ones as texts, also inside others;"
            " the latter not beside tools or a form."
        ),
    ] = None
    seed: Annotated[
        int | None, honoured("The same seed, request and version give the same answer, in any company.")
    ] = None
    n: Annotated[int | None, honoured("Choices for each prompt.")] = None
    best_of: Annotated[int | None, refused("it must equal n where it is given")] = None
    stop: Annotated[str | list[str] | None, honoured("Up to 16 strings of up to 1,024 characters.")] = None
    stop_token_ids: Annotated[list[int] | None, honoured("Up to 128 ids that end an answer.")] = None
    include_stop_str_in_output: Annotated[bool | None, honoured()] = None
    skip_special_tokens: Annotated[bool | None, honoured("Default true.")] = None
    ignore_eos: Annotated[bool | None, honoured("Go on past the model's own end.")] = None
    min_tokens: Annotated[int | None, honoured("No end before so many tokens.")] = None
    max_tokens: Annotated[
        int | None, honoured("Default: 16 for completions, what the context holds for chat.")
    ] = None
    stream: Annotated[bool | None, honoured()] = None
    stream_options: Annotated[StreamOptions | None, honoured("Only with `stream`.")] = None
    echo: Annotated[bool | None, honoured("Chat: the continued message, with `continue_final_message`.")] = (
        None
    )
    priority: Annotated[
        int | None, honoured("-1000 to 1000; lower goes first. Below 0 only with an administrator's key.")
    ] = None
    cache_salt: Annotated[str | None, honoured("Separates prefix caches; up to 256 characters.")] = None
    timeout: Annotated[
        float | None,
        honoured("Seconds until the request ends in 504; also the header `x-request-timeout`."),
    ] = None
    response_format: Annotated[
        ResponseFormat | None, honoured("The answer is JSON, of a schema if one is given.")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, honoured("The answer matches a schema, regex, choice or grammar.")
    ] = None
    # Raw: looked at only to be refused or ignored, so nothing is built from them.
    guided_json: Annotated[Raw, refused("use response_format or structured_outputs")] = OPTIONAL
    guided_regex: Annotated[Raw, refused("use structured_outputs")] = OPTIONAL
    guided_choice: Annotated[Raw, refused("use structured_outputs")] = OPTIONAL
    guided_grammar: Annotated[Raw, refused("use structured_outputs")] = OPTIONAL
    use_beam_search: Annotated[Raw, refused("answers are sampled here")] = OPTIONAL
    prompt_logprobs: Annotated[Raw, refused("use echo with logprobs on /v1/completions")] = OPTIONAL
    truncate_prompt_tokens: Annotated[Raw, refused("shorten the prompt before it is sent")] = OPTIONAL
    user: Annotated[Raw, ignored("Tenants are told apart by their keys.")] = OPTIONAL
    metadata: Annotated[Raw, ignored("Nothing is stored that it could describe.")] = OPTIONAL
    service_tier: Annotated[Raw, ignored("There is one tier; see `priority`.")] = OPTIONAL


class ChatCompletionBody(SamplingFields, kw_only=True):
    """A request to `/v1/chat/completions`."""

    messages: Annotated[list[Message], honoured("1 to 4,096 messages.")]
    max_completion_tokens: Annotated[int | None, honoured("Wins over `max_tokens`.")] = None
    logprobs: Annotated[bool | None, honoured()] = None
    top_logprobs: Annotated[int | None, honoured("0 to 20, with `logprobs`.")] = None
    add_generation_prompt: Annotated[bool | None, honoured("Default true.")] = None
    continue_final_message: Annotated[
        bool | None, honoured("The answer goes on in the assistant's last message.")
    ] = None
    chat_template: Annotated[
        str | None, refused("the template is the model's own: requests may not bring one")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, honoured("Variables for the chat template; up to 64.")
    ] = None
    tools: Annotated[list[Tool] | None, honoured("Up to 128 functions.")] = None
    tool_choice: Annotated[
        str | NamedToolChoice | None,
        honoured("`none`, `auto`, `required`, or a function; the last two are enforced by grammar."),
    ] = None
    parallel_tool_calls: Annotated[bool | None, honoured("false: at most one call.")] = None
    functions: Annotated[Raw, refused("its successor is tools")] = OPTIONAL
    function_call: Annotated[Raw, refused("its successor is tool_choice")] = OPTIONAL
    modalities: Annotated[list[str] | None, honoured('`["text"]` is the only one.')] = None
    audio: Annotated[Raw, refused("models here do not speak")] = OPTIONAL
    web_search_options: Annotated[Raw, refused("there is no search here")] = OPTIONAL
    moderation: Annotated[Raw, refused("nothing here moderates")] = OPTIONAL
    prediction: Annotated[Raw, ignored("It would change the speed only.")] = OPTIONAL
    reasoning_effort: Annotated[Raw, ignored("See `chat_template_kwargs` for models that reason.")] = OPTIONAL
    verbosity: Annotated[Raw, ignored("Models here have no such setting.")] = OPTIONAL
    store: Annotated[Raw, ignored("Nothing is stored.")] = OPTIONAL
    prompt_cache_key: Annotated[Raw, ignored("Equal beginnings are found without it.")] = OPTIONAL
    prompt_cache_retention: Annotated[Raw, ignored("The cache keeps what it has room for.")] = OPTIONAL
    prompt_cache_options: Annotated[Raw, ignored("The cache keeps what it has room for.")] = OPTIONAL
    safety_identifier: Annotated[Raw, ignored("Tenants are told apart by their keys.")] = OPTIONAL


class CompletionBody(SamplingFields, kw_only=True):
    """A request to `/v1/completions`."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        honoured("A text, token ids, or a list of either; ids are used untouched."),
    ]
    logprobs: Annotated[int | None, honoured("0 to 20 alternatives; with `echo` the prompt's too.")] = None
    add_special_tokens: Annotated[bool | None, honoured("Default true.")] = None
    suffix: Annotated[str | None, refused("models here continue text, they do not fill in")] = None


class TokenizeBody(Struct, kw_only=True):
    """A request to `/tokenize`."""

    model: Annotated[str | None, honoured("May be left out where one model is served.")] = None
    prompt: Annotated[str | None, honoured("A text, or else `messages`.")] = None
    messages: Annotated[list[Message] | None, honoured("A conversation, or else `prompt`.")] = None
    add_special_tokens: Annotated[bool, honoured("For a prompt.")] = True
    add_generation_prompt: Annotated[bool, honoured("For messages.")] = True
    continue_final_message: Annotated[bool, honoured("For messages.")] = False
    return_token_strs: Annotated[bool, honoured("Give each token's text too.")] = False


class DetokenizeBody(Struct, kw_only=True):
    """A request to `/detokenize`."""

    model: Annotated[str | None, honoured("May be left out where one model is served.")] = None
    tokens: Annotated[list[int], honoured()]

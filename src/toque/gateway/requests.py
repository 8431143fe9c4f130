"""The one internal request. Every API that people call is translated into it; nothing after it sees their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toque.text.grammar.spec import GrammarSpec, ToolSpec
from toque.types import EngineRequest, SamplingParams

MAX_BAD_WORDS = 128


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages as the chat template takes them: plain dicts, contents as text, tool arguments as JSON text."""

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_extra: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used untouched."""

    ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions an answer may call. ``definitions`` are what the template gets, ``specs`` those that may be called.

    ``forced``: it must call one, and nothing else. ``strict``: some call's arguments must match its schema.
    """

    definitions: tuple[Mapping[str, Any], ...]
    specs: tuple[ToolSpec, ...]
    names: frozenset[str]
    forced: bool
    strict: bool
    parallel: bool

    @property
    def schemas(self) -> dict[str, Any]:
        """Of the functions' parameters, by name."""
        functions = [definition["function"] for definition in self.definitions]
        return {function["name"]: function.get("parameters") for function in functions}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request, before the model's tokenizer has seen it.

    Choices are numbered prompt-major: choice ``i`` answers prompt ``i // n``. ``max_tokens`` in ``sampling`` is what
    the caller asked for; preparing the request bounds it by the room that the prompt leaves.
    """

    request_id: str
    model: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    timeout_s: float | None = None
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    grammar: GrammarSpec | None = None
    tools: ToolUse | None = None

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True)
class PreparedSequence:
    """One choice, ready to run. ``echo_text`` is sent before anything generated.

    ``engine`` is None when there is nothing to compute (an echo of the prompt without logprobs). ``continues`` says
    that the answer's text goes on where the prompt's ends, instead of being a text of its own.
    """

    index: int
    prompt_index: int
    first_of_prompt: bool
    prompt: tuple[int, ...]
    engine: EngineRequest | None
    echo_text: str = ""
    continues: bool = False
    thinks: bool | None = None  # None: the model does not reason; True: the prompt has opened its reasoning


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    request: GenerationRequest
    sequences: tuple[PreparedSequence, ...]
    prompt_tokens: int  # each prompt counted once, however many choices answer it
    dialect: str = ""  # in which tool calls are read; "": they are not
    enforced: bool = False  # the answer follows a grammar


@dataclass(slots=True)
class Usage:
    """Tokens as they are billed: what the answer says, the ledger holds and the counters add up to."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0  # a part of completion_tokens

"""From a checked request to token ids: template, tokenizer, and everything that only the model can check."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from toque.errors import ContextLengthError, RequestError, TemplateError
from toque.gateway.face import Face
from toque.gateway.requests import (
    ChatPrompt,
    GenerationRequest,
    PreparedRequest,
    PreparedSequence,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from toque.text.grammar.spec import GrammarSpec, enforced_dialect
from toque.text.reasoning import CLOSE, opens_thought
from toque.text.tools.prompt import told_in_words
from toque.types import EngineRequest, SamplingParams

# Below this a prompt is rendered and tokenized on the event loop: about 0.6 ms, where a thread costs 0.2 ms more.
# Above it a stream's next token would wait for somebody else's prompt.
INLINE_CHARS = 1_500
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that choices of one request never share a seed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    ids: tuple[int, ...]
    text: str | None  # what `echo` gives back: the text that was sent; None for token ids
    continues: bool = True  # the answer goes on in the prompt's text: all but a new turn of a chat
    continued: str = ""  # the assistant text that the answer continues
    raw: bool = True  # no conversation: what follows is not read for reasoning


class TextPool:
    """The threads that tokenize large prompts, so that no stream waits for somebody's book."""

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="toque-text")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """``work()``, in place when ``size`` characters are few, else in a thread."""
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


async def prepare(request: GenerationRequest, face: Face, pool: TextPool) -> PreparedRequest:
    """Render, tokenize and bound a request. RequestError, TemplateError or ContextLengthError name what is wrong."""
    sampling, banned = ban_words(check_sampling(request.sampling, face), request.bad_words, face)
    encoded = [
        await pool.run(prompt_size(prompt), partial(encode, prompt, face)) for prompt in request.prompts
    ]
    dialect, free_form = ("", _without(banned, request)) if banned else _tool_form(request, face)
    deadline = time.time() + (request.timeout_s or face.limits.request_timeout_s)
    sequences: list[PreparedSequence] = []
    for number, prompt in enumerate(encoded):
        room = _room(len(prompt.ids), face, sampling.max_tokens)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        echo_text = ""
        if request.echo:
            echo_text = face.tokenizer.decode(list(prompt.ids)) if prompt.text is None else prompt.text
            if isinstance(request.prompts[number], ChatPrompt):
                echo_text = prompt.continued
        thinks = _thinks(prompt) if face.thinks and not prompt.raw else None
        grammar = None if free_form is None else _encoded(free_form, thinks)
        computes = limit > 0 or sampling.prompt_logprobs is not None
        for choice in range(request.n):
            index = number * request.n + choice
            engine = EngineRequest(
                request_id=request.request_id if request.choices == 1 else f"{request.request_id}-{index}",
                prompt=prompt.ids,
                sampling=replace(sampling, max_tokens=limit, seed=_choice_seed(sampling.seed, choice)),
                tenant=request.tenant,
                cache_salt=request.cache_salt,
                priority=request.priority,
                deadline=deadline,
                grammar=grammar,
            )
            sequences.append(
                PreparedSequence(
                    index=index,
                    prompt_index=number,
                    first_of_prompt=choice == 0,
                    prompt=prompt.ids,
                    engine=engine if computes else None,
                    echo_text=echo_text,
                    continues=prompt.continues,
                    thinks=thinks,
                )
            )
    return PreparedRequest(
        request, tuple(sequences), sum(len(prompt.ids) for prompt in encoded), dialect, free_form is not None
    )


def _tool_form(request: GenerationRequest, face: Face) -> tuple[str, GrammarSpec | None]:
    """The dialect to read calls in ("": none will be read), and the grammar of the answer, if it has one."""
    tools, grammar = request.tools, request.grammar
    if tools is None:
        return "", grammar
    if not (tools.forced or tools.strict or grammar is not None):
        return face.dialect, None
    if grammar is None and not tools.forced and enforced_dialect(face.dialect) != face.dialect:
        raise RequestError(
            f"strict needs tool_choice required or a named function here: model {face.name} writes calls in"
            f" the {face.dialect} dialect, which cannot be enforced inside free text",
            param="tools",
        )
    spec = GrammarSpec.tools(
        face.dialect,
        tools.specs,
        parallel=tools.parallel,
        free=not tools.forced and grammar is None,
        otherwise=grammar,
    )
    return str(spec.value["dialect"]), spec


def _thinks(prompt: EncodedPrompt) -> bool:
    if prompt.text is None:
        return False
    return opens_thought(prompt.text, prompt.continued if prompt.continues else None)


def _encoded(spec: GrammarSpec, thinks: bool | None) -> str:
    return (spec.after_thinking(CLOSE) if thinks else spec).encode()


def encode(prompt: Prompt, face: Face) -> EncodedPrompt:
    """`tokenize`, for a model: the context bounds it before the work, the vocabulary after it."""
    if isinstance(prompt, TokenPrompt):
        return EncodedPrompt(_checked(prompt.ids, face), None)
    encoded = tokenize(prompt, face)
    return replace(encoded, ids=_checked(encoded.ids, face))


def tokenize(prompt: Prompt, face: Face) -> EncodedPrompt:
    """The prompt's token ids, with exactly one beginning-of-text token where the model wants one."""
    tokenizer = face.tokenizer
    if isinstance(prompt, ChatPrompt):
        text = render(prompt, face)
        _refuse_hopeless(text, face)
        # The template writes the beginning-of-text token itself when the model has one.
        ids = tokenizer.encode(text, add_special=False)
        if not prompt.continue_final_message:
            return EncodedPrompt(tuple(ids), text, continues=False, raw=False)
        continued = str(prompt.messages[-1].get("content") or "")
        return EncodedPrompt(tuple(ids), text, continued=continued, raw=False)
    if isinstance(prompt, TextPrompt):
        _refuse_hopeless(prompt.text, face)
        doubled = bool(
            tokenizer.add_bos and tokenizer.bos_text and prompt.text.startswith(tokenizer.bos_text)
        )
        ids = tokenizer.encode(prompt.text, add_special=prompt.add_special and not doubled)
        return EncodedPrompt(tuple(ids), prompt.text)
    return EncodedPrompt(prompt.ids, None)


def render(prompt: ChatPrompt, face: Face) -> str:
    if face.template is None:
        raise TemplateError(
            f"model {face.name} has no chat template: use /v1/completions, or a model that has one",
            param="messages",
            code="no_chat_template",
        )
    messages: Sequence[Mapping[str, Any]] = list(prompt.messages)
    tools = list(prompt.tools) or None
    if tools and not face.knows_tools:
        messages, tools = told_in_words(messages, tools, face.dialect), None
    return face.template.render(
        messages,
        tools=tools,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        extra=dict(prompt.template_extra),
    )


def check_sampling(sampling: SamplingParams, face: Face) -> SamplingParams:
    """Ids against the vocabulary; and the model's end-of-text ids join the stop ids unless the caller said no."""
    vocabulary = face.tokenizer.vocab_size
    for token, _ in sampling.logit_bias:
        if token >= vocabulary:
            raise RequestError(
                f"logit_bias token must be below {vocabulary}, got {token}", param="logit_bias"
            )
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocabulary:
            raise RequestError(
                f"stop_token_ids must be between 0 and {vocabulary - 1}, got {token}", param="stop_token_ids"
            )
    if sampling.ignore_eos:
        return sampling
    ends = face.tokenizer.eos_ids
    stops = (*sampling.stop_token_ids, *sorted(ends.difference(sampling.stop_token_ids)))
    return replace(sampling, stop_token_ids=stops) if len(stops) > len(sampling.stop_token_ids) else sampling


def ban_words(
    sampling: SamplingParams, words: tuple[str, ...], face: Face
) -> tuple[SamplingParams, list[str]]:
    """Ban each word that is one token, at the start of a text or after a space, by its bias.

    A ban of the others depends on what was written before, so they are left to a grammar: they are returned.
    """
    biases, longer = dict(sampling.logit_bias), []
    for word in words:
        spellings = {word, " " + word.lstrip(" ")} if word.strip(" ") else {word}
        encoded = [face.tokenizer.encode(spelling, add_special=False) for spelling in spellings]
        banned = {ids[0] for ids in encoded if len(ids) == 1}
        if any(banned.isdisjoint(ids) for ids in encoded):
            longer.append(word)
        else:
            biases.update(dict.fromkeys(banned, -100.0))
    return replace(sampling, logit_bias=tuple(biases.items())), longer


def _without(words: Sequence[str], request: GenerationRequest) -> GrammarSpec:
    if request.grammar is not None or request.tools is not None:
        raise RequestError(
            f"bad_words beside tools or a form of the answer must be one token each; {words[0][:40]!r} has several",
            param="bad_words",
        )
    return GrammarSpec.without(words)


def prompt_size(prompt: Prompt) -> int:
    """Characters, roughly: what rendering and tokenizing will cost."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    if isinstance(prompt, ChatPrompt):
        # Tool calls and template variables are small beside contents, or large enough to count as they are.
        contents = sum(len(str(message.get("content") or "")) + 16 for message in prompt.messages)
        return contents + (len(str(prompt.tools)) if prompt.tools else 0)
    return len(prompt.ids)


def _room(length: int, face: Face, max_tokens: int | None) -> int:
    context = face.card.context_length
    needed = 0 if max_tokens == 0 else 1
    if length + needed > context:
        raise ContextLengthError(
            f"this model's context holds {context} tokens, but the prompt has {length}"
            + (" and leaves no room for an answer" if length == context else "")
            + "; shorten it",
            param=None,
        )
    return context - length


def _refuse_hopeless(text: str, face: Face) -> None:
    """Length before work: a text that cannot fit whatever its tokens are is not tokenized at all."""
    context = face.card.context_length
    at_least = face.tokenizer.at_least_tokens(text)
    if at_least > context:
        raise ContextLengthError(
            f"this model's context holds {context} tokens, but the prompt has at least {at_least} "
            f"({len(text)} characters); shorten it"
        )


def _checked(ids: tuple[int, ...], face: Face) -> tuple[int, ...]:
    if not ids:
        raise RequestError("the prompt is empty: it has no token at all", param="prompt")
    low, high, vocabulary = min(ids), max(ids), face.card.vocab_size
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise RequestError(
            f"prompt token ids must be between 0 and {vocabulary - 1}, got {wrong}", param="prompt"
        )
    return ids


def _choice_seed(seed: int | None, choice: int) -> int | None:
    """Choices of one seeded request differ from each other and repeat together."""
    if seed is None or choice == 0:
        return seed
    return (seed + choice * _SEED_STEP + 2**63) % 2**64 - 2**63

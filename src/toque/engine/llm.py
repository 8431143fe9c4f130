"""The library's face: a model in this process, without a server.

::

    from toque import LLM, SamplingParams

    llm = LLM("smollm2")
    print(llm.generate("The sky is", SamplingParams(temperature=0, max_tokens=8)).text)
    for delta in llm.stream_chat([{"role": "user", "content": "Hello!"}]):
        print(delta.text, end="")
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral
from operator import index
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from toque.engine.completion import Answer, Completion, CompletionDelta
from toque.engine.embedding import EmbeddingEngine, load_embedding_engine
from toque.engine.loader import load_engine
from toque.engine.options import EngineOptions
from toque.errors import ConfigError, EngineError, RequestError, TemplateError, UnsupportedModelError
from toque.text.grammar.structured import StructuredOutputs
from toque.text.reasoning import CLOSE, opens_thought
from toque.types import EngineRequest, EngineStats, SamplingParams, SequenceOutput

if TYPE_CHECKING:
    from toque.backends.base import Float32
    from toque.engine.engine import Engine
    from toque.text.template import ChatTemplate
    from toque.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Forms = StructuredOutputs | Sequence[StructuredOutputs | None] | None
_BAD_STOP = "stop must be a text, or a list of texts"
_PROMPT_TAIL = 16  # prompt tokens that decide how the first new one is spelled


class LLM:
    """A model that answers. Safe to use from several threads; requests of all callers share its steps.

    ``model`` is a file, a folder, or a name or source that the registry knows; ``options`` are those of
    `EngineOptions`. Raises ConfigError naming an option that is unknown or out of range, ModelError for a model that
    cannot be used. Every answer that is streamed can be left early (close the iterator): its work stops.

    A model that was made for embeddings has `embed` instead of everything that generates.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        from toque.formats import load_checkpoint
        from toque.text.tokenizer import load_tokenizer

        known = {f.name for f in fields(EngineOptions)}
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"{name} is not an engine option; known: {', '.join(sorted(known))}", param=name
                )
        settings = EngineOptions(**options)
        self._checkpoint = load_checkpoint(_resolve(model))
        self.tokenizer: Tokenizer = load_tokenizer(self._checkpoint)
        self._engine: Engine | None = None
        self._embedder: EmbeddingEngine | None = None
        if self._checkpoint.config.pooling:
            self._embedder = load_embedding_engine(self._checkpoint, settings)
        else:
            self._engine = load_engine(self._checkpoint, settings)
        self._template: ChatTemplate | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._inboxes: dict[str, deque[SequenceOutput]] = {}
        self._ids = itertools.count()

    # --- whole answers ------------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: str | list[int] | tuple[int, ...],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        structured_outputs: StructuredOutputs | None = None,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[tuple[int, ...]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        structured_outputs: Forms = None,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        structured_outputs: Forms = None,
    ) -> Completion | list[Completion]:
        """Continue a text, a list of token ids, or a list of either: one Completion, or one for each, in order.

        ``sampling`` is one for all or one for each; ``stop`` strings end an answer and are not part of it.
        ``structured_outputs`` say what an answer must look like, one for all or one for each; an answer that
        ``max_tokens`` cuts is incomplete. Raises RequestError when a prompt cannot be served or a form not enforced
        (nothing runs then); a prompt that fails later has ``finish_reason`` ERROR and disturbs no other.
        """
        encoded, single = self._encode(prompts)
        forms = self._grammars([False] * len(encoded), structured_outputs)
        return self._whole(encoded, single, sampling, stop, forms, continues=True)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        continue_final_message: bool = False,
        template_extra: Mapping[str, Any] | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        continue_final_message: bool = False,
        template_extra: Mapping[str, Any] | None = None,
        structured_outputs: Forms = None,
    ) -> list[Completion]: ...
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        continue_final_message: bool = False,
        template_extra: Mapping[str, Any] | None = None,
        structured_outputs: Forms = None,
    ) -> Completion | list[Completion]:
        """Answer a conversation (a Completion), or each of a list of conversations (a list), as `generate` does.

        A form concerns what follows the reasoning of a model whose template opens with it. Raises TemplateError when
        the model has no chat template or the template refuses the messages.
        """
        encoded, thinks, single = self._render(messages, continue_final_message, template_extra)
        forms = self._grammars(thinks, structured_outputs)
        return self._whole(encoded, single, sampling, stop, forms, continues=continue_final_message)

    # --- streams ------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        structured_outputs: Forms = None,
    ) -> Generator[CompletionDelta, None, None]:
        """`generate`, piece by piece; ``delta.index`` is the number of the prompt."""
        encoded, _ = self._encode(prompts)
        forms = self._grammars([False] * len(encoded), structured_outputs)
        return self._run(encoded, sampling, stop, forms, continues=True)

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        continue_final_message: bool = False,
        template_extra: Mapping[str, Any] | None = None,
        structured_outputs: Forms = None,
    ) -> Generator[CompletionDelta, None, None]:
        """`chat`, piece by piece."""
        encoded, thinks, _ = self._render(messages, continue_final_message, template_extra)
        forms = self._grammars(thinks, structured_outputs)
        return self._run(encoded, sampling, stop, forms, continues=continue_final_message)

    # --- embeddings ---------------------------------------------------------------------------------------------

    def embed(
        self, texts: str | Sequence[str] | Sequence[Sequence[int]], *, dimensions: int | None = None
    ) -> Float32:
        """The vectors of a list of texts (or of lists of token ids), float32 [n, dim]; of a single text, [dim].

        ``dimensions`` keeps the first so many numbers of each and makes its length 1 again. Raises RequestError naming
        a text that is too long, UnsupportedModelError when the model generates text.
        """
        if self._embedder is None:
            raise UnsupportedModelError(
                f"{self._checkpoint.path.name} generates text; embed needs a model that was made for embeddings"
            )
        encoded, single = self._encode(texts)
        vectors = self._embedder.embed(encoded, dimensions=dimensions)
        return vectors[0] if single else vectors

    # --- housekeeping -------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise UnsupportedModelError(
                f"{self._checkpoint.path.name} was made for embeddings and generates no text: use embed"
            )
        return self._engine

    def stats(self) -> EngineStats:
        with self._lock:
            return self.engine.stats()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for engine in (self._engine, self._embedder):
                if engine is not None:
                    engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- prompts ------------------------------------------------------------------------------------------------

    def _encode(self, prompts: Prompt | Sequence[Prompt]) -> tuple[list[tuple[int, ...]], bool]:
        """Token ids of each prompt, and whether there was only one, not in a list."""
        if isinstance(prompts, str):
            return [self._ids_of(prompts)], True
        items = _items(prompts)
        if items and isinstance(items[0], Integral):
            return [_token_ids(items)], True
        return [self._ids_of(prompt) for prompt in items], False

    def _ids_of(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return _token_ids(_items(prompt))
        tokenizer = self.tokenizer
        doubled = bool(tokenizer.add_bos and tokenizer.bos_text and prompt.startswith(tokenizer.bos_text))
        return tuple(tokenizer.encode(prompt, add_special=not doubled))

    def _render(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        continue_final_message: bool,
        extra: Mapping[str, Any] | None,
    ) -> tuple[list[tuple[int, ...]], list[bool], bool]:
        """Token ids of each conversation, whether its answer begins with reasoning, and whether it was the only one."""
        single = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        _ = self.engine  # one that makes embeddings says so, rather than that it has no template
        template = self._chat_template()
        encoded, thinks = [], []
        for conversation in conversations:
            text = template.render(
                list(conversation),
                add_generation_prompt=not continue_final_message,
                continue_final_message=continue_final_message,
                extra=dict(extra or {}),
            )
            # The template writes the beginning-of-text token itself.
            encoded.append(tuple(self.tokenizer.encode(text, add_special=False)))
            begun = str(conversation[-1].get("content") or "") if continue_final_message else None
            thinks.append(opens_thought(text, begun))
        return encoded, thinks, single

    def _grammars(self, thinks: Sequence[bool], forms: Forms) -> list[str | None]:
        """The grammar of each prompt's answer, compiled once so that a bad one is refused before anything runs."""
        if forms is None or isinstance(forms, StructuredOutputs):
            forms = [forms] * len(thinks)
        if isinstance(forms, str | Mapping) or not all(
            form is None or isinstance(form, StructuredOutputs) for form in forms
        ):
            raise RequestError(
                "structured_outputs must be a StructuredOutputs, or a list of them",
                param="structured_outputs",
            )
        if len(forms) != len(thinks):
            raise RequestError(
                f"structured_outputs has {len(forms)} entries for {len(thinks)} prompts",
                param="structured_outputs",
            )
        grammars: list[str | None] = []
        for form, thinking in zip(forms, thinks, strict=True):
            if form is None:
                grammars.append(None)
                continue
            spec = form.spec()
            grammars.append((spec.after_thinking(CLOSE) if thinking else spec).encode())
        for grammar in {grammar for grammar in grammars if grammar is not None}:
            self.engine.check_grammar(grammar)
        return grammars

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            from toque.text.template import load_template

            self._template = load_template(self._checkpoint, self.tokenizer)
            if self._template is None:
                raise TemplateError(
                    "the model has no chat template: use generate, or a model that was made for chat",
                    param="messages",
                    code="no_chat_template",
                )
        return self._template

    # --- requests -----------------------------------------------------------------------------------------------

    def _run(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        stop: str | Sequence[str],
        grammars: Sequence[str | None],
        *,
        continues: bool,
    ) -> Generator[CompletionDelta, None, None]:
        """Everything between token ids and deltas. All requests of a call share one inbox."""
        inbox: deque[SequenceOutput] = deque()
        unfinished: dict[str, Answer] = {}
        try:
            self._add(prompts, sampling, stop, grammars, continues, inbox, unfinished)
            while unfinished:
                output = self._next(inbox)
                answer = unfinished.get(output.request_id)
                if answer is None:
                    continue  # came after its stop string
                delta = answer.advance(output)
                if delta.finish_reason is not None:
                    del unfinished[output.request_id]
                    self._leave([output.request_id], running=output.finish_reason is None)
                yield delta
        finally:
            if unfinished:
                self._leave(unfinished, running=True)

    def _add(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        stop: str | Sequence[str],
        grammars: Sequence[str | None],
        continues: bool,
        inbox: deque[SequenceOutput],
        unfinished: dict[str, Answer],
    ) -> None:
        from toque.text.stop import parse_stop
        from toque.text.stream import TextStream

        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        if not isinstance(sampling, Sequence) or not all(
            isinstance(each, SamplingParams) for each in sampling
        ):
            raise RequestError("sampling must be a SamplingParams, or a list of them", param="sampling")
        if len(sampling) != len(prompts):
            raise RequestError(
                f"sampling has {len(sampling)} entries for {len(prompts)} prompts", param="sampling"
            )
        stops = parse_stop(stop if isinstance(stop, str) or stop is None else _items(stop, _BAD_STOP, "stop"))
        with self._lock:
            if self._closed:
                raise EngineError("the model was closed")
            for index, (prompt, params, grammar) in enumerate(zip(prompts, sampling, grammars, strict=True)):
                tail = prompt[-_PROMPT_TAIL:] if continues else ()
                text = TextStream(self.tokenizer, stop=stops, prompt_tail=tail)
                request_id = f"llm-{next(self._ids)}"
                self.engine.add(EngineRequest(request_id, prompt, self._with_ends(params), grammar=grammar))
                self._inboxes[request_id] = inbox
                unfinished[request_id] = Answer(index, text)

    def _with_ends(self, sampling: SamplingParams) -> SamplingParams:
        """The model's end-of-text ids join the stop ids unless the caller said no."""
        if sampling.ignore_eos:
            return sampling
        ends = tuple(sorted(self.tokenizer.eos_ids.difference(sampling.stop_token_ids)))
        return replace(sampling, stop_token_ids=sampling.stop_token_ids + ends) if ends else sampling

    def _whole(
        self,
        prompts: Sequence[tuple[int, ...]],
        single: bool,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        stop: str | Sequence[str],
        grammars: Sequence[str | None],
        *,
        continues: bool,
    ) -> Completion | list[Completion]:
        completions = [Completion(index, len(prompt)) for index, prompt in enumerate(prompts)]
        for delta in self._run(prompts, sampling, stop, grammars, continues=continues):
            completions[delta.index].add(delta)
        return completions[0] if single else completions

    def _next(self, inbox: deque[SequenceOutput]) -> SequenceOutput:
        """What has arrived first; runs steps, for everybody, until something has."""
        with self._lock:
            while not inbox:
                if self._closed:
                    raise EngineError("the model was closed")
                self._step()
            return inbox.popleft()

    def _step(self) -> None:
        for output in self.engine.step():
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.append(output)

    def _leave(self, request_ids: Iterable[str], *, running: bool) -> None:
        """Forget requests. Those that still run are stopped, and one step frees what they hold."""
        with self._lock:
            for request_id in request_ids:
                self._inboxes.pop(request_id, None)
                if running and not self._closed:
                    self.engine.abort(request_id)
            if running and not self._closed:
                self._step()


def _items(
    values: Any,
    expected: str = "a prompt must be a text or a list of token ids, or there must be a list of those",
    param: str = "prompt",
) -> list[Any]:
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | bytearray | Mapping):
        return list(values)
    raise RequestError(f"{expected}, got {type(values).__name__}", param=param)


def _token_ids(items: list[Any]) -> tuple[int, ...]:
    """Whole numbers of any kind, numpy's too, as Python's."""
    try:
        return tuple(map(index, items))
    except TypeError:
        raise RequestError("a prompt of token ids must hold whole numbers only", param="prompt") from None


def _resolve(model: str | Path) -> Path:
    path = Path(model)
    if path.exists():
        return path
    from toque.registry.store import Store

    return Store().resolve(str(model))

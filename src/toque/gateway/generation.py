"""Running a prepared request: engine outputs in, text deltas out. Streams and whole answers both read this.

::

    EngineClient.generate ─┐  SequenceOutput        Choice.advance        ChoiceDelta
    EngineClient.generate ─┼─────────────────▶  TextStream, stop, usage ─────────────▶ formatter
    EngineClient.generate ─┘   (n x prompts)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from toque.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    GrammarError,
    ReplicaDiedError,
    ToqueError,
)
from toque.gateway.answer import AnswerReader, Parts
from toque.gateway.face import Face
from toque.gateway.outcomes import Pace
from toque.gateway.requests import PreparedRequest, PreparedSequence, Usage
from toque.text.reasoning import ReasoningParser
from toque.text.stream import Piece, TextStream
from toque.text.tools.base import HOLD, ParserOptions, ToolDelta
from toque.text.tools.choose import tool_parser
from toque.types import FinishReason, SequenceOutput, TokenLogprob

if TYPE_CHECKING:
    from toque.gateway.admission import Ticket
    from toque.monitor.metering import Meter

_ERRORS: dict[str, type[ToqueError]] = {
    str(kind.code): kind for kind in (DeadlineError, ContextLengthError, GrammarError, ReplicaDiedError)
}
PROMPT_TAIL = 16  # prompt tokens that a detokenizer may need to place a space before the first new one


def engine_error(output: SequenceOutput) -> ToqueError:
    """Why the engine gave a sequence up."""
    message = output.error or "the engine could not finish this request"
    return _ERRORS.get(output.error_code or "", EngineError)(message)


@dataclass(slots=True)
class ChoiceDelta:
    """What one wakeup adds to one choice. ``pieces`` are the tokens that ``logprobs`` belong to; ``prompt_logprobs``
    come once, with the first."""

    index: int
    text: str = ""
    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    calls: list[ToolDelta] = field(default_factory=list)
    called: bool = False  # with the finish reason: the answer ended by calling tools

    @property
    def finish_word(self) -> str | None:
        """The finish reason as clients know it: an answer that stopped after whole calls says "tool_calls"."""
        if self.finish_reason is None:
            return None
        return "tool_calls" if self.called else self.finish_reason.value


@dataclass(slots=True)
class Choice:
    """One choice's progress: its text, and when it is over."""

    sequence: PreparedSequence
    text: TextStream
    reader: AnswerReader | None = None
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    tokens: int = 0
    done: bool = False

    def advance(self, output: SequenceOutput) -> ChoiceDelta:
        """Fold one engine output in. The token that ended the answer is counted but never shown."""
        shown = output.tokens
        if output.stop_token is not None and shown and shown[-1] == output.stop_token:
            shown = shown[:-1]
        if self.reader is not None:
            return self._read(self.reader, shown, output)
        piece = self.text.push(shown)
        delta = ChoiceDelta(self.sequence.index, piece.text, prompt_logprobs=output.prompt_logprobs)
        if output.logprobs is not None:
            delta.pieces = piece.pieces
            delta.logprobs = output.logprobs[: len(piece.pieces)]
        if piece.stopped:
            self.done = True
            delta.finish_reason = FinishReason.STOP
        elif output.finish_reason is not None:
            self.done = True
            tail = self.text.finish()
            delta.text += tail.text
            delta.finish_reason = FinishReason.STOP if tail.stopped else output.finish_reason
        return delta

    def _read(self, reader: AnswerReader, shown: list[int], output: SequenceOutput) -> ChoiceDelta:
        """As above, for an answer that may hold reasoning and tool calls: its tokens are read one by one."""
        delta = ChoiceDelta(self.sequence.index, prompt_logprobs=output.prompt_logprobs)
        parts = Parts()
        for token in shown:
            piece = self.text.push([token])
            delta.pieces += piece.pieces
            reader.push(piece.text, parts)
            if piece.stopped or reader.over:
                delta.finish_reason = FinishReason.STOP
                break
        if delta.finish_reason is None and output.finish_reason is not None:
            tail = self.text.finish()
            if tail.text:
                reader.push(tail.text, parts)
            delta.finish_reason = FinishReason.STOP if tail.stopped else output.finish_reason
        if delta.finish_reason is not None:
            self.done = True
            reader.finish(parts)
            delta.called = reader.called and delta.finish_reason is FinishReason.STOP
        if output.logprobs is not None:
            delta.logprobs = output.logprobs[: len(delta.pieces)]
        delta.text, delta.reasoning, delta.calls = parts.content, parts.reasoning, parts.calls
        return delta


@dataclass(slots=True)
class Generation:
    """One client request while it runs. Closing ``deltas()`` aborts whatever still runs in the engines.

    The stream ends normally once every choice has its finish reason. Otherwise it raises a ToqueError, after which
    ``usage`` still says what was computed, and ``pace.started`` whether anything of the answer had come. ``elsewhere``:
    an engine's error before that is not the end, another version may answer; so it counts nothing.
    """

    prepared: PreparedRequest
    face: Face
    record: Meter
    ticket: Ticket
    usage: Usage = field(default_factory=Usage)
    pace: Pace = field(default_factory=Pace)
    elsewhere: bool = False

    def __post_init__(self) -> None:
        self.usage.prompt_tokens = self.prepared.prompt_tokens

    async def deltas(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        choices = [self._choice(sequence) for sequence in self.prepared.sequences]
        running = [choice for choice in choices if choice.sequence.engine is not None]
        echoes = {
            choice.sequence.index: choice.sequence.echo_text
            for choice in running
            if choice.sequence.echo_text
        }
        if not running:
            yield [self._only_echo(choice.sequence) for choice in choices]
            return
        source = self._one(running[0]) if len(running) == 1 else self._many(running)
        try:
            async for deltas in source:
                if (
                    echoes
                ):  # they travel with the first real output, so that an error before it is a plain answer
                    for delta in deltas:
                        delta.text = echoes.pop(delta.index, "") + delta.text
                yield deltas
        finally:
            await source.aclose()

    def _only_echo(self, sequence: PreparedSequence) -> ChoiceDelta:
        self.ticket.started(len(sequence.prompt))
        if sequence.first_of_prompt:
            self.record.prompt(len(sequence.prompt), 0, sequence.index)
        self.record.finished(FinishReason.LENGTH.value, sequence.index)
        return ChoiceDelta(sequence.index, sequence.echo_text, finish_reason=FinishReason.LENGTH)

    def _choice(self, sequence: PreparedSequence) -> Choice:
        request = self.prepared.request
        reader = self._reader(sequence)
        text = TextStream(
            self.face.tokenizer if reader is None else self.face.codec,
            stop=request.stop,
            include_stop=request.include_stop,
            skip_special=request.skip_special,
            prompt_tail=sequence.prompt[-PROMPT_TAIL:] if sequence.continues else (),
        )
        return Choice(sequence, text, reader)

    def _reader(self, sequence: PreparedSequence) -> AnswerReader | None:
        """None for an answer that is only text."""
        dialect, tools = self.prepared.dialect, self.prepared.request.tools
        if sequence.thinks is None and not dialect:
            return None
        reasoning = None if sequence.thinks is None else ReasoningParser(opened=sequence.thinks)
        if tools is None or not dialect:
            return AnswerReader(reasoning, None)
        options = ParserOptions(
            names=tools.names,
            parallel=tools.parallel,
            hold=0 if self.prepared.enforced else HOLD,
            schemas=tools.schemas,
            only_calls=tools.forced,
        )
        return AnswerReader(reasoning, tool_parser(dialect, options))

    async def _one(self, choice: Choice) -> AsyncGenerator[list[ChoiceDelta], None]:
        outputs = self._outputs(choice)
        try:
            async for output in outputs:
                yield [self._advance(choice, output)]
                if choice.done:
                    return
        finally:
            await outputs.aclose()
        raise EngineError("the engine's answer ended without a finish reason")

    async def _many(self, choices: list[Choice]) -> AsyncGenerator[list[ChoiceDelta], None]:
        """All sequences at once; everything that arrived since the last wakeup leaves in one list."""
        queue: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(choice, queue)) for choice in choices]
        open_choices = len(choices)
        try:
            while open_choices:
                batch = [await queue.get()]
                while not queue.empty():
                    batch.append(queue.get_nowait())
                deltas: list[ChoiceDelta] = []
                for item in batch:
                    if isinstance(item, Exception):
                        raise item
                    open_choices -= item.finish_reason is not None
                    deltas.append(item)
                yield deltas
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, choice: Choice, queue: asyncio.Queue[ChoiceDelta | Exception]) -> None:
        outputs = self._outputs(choice)
        try:
            async for output in outputs:
                queue.put_nowait(self._advance(choice, output))
                if choice.done:
                    return
            queue.put_nowait(EngineError("the engine's answer ended without a finish reason"))
        except Exception as error:
            queue.put_nowait(error)
        finally:
            await outputs.aclose()

    def _outputs(self, choice: Choice) -> AsyncGenerator[SequenceOutput, None]:
        assert choice.sequence.engine is not None
        on_route = partial(self.record.routed, choice.sequence.index)
        return self.face.client.generate(choice.sequence.engine, on_route)

    def _advance(self, choice: Choice, output: SequenceOutput) -> ChoiceDelta:
        now = time.perf_counter()
        sequence = choice.sequence
        index = sequence.index
        self.record.computed(output.device_us, index)
        if output.events is not None:
            self.record.stepped(index, output.events)
        failed = output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
        if failed and self.elsewhere and not self.pace.started:
            raise engine_error(output)
        self.pace.started = True
        if choice.first_token_at == 0.0:
            choice.first_token_at = choice.last_token_at = now
            self.ticket.started(len(sequence.prompt))
            cached = output.cached_tokens if sequence.first_of_prompt else 0
            self.usage.cached_tokens += cached
            self.record.queued(output.queue_seconds)
            if sequence.first_of_prompt:
                self.record.prompt(len(sequence.prompt), cached, index)
        if failed:
            # Nobody here aborted it: a request that this gateway ends has no reader any more.
            raise engine_error(output)
        count = len(output.tokens)
        if count:
            self.record.tokens(count, now - choice.last_token_at if choice.tokens else 0.0, now, index)
            choice.last_token_at = now
            self.pace.advance(count, now)
            choice.tokens += count
            self.usage.completion_tokens += count
        delta = choice.advance(output)
        if delta.finish_word is not None:
            self.record.finished(delta.finish_word, index, choice.tokens)
            if choice.reader is not None:
                self.usage.reasoning_tokens += choice.reader.reasoning_tokens
                self.record.reasoned(choice.reader.reasoning_tokens)
        return delta

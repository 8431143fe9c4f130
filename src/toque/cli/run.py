"""`toque run`: chat with a model in the terminal, in this process, without a server."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from toque.errors import EngineError, RequestError

if TYPE_CHECKING:
    from toque.engine.llm import LLM


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--system", default="", help="System message.")
@click.option("--temperature", type=float, default=0.7, show_default=True)
@click.option("--top-p", type=float, default=0.95, show_default=True)
@click.option("--seed", type=int, default=None)
@click.option("--max-tokens", type=click.IntRange(1), default=1024, show_default=True)
@click.option("--context-length", type=click.IntRange(0), default=0, help="0: the model's own.")
@click.option("--threads", type=click.IntRange(0), default=0, help="0: the CPUs this process may use.")
@click.option("--quantize", default="", help="int8, int4 or fp8: quantize a float model as it is loaded.")
@click.option(
    "--speculate",
    default="off",
    help="ngram[:K] or draft=PATH[:K]: guess tokens ahead; the text stays the same.",
)
def command(
    model: str,
    prompt: str | None,
    system: str,
    temperature: float,
    top_p: float,
    seed: int | None,
    max_tokens: int,
    context_length: int,
    threads: int,
    quantize: str,
    speculate: str,
) -> None:
    """Chat with MODEL. With PROMPT (or piped input), answer once and leave; without, type, and Ctrl-D ends it."""
    from toque.engine.llm import LLM
    from toque.types import SamplingParams

    sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    piped = not sys.stdin.isatty()
    if prompt is None and piped:
        prompt = sys.stdin.read().strip()
    if prompt is not None and not prompt:
        raise click.UsageError("the prompt is empty")
    with LLM(
        model,
        context_length=context_length,
        threads=threads,
        max_sequences=4,
        quantize=quantize,
        speculate=speculate,
    ) as llm:
        if prompt is not None:
            _, interrupted = _answer(llm, [*opening, {"role": "user", "content": prompt}], sampling)
            sys.exit(130 if interrupted else 0)
        _converse(llm, opening, sampling)


def _converse(llm: LLM, opening: list[dict[str, Any]], sampling: Any) -> None:
    click.secho("Type a message. /clear starts again, Ctrl-C stops an answer, Ctrl-D leaves.", dim=True)
    messages = list(opening)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            continue
        if text == "/clear":
            messages = list(opening)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            answer, _ = _answer(llm, messages, sampling)
            messages.append({"role": "assistant", "content": answer})
        except (RequestError, EngineError) as error:
            messages.pop()
            click.secho(error.message, fg="red", err=True)


def _answer(llm: LLM, messages: list[dict[str, Any]], sampling: Any) -> tuple[str, bool]:
    """Print the answer as it comes; Ctrl-C ends it and keeps what was said. The text, and whether that happened."""
    parts: list[str] = []
    stream = llm.stream_chat(messages, sampling)
    with _interruptible() as interrupts:
        try:
            for delta in stream:
                parts.append(delta.text)
                click.echo(delta.text, nl=False)
                if delta.error is not None:
                    raise EngineError(delta.error)
                if interrupts:
                    break
        finally:
            stream.close()
            click.echo()
    return "".join(parts), bool(interrupts)


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """The first Ctrl-C only lands in the list, so that it cuts no step of the engine in two; a second one raises."""
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)

"""What several engine tests share: an engine over the fake executable, and the fold of its outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from toque.engine.engine import Engine
from toque.engine.fake import FakeExecutable
from toque.engine.options import EngineOptions
from toque.types import EngineRequest, FinishReason, SamplingParams, SequenceOutput, TokenLogprob

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
    error_code: str | None = None
    outputs: int = 0

    def add(self, output: SequenceOutput) -> None:
        assert self.finish_reason is None, "an output after the last one"
        if self.outputs:
            assert output.cached_tokens == 0
            assert output.prompt_logprobs is None
        self.outputs += 1
        self.tokens += output.tokens
        self.logprobs += output.logprobs or []
        self.finish_reason = output.finish_reason
        self.stop_token = output.stop_token
        self.cached_tokens += output.cached_tokens
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.error, self.error_code = output.error, output.error_code


def make_engine(
    *,
    n_blocks: int = 7,
    block_size: int = 4,
    context_length: int = 64,
    vocab_size: int = 64,
    executable: FakeExecutable | None = None,
    **options: object,
) -> Engine:
    executable = executable or FakeExecutable(vocab_size=vocab_size, block_size=block_size)
    executable.allocate_kv(n_blocks)
    settings = replace(EngineOptions(max_sequences=8, max_batch_tokens=64), **options)  # type: ignore[arg-type]
    return Engine(
        executable,
        settings,
        context_length=context_length,
        n_blocks=n_blocks,
        block_size=block_size,
        identity="test",
    )


def request(
    name: str, prompt: Iterable[int], sampling: SamplingParams = GREEDY, **fields: object
) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), sampling, **fields)  # type: ignore[arg-type]


def drain(
    engine: Engine, answers: dict[str, Answer] | None = None, *, max_steps: int = 10_000
) -> dict[str, Answer]:
    """Step until nothing is left, checking the books after every step."""
    answers = {} if answers is None else answers
    for _ in range(max_steps):
        if not engine.has_work:
            engine.check()
            return answers
        advance(engine, answers)
    raise AssertionError(f"work is left after {max_steps} steps")


def advance(engine: Engine, answers: dict[str, Answer]) -> list[SequenceOutput]:
    outputs = engine.step()
    engine.check()
    for output in outputs:
        answers.setdefault(output.request_id, Answer()).add(output)
    return outputs


def alone(prompt: Iterable[int], sampling: SamplingParams = GREEDY, **options: object) -> Answer:
    """The undisturbed answer: an engine of its own with plenty of room."""
    engine = make_engine(n_blocks=64, **options)  # type: ignore[arg-type]
    engine.add(request("alone", prompt, sampling))
    return drain(engine)["alone"]

"""What a benchmark asks: conversations by index, so that two runs and two servers get the same ones."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from toque.bench.lengths import Lengths
from toque.errors import ConfigError

_WORDS = (
    "river stone market window engine garden winter letter bridge silver morning teacher village station music "
    "harbour forest paper mountain doctor summer kitchen castle journey theory number language science history "
    "animal planet weather friend country question answer system process memory signal pattern story picture"
).split()
_TASK = "Write a long story that uses these words."
_TASK_WORDS = len(_TASK.split())


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user adds to the conversation, and how many tokens are asked for."""

    messages: tuple[dict[str, Any], ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order; each request carries all before it, with the answers that the server gave."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class WordRate:
    """How a server counts our words: ``tokens = overhead + per_word * words``. Measured by `run.calibrate`."""

    overhead: float = 0.0
    per_word: float = 1.0
    measured: bool = False

    def words(self, tokens: int, *, first: bool = True) -> int:
        overhead = self.overhead if first else 0.0
        return max(1, round((tokens - overhead) / self.per_word))


class Dataset(Protocol):
    """``conversation(i)`` is the same for the same ``i``; ``warm_up(i)`` shares no text with any of them."""

    @property
    def name(self) -> str: ...

    def reseeded(self, seed: str) -> Dataset:
        """Other text of the same kind: repeats must not find their prompts in the server's prefix cache."""
        ...

    def conversation(self, index: int) -> Conversation: ...

    def warm_up(self, index: int) -> Conversation: ...


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def prompt(rng: random.Random, count: int) -> str:
    """``count`` words, the task at the end among them where there is room: nothing shared comes first."""
    if count <= _TASK_WORDS:
        return words(rng, count)
    return f"{words(rng, count - _TASK_WORDS)}\n\n{_TASK}"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Random words: prompts of ``inputs`` tokens that ask for ``outputs`` tokens.

    With ``prefix_tokens`` every prompt begins with the same text of that length, which comes on top of ``inputs``.
    With ``turns`` above 1 a conversation has that many; ``inputs`` is then the length of each turn.
    """

    inputs: Lengths
    outputs: Lengths
    prefix_tokens: int = 0
    turns: Lengths = field(default_factory=lambda: Lengths("fixed", 1))
    rate: WordRate = WordRate()
    seed: str = "0"

    @property
    def name(self) -> str:
        kind = f"input {self.inputs}, output {self.outputs}"
        if self.prefix_tokens:
            kind = f"shared prefix {self.prefix_tokens}, {kind}"
        return kind if str(self.turns) == "1" else f"{self.turns} turns, {kind}"

    def reseeded(self, seed: str) -> Synthetic:
        return Synthetic(self.inputs, self.outputs, self.prefix_tokens, self.turns, self.rate, seed)

    def conversation(self, index: int) -> Conversation:
        return self._make(self.seed, index)

    def warm_up(self, index: int) -> Conversation:
        return self._make(f"{self.seed}/warm-up", index)

    def _make(self, seed: str, index: int) -> Conversation:
        rng = random.Random(f"{seed}/{index}")
        prefix = ""
        if self.prefix_tokens:
            count = max(1, round(self.prefix_tokens / self.rate.per_word))
            prefix = words(random.Random(f"{seed}/prefix"), count) + "\n\n"
        turns = []
        for turn in range(self.turns.draw(rng)):
            count = self.rate.words(self.inputs.draw(rng), first=turn == 0)
            text = prompt(rng, count)
            turns.append(Turn((user(prefix + text if turn == 0 else text),), self.outputs.draw(rng)))
        return Conversation(tuple(turns))


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a JSONL data set: exactly one of the first three."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    turns: list[str] | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FromFile:
    """The conversations of a JSONL file in order; after the last the first comes again."""

    name: str
    conversations: tuple[Conversation, ...]

    @classmethod
    def load(cls, path: Path, outputs: Lengths, seed: str = "0") -> FromFile:
        """Read a JSONL file; a line without ``output_tokens`` draws from ``outputs``.

        Raises ConfigError for a file that cannot be read, and for a line that is wrong, by its number.
        """
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"--dataset {path}: {error.strerror or error}", param="dataset") from error
        rng = random.Random(f"{seed}/outputs")
        found = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found.append(_conversation(msgspec.json.decode(line, type=_Line), outputs.draw(rng)))
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
                raise ConfigError(f"--dataset {path}, line {number}: {error}", param="dataset") from None
        if not found:
            raise ConfigError(f"--dataset {path}: the file has no conversations", param="dataset")
        return cls(path.name, tuple(found))

    @property
    def single_prompts(self) -> bool:
        return all(len(c.turns) == 1 and len(c.turns[0].messages) == 1 for c in self.conversations)

    def reseeded(self, seed: str) -> FromFile:
        return self

    def conversation(self, index: int) -> Conversation:
        return self.conversations[index % len(self.conversations)]

    def warm_up(self, index: int) -> Conversation:
        return Synthetic(Lengths("fixed", 32), Lengths("fixed", 8)).warm_up(index)


def _conversation(line: _Line, output_tokens: int) -> Conversation:
    """ValueError says what is wrong with the line."""
    if sum(part is not None for part in (line.prompt, line.messages, line.turns)) != 1:
        raise ValueError("exactly one of prompt, messages and turns must be given")
    tokens = output_tokens if line.output_tokens is None else line.output_tokens
    if tokens < 1:
        raise ValueError(f"output_tokens must be at least 1, got {tokens}")
    if line.messages is not None:
        if not line.messages:
            raise ValueError("messages must not be empty")
        return Conversation((Turn(tuple(line.messages), tokens),))
    texts = [line.prompt] if line.prompt is not None else line.turns or []
    if not texts or not all(texts):
        raise ValueError("prompt and turns must not be empty")
    return Conversation(tuple(Turn((user(text),), tokens) for text in texts if text))

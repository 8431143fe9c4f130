"""Guesses by a smaller model of the same vocabulary, that reads along."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from toque.backends.base import BLOCK_SIZE, Executable, StepBatch
from toque.engine.kv.pool import BlockPool
from toque.engine.sequence import Sequence
from toque.engine.speculate.pace import EVIDENCE
from toque.engine.speculate.proposer import NO_LEAD
from toque.types import SamplingParams

_GREEDY = SamplingParams(temperature=0.0, seed=0)
_CHUNK = 256  # tokens that it reads at once of a text that it is far behind
_NEAR = 32  # tokens behind that it reads on the way to a guess
_PATIENCE = 64  # tokens without a guess after which it stops reading along
_SMOOTHING = 0.2


@dataclass(slots=True)
class _Reader:
    """How far the model has read one sequence. ``guessed`` was read after ``computed`` known tokens, unverified."""

    last_guess: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    guessed: list[int] = field(default_factory=list)


class DraftProposer:
    """Owns the draft model's executable, its KV blocks and its sampler slots (numbered as the engine's are).

    It reads every prompt once, in chunks beside the engine's steps, so a guess comes only once it has caught up. Where
    its blocks run out or nobody wants its guesses, it stops reading along and gives the blocks back.
    """

    beliefs = (0.6,) * EVIDENCE
    free = False

    def __init__(
        self,
        executable: Executable,
        *,
        n_blocks: int,
        context_length: int,
        max_tokens: int,
        max_sequences: int,
    ) -> None:
        """``n_blocks`` of the executable's KV are already allocated."""
        self._executable = executable
        self._context_length = context_length
        self._max_tokens = max_tokens
        self._pool = BlockPool(n_blocks)
        self._tables = np.zeros((max_sequences, -(-context_length // BLOCK_SIZE) + 1), np.int32)
        self._readers: dict[int, _Reader] = {}
        self.round_seconds = 0.0

    @property
    def held_blocks(self) -> int:
        return self._pool.held

    def open(self, sequence: Sequence) -> None:
        self._readers[sequence.slot] = _Reader(len(sequence.tokens))
        self._executable.open_slot(sequence.slot, _GREEDY, (), (), (), 0)

    def close(self, slot: int) -> None:
        reader = self._readers.pop(slot, None)
        if reader is not None:
            self._release(reader)
            self._executable.close_slot(slot)

    def leads(self, sequences: Many[Sequence]) -> list[int]:
        leads, left = [], self._max_tokens
        far: Sequence | None = None
        for sequence in sequences:
            reader, known = self._readers[sequence.slot], len(sequence.tokens)
            _verify(reader, sequence.tokens)
            behind = known - reader.computed
            leads.append(NO_LEAD)
            if known - reader.last_guess > _PATIENCE:
                self._release(reader)
            elif behind > _NEAR:
                far = far or sequence
            elif behind <= left:
                left -= behind
                leads[-1] = 0
        if far is not None:
            self._catch_up(far)
        return leads

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[list[int]]:
        guesses: list[list[int]] = [[] for _ in sequences]
        asked = [
            (sequence, count, guess)
            for sequence, count, guess in zip(sequences, counts, guesses, strict=True)
            if self._room_for(sequence, len(sequence.tokens) + count - 1)
        ]
        for sequence, _, _ in asked:
            self._readers[sequence.slot].last_guess = len(sequence.tokens)
        began = time.perf_counter()
        rounds = 0
        while asked:
            parts = []
            for sequence, _, guess in asked:
                reader = self._readers[sequence.slot]
                if guess:
                    reader.guessed.append(guess[-1])
                    parts.append((sequence, guess[-1:], len(sequence.tokens) + len(guess) - 1))
                else:
                    parts.append((sequence, sequence.tokens[reader.computed :], reader.computed))
                    reader.computed = len(sequence.tokens)
            for (_, _, guess), token in zip(asked, self._step(parts, sample=True), strict=True):
                guess.append(token)
            asked = [part for part in asked if part[2][-1] >= 0 and len(part[2]) < part[1]]
            rounds += 1
        for guess in guesses:
            if guess and guess[-1] < 0:
                guess.pop()
        if rounds:
            measured = (time.perf_counter() - began) / rounds
            rate = _SMOOTHING if self.round_seconds else 1.0
            self.round_seconds += rate * (measured - self.round_seconds)
        return guesses

    def close_all(self) -> None:
        self._readers.clear()
        self._executable.close()

    def _catch_up(self, sequence: Sequence) -> None:
        reader = self._readers[sequence.slot]
        end = min(reader.computed + min(_CHUNK, self._max_tokens), len(sequence.tokens) - 1)
        if self._room_for(sequence, end):
            self._step([(sequence, sequence.tokens[reader.computed : end], reader.computed)], sample=False)
            reader.computed = end

    def _room_for(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for so many of its tokens; where there are none, the sequence is given up."""
        reader = self._readers[sequence.slot]
        missing = -(-tokens // BLOCK_SIZE) - len(reader.blocks)
        if tokens > self._context_length or missing > self._pool.free:
            self._release(reader)
            reader.last_guess = -_PATIENCE - 1
            return False
        for _ in range(missing):
            self._tables[sequence.slot, len(reader.blocks)] = block = self._pool.take()
            reader.blocks.append(block)
        return True

    def _release(self, reader: _Reader) -> None:
        for block in reader.blocks:
            self._pool.drop(block, keep=False)
        reader.blocks, reader.guessed, reader.computed = [], [], 0

    def _step(self, parts: Many[tuple[Sequence, list[int], int]], *, sample: bool) -> list[int]:
        """Reads tokens of each sequence from a position on; ``sample``: returns what it thinks follows each part."""
        counts = [len(tokens) for _, tokens, _ in parts]
        slots = np.array([sequence.slot for sequence, _, _ in parts], np.intp)
        first = np.array([position for _, _, position in parts], np.int32)
        starts = np.zeros(len(parts) + 1, np.int32)
        starts[1:] = np.cumsum(counts)
        context = first + np.diff(starts)
        width = -(-int(context.max()) // BLOCK_SIZE)
        rows = starts[1:] - 1 if sample else starts[:0]
        none = np.full(len(rows), -1, np.int32)
        batch = StepBatch(
            np.concatenate([np.array(tokens, np.int32) for _, tokens, _ in parts]),
            np.arange(starts[-1], dtype=np.int32) + np.repeat(first - starts[:-1], counts),
            starts,
            context,
            self._tables[:, :width].take(slots, axis=0),
            rows,
            slots.astype(np.int32)[: len(rows)],
            none,
            none,
        )
        result: list[int] = self._executable.step(batch).tokens.tolist()
        return result


def _verify(reader: _Reader, tokens: list[int]) -> None:
    """Keep of what was read as a guess what the sequence said after all."""
    for guess in reader.guessed:
        if reader.computed + 1 >= len(tokens) or tokens[reader.computed] != guess:
            break
        reader.computed += 1
    reader.guessed.clear()

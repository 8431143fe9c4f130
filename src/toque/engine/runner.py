"""Turns a step plan into arrays and has it executed."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from toque.backends.base import BLOCK_SIZE, Executable, StepBatch, StepResult
from toque.engine.grammars import Matcher
from toque.engine.scheduler import StepPlan
from toque.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RowSpan:
    """The rows of logits that a chunk asked for: ``scored`` prompt positions, then one sampled row or none."""

    first: int
    scored: int
    sampled: bool


class Runner:
    """Owns the arrays that describe a step, and the sampler slots of the executable.

    Block tables live in one array with a row per slot, updated when a sequence is admitted or grows, so that a step
    gathers them instead of building them.
    """

    def __init__(
        self,
        executable: Executable,
        *,
        max_tokens: int,
        max_sequences: int,
        max_rows: int,
        context_length: int,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.executable = executable
        width = -(-context_length // block_size) + 1
        self._tables = np.zeros((max_sequences, width), np.int32)
        self._widths = np.zeros(max_sequences, np.int32)
        self._range = np.arange(max(context_length + 1, max_tokens, max_rows) + 1, dtype=np.int32)
        self._tokens = np.zeros(max_tokens, np.int32)
        self._positions = np.zeros(max_tokens, np.int32)
        self._starts = np.zeros(max_sequences + 1, np.int32)
        self._context = np.zeros(max_sequences, np.int32)
        self._rows = np.zeros(max_rows, np.int32)
        self._slots = np.zeros(max_rows, np.int32)
        self._targets = np.full(max_rows, -1, np.int32)
        self._top = np.full(max_rows, -1, np.int32)
        self._wanted = False  # some entry of _targets or _top is not -1
        self._masks: npt.NDArray[np.uint32] | None = None  # made when the first grammar comes
        self._masked: list[int] = []  # rows of _masks that are not all ones

    def open(self, sequence: Sequence) -> None:
        """Prepare the sampler slot of an admitted sequence. What the executable raises concerns this request only."""
        sampling = sequence.sampling
        self.executable.open_slot(
            sequence.slot,
            sampling,
            sequence.prompt,
            sequence.output,
            sampling.stop_token_ids,
            sampling.min_tokens,
        )
        blocks = sequence.blocks
        self._tables[sequence.slot] = 0
        self._tables[sequence.slot, : len(blocks)] = blocks
        self._widths[sequence.slot] = len(blocks)

    def close(self, slot: int) -> None:
        self.executable.close_slot(slot)

    def run(self, plan: StepPlan) -> tuple[StepResult, list[RowSpan]]:
        """Execute the plan. Rows come in its order: a decode's newest token and drafts, ..., then the chunks' spans."""
        batch, spans = self.batch(plan)
        return self.executable.step(batch), spans

    def batch(self, plan: StepPlan) -> tuple[StepBatch, list[RowSpan]]:
        """The arrays of a step. They are views of buffers that the next call overwrites."""
        for sequence in plan.grown:
            slot, width = sequence.slot, len(sequence.blocks)
            known = int(self._widths[slot])
            self._tables[slot, known:width] = sequence.blocks[known:]
            self._widths[slot] = width
        decodes = plan.decodes
        n = len(decodes)
        if self._wanted:
            self._targets.fill(-1)
            self._top.fill(-1)
            self._wanted = False
        slots = [sequence.slot for sequence in decodes]
        top = [sequence.top for sequence in decodes]
        starts = self._range
        if plan.drafted:
            starts = self._lay_drafts(decodes, top)
        else:
            self._tokens[:n] = [sequence.tokens[-1] for sequence in decodes]
            self._positions[:n] = [sequence.computed for sequence in decodes]
            self._slots[:n] = slots
            np.add(self._positions[:n], 1, out=self._context[:n])
            if top and max(top) >= 0:
                self._top[:n] = top
                self._wanted = True
        n_tokens = n_rows = n + plan.drafted
        rows = self._range
        spans: list[RowSpan] = []
        if plan.chunks:
            self._starts[: n + 1] = starts[: n + 1]
            self._rows[:n_rows] = self._range[:n_rows]
            n_tokens, n_rows, spans = self._chunks(plan, slots)
            starts, rows = self._starts, self._rows
        index = np.array(slots, np.intp)
        width = int(self._widths[index].max())
        batch = StepBatch(
            self._tokens[:n_tokens],
            self._positions[:n_tokens],
            starts[: len(slots) + 1],
            self._context[: len(slots)],
            self._tables[:, :width].take(index, axis=0),
            rows[:n_rows],
            self._slots[:n_rows],
            self._targets[:n_rows],
            self._top[:n_rows],
            self._fill_masks(plan, spans, n_rows),
        )
        return batch, spans

    def _lay_drafts(self, decodes: list[Sequence], top: list[int]) -> npt.NDArray[np.int32]:
        """The decodes where some have drafted tokens after their newest one, all of them wanted. Returns the starts."""
        tokens: list[int] = []
        counts = []
        for sequence in decodes:
            tokens.append(sequence.tokens[-1])
            tokens += sequence.draft
            counts.append(1 + len(sequence.draft))
        n, total = len(decodes), len(tokens)
        starts = self._starts
        starts[0] = 0
        starts[1 : n + 1] = np.cumsum(counts)
        computed = np.array([sequence.computed for sequence in decodes], np.int32)
        self._context[:n] = computed + np.diff(starts[: n + 1])
        self._tokens[:total] = tokens
        self._positions[:total] = self._range[:total] + np.repeat(computed - starts[:n], counts)
        self._slots[:total] = np.repeat([sequence.slot for sequence in decodes], counts)
        if max(top) >= 0:
            self._top[:total] = np.repeat(top, counts)
            self._wanted = True
        return starts

    def _fill_masks(self, plan: StepPlan, spans: list[RowSpan], n_rows: int) -> npt.NDArray[np.uint32] | None:
        """What the grammars of this step's sequences allow; None when none has one."""
        wanted: list[tuple[int, Matcher, Tokens[int]]] = []
        row = 0
        for sequence in plan.decodes:
            if sequence.matcher is not None:
                wanted.append((row, sequence.matcher, sequence.draft))
            row += 1 + len(sequence.draft)
        for (sequence, _), span in zip(plan.chunks, spans, strict=True):
            if span.sampled and sequence.matcher is not None:
                wanted.append((span.first + span.scored, sequence.matcher, ()))
        if not wanted:
            return None
        masks = self._masks
        if masks is None:
            words = (self.executable.vocab_size + 31) // 32
            masks = self._masks = np.full((len(self._rows), words), 0xFFFFFFFF, np.uint32)
        masks[self._masked] = 0xFFFFFFFF
        self._masked = [row + ahead for row, _, draft in wanted for ahead in range(1 + len(draft))]
        for row, matcher, draft in wanted:
            matcher.fill(masks[row])
            if draft:
                _look_ahead(matcher.copy(), draft, masks[row + 1 :])
        return masks[:n_rows]

    def _chunks(self, plan: StepPlan, slots: list[int]) -> tuple[int, int, list[RowSpan]]:
        """Lay the chunks after the decodes; returns the totals of tokens and rows, and each chunk's rows."""
        token = row = len(plan.decodes) + plan.drafted
        spans = []
        for sequence, count in plan.chunks:
            index = len(slots)
            slots.append(sequence.slot)
            begin = sequence.computed
            end = begin + count
            self._tokens[token : token + count] = sequence.tokens[begin:end]
            self._positions[token : token + count] = self._range[begin:end]
            self._context[index] = end
            self._starts[index + 1] = token + count
            scored = self._score(sequence, begin, end, token, row) if sequence.unscored else 0
            sampled = end == len(sequence.tokens) and not sequence.scoring
            spans.append(RowSpan(row, scored, sampled))
            row += scored
            if sampled:
                self._rows[row] = token + count - 1
                if sequence.top >= 0:
                    self._top[row] = sequence.top
                    self._wanted = True
                row += 1
            self._slots[spans[-1].first : row] = sequence.slot
            token += count
        return token, row, spans

    def _score(self, sequence: Sequence, begin: int, end: int, token: int, row: int) -> int:
        """Ask for the logprobs of prompt tokens; position p predicts prompt token p + 1. Returns how many rows."""
        first = max(begin, sequence.scored)
        last = min(end, len(sequence.prompt) - 1)
        count = last - first
        if count <= 0:
            return 0
        offset = token + first - begin
        self._rows[row : row + count] = self._range[:count] + offset
        self._targets[row : row + count] = sequence.prompt[first + 1 : last + 1]
        self._top[row : row + count] = sequence.prompt_top
        self._wanted = True
        return count


def _look_ahead(matcher: Matcher, draft: Tokens[int], masks: npt.NDArray[np.uint32]) -> None:
    """What the grammar allows after each drafted token. Rows after one that it forbids or ends with are not reached."""
    for index, guess in enumerate(draft):
        if not matcher.accept(guess) or matcher.complete:
            break
        matcher.fill(masks[index])

"""An executable without a model, for tests of everything above it: deterministic, and suspicious of its caller."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from toque.backends.base import BLOCK_SIZE, Float32, StepBatch, StepResult
from toque.errors import EngineError
from toque.types import SamplingParams


@dataclass(slots=True)
class _Slot:
    params: SamplingParams
    tokens: list[int]  # prompt, then everything sampled
    prompt: int
    suppress: frozenset[int]
    suppress_until: int


@dataclass(slots=True)
class FakeExecutable:
    """Its "KV" is the token at each place of each block; the next token is a hash of the tokens read back from it.

    So a block that is stale, shared wrongly or handed to two sequences changes the text, or is noticed at once:
    everything read back must equal the sequence's own tokens. Raises EngineError when the caller breaks the
    contract of `Executable`. ``step_seconds`` is slept in every step.
    """

    vocab_size: int = 64
    block_size: int = BLOCK_SIZE
    step_seconds: float = 0.0
    kv_bytes_per_block: int = 1024
    max_sequences: int = 256
    steps: int = 0
    fail_next: Exception | None = None  # raised by the next step, once
    _kv: list[list[int]] = field(default_factory=list)
    _slots: dict[int, _Slot] = field(default_factory=dict)

    def allocate_kv(self, n_blocks: int) -> None:
        self._kv = [[-1] * self.block_size for _ in range(n_blocks)]

    def open_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        suppress: Sequence[int],
        suppress_until: int,
    ) -> None:
        if slot in self._slots:
            raise EngineError(f"slot {slot} is opened twice")
        if params.seed is None:
            raise EngineError(f"slot {slot} has no seed")
        self._slots[slot] = _Slot(
            params, [*prompt, *output], len(prompt), frozenset(suppress), suppress_until
        )

    def close_slot(self, slot: int) -> None:
        if self._slots.pop(slot, None) is None:
            raise EngineError(f"slot {slot} is closed, but was not open")

    @property
    def open_slots(self) -> int:
        return len(self._slots)

    def step(self, batch: StepBatch) -> StepResult:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self.steps += 1
        self._check_shapes(batch)
        self._write(batch)
        owner = np.searchsorted(batch.starts, batch.rows, side="right") - 1
        n = len(batch.rows)
        tokens = np.zeros(n, np.int32)
        width = max(int(batch.top.max(initial=-1)), 0)
        logprobs = np.zeros(n, np.float32)
        top_ids = np.zeros((n, width), np.int32)
        top_logprobs = np.zeros((n, width), np.float32)
        for row in range(n):
            slot = self._slots[int(batch.slots[row])]
            if batch.targets[row] < 0 and not batch.verified_by(row, tokens):
                tokens[row] = -1
                continue
            context = self._read(batch, int(owner[row]), int(batch.positions[batch.rows[row]]) + 1)
            if context != slot.tokens[: len(context)]:
                raise EngineError(f"slot {int(batch.slots[row])} reads KV of other tokens than its own")
            target = int(batch.targets[row])
            if target < 0:
                if len(context) != len(slot.tokens):
                    raise EngineError("a row is sampled although later tokens are known")
                token = self._sample(slot, context, None if batch.masks is None else batch.masks[row])
                if token >= 0:
                    slot.tokens.append(token)
            else:
                token = target
            tokens[row] = token
            logprobs[row] = self.logprob(context, token)
            top_ids[row] = [(token + 1 + i) % self.vocab_size for i in range(width)]
            top_logprobs[row] = [self.logprob(context, int(i)) for i in top_ids[row]]
        if batch.top.max(initial=-1) < 0:
            return StepResult(tokens)
        return StepResult(tokens, logprobs, top_ids, top_logprobs)

    def _check_shapes(self, batch: StepBatch) -> None:
        starts = batch.starts.tolist()
        if starts[0] != 0 or starts[-1] != len(batch.tokens) or any(np.diff(batch.starts) < 1):
            raise EngineError(f"starts {starts} do not cut {len(batch.tokens)} tokens into sequences")
        if len(batch.positions) != len(batch.tokens) or not len(batch.rows) == len(batch.slots) == len(
            batch.targets
        ):
            raise EngineError("arrays of a step disagree about its size")
        if any(np.diff(batch.rows) < 1):
            raise EngineError("rows are not ascending")
        if not batch.block_tables.flags.c_contiguous or batch.block_tables.shape[0] != len(batch.context):
            raise EngineError("block_tables are not a contiguous array with a row per sequence")
        if len(batch.context) > self.max_sequences or len(batch.rows) > self.max_sequences:
            raise EngineError("more sequences or rows than the executable was made for")

    def _write(self, batch: StepBatch) -> None:
        written: set[tuple[int, int]] = set()
        for s in range(len(batch.context)):
            begin, end = int(batch.starts[s]), int(batch.starts[s + 1])
            first, last = int(batch.positions[begin]), int(batch.positions[end - 1])
            if last + 1 != int(batch.context[s]) or last - first != end - begin - 1:
                raise EngineError(
                    f"sequence {s} has positions {first} to {last} and a context of {batch.context[s]}"
                )
            for index in range(begin, end):
                position = int(batch.positions[index])
                place = (int(batch.block_tables[s, position // self.block_size]), position % self.block_size)
                if place in written:
                    raise EngineError(f"KV block {place[0]} is written by two sequences in one step")
                written.add(place)
                self._kv[place[0]][place[1]] = int(batch.tokens[index])

    def _read(self, batch: StepBatch, sequence: int, length: int) -> list[int]:
        size = self.block_size
        table = batch.block_tables[sequence].tolist()
        return [self._kv[table[p // size]][p % size] for p in range(length)]

    def _sample(self, slot: _Slot, context: list[int], mask: npt.NDArray[np.uint32] | None) -> int:
        generated = len(context) - slot.prompt
        stream = b"" if slot.params.greedy else f"{slot.params.seed}/{generated}".encode()
        banned = slot.suppress if generated < slot.suppress_until else frozenset[int]()
        bits = None if mask is None else np.unpackbits(mask.view(np.uint8), bitorder="little")
        for attempt in range(256):
            token = _hash(context, stream + bytes([attempt])) % self.vocab_size
            if token not in banned and (bits is None or bits[token]):
                return token
        # Hardly anything is allowed: choose among that.
        left = [t for t in range(self.vocab_size) if t not in banned and (bits is None or bits[t])]
        return left[_hash(context, stream) % len(left)] if left else -1

    @staticmethod
    def logprob(context: Sequence[int], token: int) -> float:
        """What this "model" says of ``token`` after ``context``; a test can compute it independently."""
        return -(_hash([*context, token], b"logprob") % 1000) / 100

    def logits(self, batch: StepBatch) -> Float32:
        raise NotImplementedError("a fake executable has no logits")

    def close(self) -> None:
        self._slots.clear()


def _hash(tokens: Sequence[int], salt: bytes) -> int:
    digest = blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=8, key=salt[:64])
    return int.from_bytes(digest.digest(), "little")

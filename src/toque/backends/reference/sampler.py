"""How a token is chosen from logits: the definition that native samplers must reproduce choice for choice.

For one row of raw float32 logits, in this order:

1. **Edits**, in float32. Add ``logit_bias``; remove (−inf) suppressed ids while fewer than ``suppress_until``
tokens
   are generated, ids that the mask forbids, and padding ids ≥ ``valid_vocab``; for every id in prompt or
   output divide a positive logit by ``repetition_penalty`` and multiply a negative one; subtract
   ``presence_penalty + frequency_penalty · count`` for every id generated ``count`` > 0 times. NaN counts as
   removed.
2. **Nothing left** (everything removed): the answer is −1; the caller ends that request with an error.
3. **Greedy** (`SamplingParams.greedy`): the largest logit; of equal ones the lowest id.
4. **Temperature**: ``x = (l − max l) / temperature``, so that x ≤ 0 and nothing overflows; weights ``w =
exp(x)``.
   All filters and the draw see the tokens in one order: largest logit first, equal ones by id.
5. **top_k**: the first k tokens of that order, exactly k.
6. **top_p**: the shortest prefix whose weights sum to at least ``top_p · (1 − 1e-6)`` times the sum after top_k.
   Never empty, so 0 keeps one token. The slack lets a sum that equals top_p but for rounding end there.
7. **min_p**: tokens with ``w ≥ min_p`` (the largest weight is 1). The first token always stays.
8. **Draw**: ``u`` in [0, 1) from Philox4x32-10 keyed by the seed with the output index as counter; the first
token at
   which the running sum of weights exceeds ``u`` times their total. Sums are float64 over float32 weights.

A draw depends on the seed, the index and the row only. Reported logprobs are the log-softmax of the raw
logits, over all ids, before step 1; alternatives leave padding out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from toque.types import SamplingParams

TOP_P_SLACK = 1e-6

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class Sampler:
    """One request's sampling state. ``sample`` records its choice, so the next call sees it in the counts."""

    def __init__(
        self,
        vocab_size: int,
        valid_vocab: int,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        suppress: Sequence[int] = (),
        suppress_until: int = 0,
    ) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._valid_vocab = valid_vocab
        self._prompt = {token for token in prompt if 0 <= token < vocab_size}
        self._counts = Counter(token for token in output if 0 <= token < vocab_size)
        self._generated = len(output)
        self._suppress = [token for token in suppress if 0 <= token < vocab_size]
        self._suppress_until = suppress_until

    def sample(self, logits: Float32, mask: npt.NDArray[np.uint32] | None = None) -> int:
        edited = self._edit(logits, mask)
        token = choose(edited, self._params, self._generated)
        if token >= 0:
            self._counts[token] += 1
            self._generated += 1
        return token

    @np.errstate(over="ignore")
    def _edit(self, logits: Float32, mask: npt.NDArray[np.uint32] | None) -> Float32:
        """Step 1: a changed copy of ``logits`` [vocab]."""
        params = self._params
        largest = np.finfo(np.float32).max
        edited = np.minimum(np.where(np.isnan(logits), np.float32(-np.inf), logits), largest)
        for token, bias in params.logit_bias:
            if token < self._vocab_size:
                edited[token] += np.float32(bias)
        if self._generated < self._suppress_until:
            edited[self._suppress] = -np.inf
        if mask is not None:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            edited[bits[: self._vocab_size] == 0] = -np.inf
        edited[self._valid_vocab :] = -np.inf
        if params.repetition_penalty != 1.0:
            seen = list(self._prompt | self._counts.keys())
            penalty = np.float32(params.repetition_penalty)
            edited[seen] = np.where(edited[seen] > 0, edited[seen] / penalty, edited[seen] * penalty)
        if params.presence_penalty or params.frequency_penalty:
            for token, count in self._counts.items():
                edited[token] -= np.float32(params.presence_penalty + params.frequency_penalty * count)
        return np.minimum(edited, largest)


def choose(logits: Float32, params: SamplingParams, index: int) -> int:
    """Steps 2 to 8 on edited logits [vocab] for output number ``index``."""
    best = int(np.argmax(logits))  # the first of equals
    if logits[best] == -np.inf:
        return -1
    if params.greedy:
        return best
    order = np.argsort(-logits, kind="stable")
    order = order[logits[order] > -np.inf]
    with np.errstate(under="ignore", over="ignore"):
        scaled = (logits[order] - logits[best]) / np.float32(params.temperature)
        weights = np.exp(scaled.astype(np.float64)).astype(np.float32)
    if params.top_k > 0:
        weights = weights[: params.top_k]
    if params.top_p < 1.0:
        sums = np.cumsum(weights, dtype=np.float64)
        weights = weights[: int(np.searchsorted(sums, params.top_p * (1.0 - TOP_P_SLACK) * sums[-1])) + 1]
    if params.min_p > 0.0:
        weights = weights[weights.astype(np.float64) >= params.min_p]
    sums = np.cumsum(weights, dtype=np.float64)
    drawn = int(np.searchsorted(sums, uniform(params.seed or 0, index) * sums[-1], side="right"))
    return int(order[min(drawn, len(sums) - 1)])


def uniform(seed: int, index: int) -> float:
    """Number ``index`` of the stream of ``seed`` (any 64-bit integer): 53 random bits as a float in [0, 1)."""
    high, low, _, _ = philox(
        (index & _MASK32, index >> 32 & _MASK32, 0, 0), (seed & _MASK32, seed >> 32 & _MASK32)
    )
    return float((high << 32 | low) >> 11) * 2.0**-53


_MASK32 = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32 with ten rounds: a counter-based generator (Salmon et al., SC 2011, doi:10.1145/2063384.2063405)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            product1 >> 32 ^ c1 ^ k0,
            product1 & _MASK32,
            product0 >> 32 ^ c3 ^ k1,
            product0 & _MASK32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def log_softmax(logits: Float32) -> Float32:
    """Of raw logits [vocab], all ids included. Never NaN or +inf; ids without any probability are −inf."""
    wide = np.nan_to_num(
        logits.astype(np.float64), nan=-np.inf, posinf=float(np.finfo(np.float32).max), neginf=float(-np.inf)
    )
    top = wide.max()
    if top == -np.inf:
        return np.full(len(logits), -np.inf, np.float32)
    shifted = wide - top
    logprobs: Float32 = (shifted - np.log(np.sum(np.exp(shifted)))).astype(np.float32)
    return logprobs


def top_alternatives(logits: Float32, count: int, valid_vocab: int) -> Int64:
    """The ``count`` ids with the largest raw logits, best first, equal ones by id; padding ids are left out."""
    valid = np.where(np.isnan(logits), -np.inf, logits)[:valid_vocab]
    best: Int64 = np.argsort(-valid, kind="stable")[:count]
    return best[valid[best] > -np.inf]

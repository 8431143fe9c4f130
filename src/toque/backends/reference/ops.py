"""The ops of `toque.graph.ir` as functions over float32 arrays of shape [tokens, width].

Each row's result is the same bits whatever the other rows are. Matrix products are therefore made in tiles of
a fixed number of rows (the last one padded with zeros): a BLAS library may choose another order of summation
for another shape, but not for other numbers in the same shape.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from toque.graph.ir import RopeSpec

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

ROWS_PER_TILE = 8  # BLAS kernels take 8 rows in one way; in 12 or 16 the last ones go through other loops


def linear(x: Float32, weight: Float32, bias: Float32 | None = None) -> Float32:
    """x [T, K] · weightᵀ [K, N] + bias [N]."""
    out = np.empty((len(x), len(weight)), np.float32)
    transposed = weight.T
    tile = np.zeros((ROWS_PER_TILE, x.shape[1]), np.float32)
    for start in range(0, len(x), ROWS_PER_TILE):
        rows = x[start : start + ROWS_PER_TILE]
        tile[: len(rows)] = rows
        tile[len(rows) :] = 0.0
        out[start : start + len(rows)] = (tile @ transposed)[: len(rows)]
    return out if bias is None else out + bias


def rms_norm(x: Float32, gain: Float32, eps: float, group: int = 0) -> Float32:
    """x / √(mean(x²) + eps) · gain over each row, or over each run of ``group`` elements in it."""
    width = group or x.shape[1]
    grouped = x.reshape(len(x), x.shape[1] // width, width)  # x may have no rows
    mean_square = np.mean(np.square(grouped), axis=-1, keepdims=True)
    normed: Float32 = grouped / np.sqrt(mean_square + eps) * gain
    return normed.reshape(x.shape)


def layer_norm(x: Float32, gain: Float32, bias: Float32, eps: float) -> Float32:
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(np.square(centred), axis=-1, keepdims=True)
    normed: Float32 = centred / np.sqrt(variance + eps) * gain + bias
    return normed


def rope(x: Float32, positions: Int32, head_dim: int, spec: RopeSpec) -> Float32:
    """Rotates (first half, second half) pairs of each head; dimensions past ``2 * len(inv_freq)`` pass unchanged."""
    half = len(spec.inv_freq)
    angles = positions.astype(np.float64)[:, None] * spec.inv_freq
    cos = (np.cos(angles) * spec.mscale).astype(np.float32)[:, None, :]
    sin = (np.sin(angles) * spec.mscale).astype(np.float32)[:, None, :]
    heads = x.reshape(len(x), -1, head_dim)
    first, second = heads[:, :, :half], heads[:, :, half : 2 * half]
    rotated = (first * cos - second * sin, second * cos + first * sin, heads[:, :, 2 * half :])
    return np.concatenate(rotated, axis=-1).reshape(x.shape)


def attend(q: Float32, keys: Float32, values: Float32, scale: float, softcap: float) -> Float32:
    """One token's attention. q [H, D]; keys and values [Hkv, n, D], exactly the positions it may see.

    → [H, D].
    """
    n_kv_heads, _, head_dim = keys.shape
    grouped = q.reshape(n_kv_heads, -1, head_dim)
    scores = np.matmul(grouped, keys.transpose(0, 2, 1)) * scale
    if softcap:
        scores = soft_cap(scores, softcap)
    weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    weights /= np.sum(weights, axis=-1, keepdims=True)
    out: Float32 = np.matmul(weights, values).reshape(q.shape)
    return out


def activation(x: Float32, kind: str) -> Float32:
    if kind == "silu":
        with np.errstate(over="ignore"):  # exp of a large -x is infinite, and x / inf is the right 0
            return np.divide(x, 1.0 + np.exp(-x), dtype=np.float32)
    return gelu(x, tanh=kind == "gelu_tanh")


def gelu(x: Float32, *, tanh: bool) -> Float32:
    if tanh:
        curve = np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))
    else:
        curve = _erf(x * math.sqrt(0.5))
    out: Float32 = np.multiply(0.5 * x, 1.0 + curve, dtype=np.float32)
    return out


def soft_cap(x: Float32, cap: float) -> Float32:
    out: Float32 = np.multiply(cap, np.tanh(x / cap), dtype=np.float32)
    return out


def moe(
    x: Float32,
    router: Float32,
    experts: tuple[Float32, Float32, Float32],
    n_used: int,
    act: str,
    norm: bool,
) -> Float32:
    """Each token through its ``n_used`` likeliest experts, weighted by their probabilities.

    These are a softmax over all experts; with ``norm`` they are divided by the sum of those used.
    """
    gate, up, down = experts
    scores = linear(x, router)
    out = np.zeros_like(x)
    for row in range(len(x)):
        chosen = np.argsort(-scores[row], kind="stable")[:n_used]
        likelihood = np.exp(scores[row] - scores[row][chosen[0]])
        weights = likelihood[chosen] / (likelihood[chosen] if norm else likelihood).sum()
        token = x[row : row + 1]
        for expert, weight in zip(chosen, weights, strict=True):
            hidden = activation(linear(token, gate[expert]), act) * linear(token, up[expert])
            out[row] += weight * linear(hidden, down[expert])[0]
    return out


def _erf(x: Float32) -> Float32:
    out: Float32 = np.vectorize(math.erf, otypes=[np.float32])(x)
    return out

"""Rotary frequencies for every scaling a checkpoint may ask for, in float64.

``inv_freq[i] = theta ** (-2 i / dim)`` is the angle per position of pair i; a pair turns once in ``2π /
inv_freq[i]`` positions (its wavelength). The scalings stretch slow pairs to reach longer contexts:

- ``linear``: every pair by ``factor`` (position interpolation, arXiv:2306.15595).
- ``llama3``: pairs slower than ``original_context / low_freq_factor`` by ``factor``, pairs faster than
  ``original_context / high_freq_factor`` untouched, and a straight blend in between.
- ``yarn``: the same idea with a ramp over the pair index between ``beta_fast`` and ``beta_slow`` turns per
  original context, and cos/sin multiplied by an attention factor (arXiv:2309.00071).
- ``longrope``: one divisor per pair, found by search (arXiv:2402.13753); one set for contexts beyond the original
  one, one for shorter contexts, and an attention factor.
- ``factors``: one divisor per pair, as in GGUF's ``rope_freqs.weight``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from toque.errors import FormatError, UnsupportedModelError
from toque.graph.ir import RopeSpec
from toque.types import RopeScaling

Float64 = npt.NDArray[np.float64]


def rope_spec(
    theta: float,
    dim: int,
    scaling: RopeScaling | None = None,
    factors: Sequence[float] | npt.NDArray[np.floating] | None = None,
    context: int = 0,
) -> RopeSpec:
    """The rotation of the first ``dim`` elements of each head, for sequences of up to ``context`` tokens.

    ``factors`` (dim/2 divisors) replace ``scaling``: files that carry them state the same scaling as numbers.
    """
    if dim < 2 or dim % 2:
        raise UnsupportedModelError(f"rope_dim must be even and positive, got {dim}", param="rope_dim")
    if not (math.isfinite(theta) and theta > 0):
        raise UnsupportedModelError(f"rope_theta must be positive, got {theta}", param="rope_theta")
    plain = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if factors is not None:
        return RopeSpec(plain / _divisors(factors, len(plain), "rope_freqs.weight"))
    if scaling is None:
        return RopeSpec(plain)
    if not scaling.factor > 0:
        raise UnsupportedModelError(
            f"rope_scaling factor must be positive, got {scaling.factor}", param="rope_scaling.factor"
        )
    if scaling.kind == "linear":
        return RopeSpec(plain / scaling.factor)
    if scaling.kind == "llama3":
        return RopeSpec(_llama3(plain, scaling))
    if scaling.kind == "yarn":
        return RopeSpec(_yarn(plain, theta, dim, scaling), _yarn_mscale(scaling))
    if scaling.kind == "longrope":
        _needs_context(scaling)
        name = "long_factor" if context > scaling.original_context else "short_factor"
        factors = scaling.long_factors if name == "long_factor" else scaling.short_factors
        divisors = _divisors(factors, len(plain), f"rope_scaling.{name}")
        return RopeSpec(plain / divisors, scaling.attention_factor or 1.0)
    raise UnsupportedModelError(
        f"rope_scaling type {scaling.kind!r} is not one of linear, llama3, yarn, longrope",
        param="rope_scaling.rope_type",
    )


def _divisors(factors: Sequence[float] | npt.NDArray[np.floating], count: int, field: str) -> Float64:
    divisors = np.asarray(factors, dtype=np.float64)
    if divisors.shape != (count,) or not np.all(np.isfinite(divisors)) or np.any(divisors <= 0):
        raise FormatError(f"expected {count} positive factors, got shape {divisors.shape}", field=field)
    return divisors


def _llama3(plain: Float64, scaling: RopeScaling) -> Float64:
    _needs_context(scaling)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if not high > low:
        raise UnsupportedModelError(
            f"high_freq_factor must exceed low_freq_factor, got {high} and {low}", param="rope_scaling"
        )
    turns = scaling.original_context * plain / (2 * math.pi)  # turns of each pair within the original context
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / scaling.factor


def _yarn(plain: Float64, theta: float, dim: int, scaling: RopeScaling) -> Float64:
    _needs_context(scaling)

    def pair_with(turns: float) -> float:
        return dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_with(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with(scaling.beta_slow)), dim - 1)
    width = max(last - first, 0.001)  # a step instead of a ramp where both ends meet
    stretched = np.clip((np.arange(dim // 2, dtype=np.float64) - first) / width, 0.0, 1.0)
    return stretched * plain / scaling.factor + (1.0 - stretched) * plain


def _yarn_mscale(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 1.0 if scaling.factor <= 1.0 else 0.1 * math.log(scaling.factor) + 1.0


def _needs_context(scaling: RopeScaling) -> None:
    if scaling.original_context < 1:
        field = "rope_scaling.original_max_position_embeddings"
        raise UnsupportedModelError(
            f"{scaling.kind} scaling needs {field}, got {scaling.original_context}", param=field
        )

"""Every type that can run has kernels, which multiply as the reference does."""

from __future__ import annotations

import numpy as np
import pytest

from toque import _native
from toque.backends.cpu.weights import PackedWeights
from toque.errors import FormatError
from toque.formats import dequantize
from toque.formats.blocks import BY_NAME, RUNNABLE
from toque.formats.checkpoint import TensorData


def random_tensor(kind: str, rows: int = 13, n_blocks: int = 3) -> TensorData:
    """Random codes and scales of the sizes that real files have."""
    random = np.random.default_rng(len(kind))
    block = BY_NAME[kind]
    raw = random.integers(0, 256, (rows, n_blocks, block.nbytes), np.uint8)
    scales = random.uniform(1e-4, 1e-2, (rows, n_blocks, 2)).astype("<f2")
    if kind == "MXFP4":
        raw[:, :, 0] = random.integers(110, 126, (rows, n_blocks))
    elif kind in ("IQ4_NL", "IQ4_XS"):
        raw[:, :, :2] = scales[:, :, :1].view(np.uint8)
    elif kind == "Q3_K":
        raw[:, :, 108:110] = scales[:, :, :1].view(np.uint8)
    else:
        raw[:, :, 80:84] = scales.view(np.uint8)
    return TensorData("blk.0.ffn_up.weight", kind, (rows, n_blocks * block.elements), raw.reshape(rows, -1))


def test_the_cpu_backend_has_kernels_for_all_that_can_run() -> None:
    for kind in RUNNABLE:
        assert _native.packed_size(kind, 16, 256) > 0


def test_few_bits_stay_few() -> None:
    """Bits per weight in memory, scales and all."""
    bits = {kind: _native.packed_size(kind, 16, 4096) / (16 * 4096) * 8 for kind in RUNNABLE}
    assert bits["IQ4_NL"] == bits["IQ4_XS"] == bits["MXFP4"] == 4.5
    assert bits["Q2_K"] == bits["Q3_K"] == 4
    assert bits["F8_E4M3"] == 8.25
    assert bits["F8_E4M3_32"] == bits["Q8_Z"] == 9


KINDS = ["IQ4_NL", "IQ4_XS", "MXFP4", "Q3_K", "Q2_K"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_cpu_backend_multiplies_what_the_reference_does(kind: str) -> None:
    """Against the float product, with the rounding of activations to 8 bits."""
    tensor = random_tensor(kind, rows=32)
    table = PackedWeights({"w": tensor}, ["w"], 1)
    x = np.random.default_rng(1).normal(0, 1, (5, tensor.shape[1])).astype(np.float32)
    got = _native.linear(_native.resolve_isa(""), table.matrix("w"), x)
    wanted = x @ dequantize(tensor).T
    assert np.linalg.norm(got - wanted) < 0.02 * np.linalg.norm(wanted)


def test_a_scale_beyond_float16_is_refused() -> None:
    tensor = random_tensor("MXFP4")
    raw = np.array(tensor.raw)
    raw[3, 0] = 200
    with pytest.raises(FormatError, match=r"ffn_up\.weight: holds values beyond"):
        PackedWeights({"w": TensorData(tensor.name, tensor.dtype, tensor.shape, raw)}, ["w"], 1)

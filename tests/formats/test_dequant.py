"""Every block type against the `gguf` package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from toque.errors import UnsupportedModelError
from toque.formats import blocks
from toque.formats.checkpoint import TensorData
from toque.formats.dequant import dequantize


def random_tensor(kind: str, rows: int, n_blocks: int, seed: int, *, finite: bool) -> TensorData:
    """Random bytes, so every field takes every value; with ``finite`` the float16 scales avoid inf and NaN."""
    rng = np.random.default_rng(seed)
    block = blocks.BY_NAME[kind]
    raw = rng.integers(0, 256, (rows, n_blocks * block.nbytes), dtype=np.uint8)
    if finite:
        halves = raw.view(np.uint8)
        halves[halves >= 0x78] &= 0x3F  # no byte can be the top of an infinite or NaN half
    return TensorData(kind, kind, (rows, n_blocks * block.elements), raw)


def expected(tensor: TensorData) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[tensor.dtype]
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(tensor.raw, kind).astype(np.float32)


@pytest.mark.parametrize("kind", sorted(set(blocks.RUNNABLE) & set(gguf.GGMLQuantizationType.__members__)))
@pytest.mark.parametrize("finite", [True, False])
def test_random_blocks_equal_the_gguf_package(kind: str, finite: bool) -> None:
    tensor = random_tensor(kind, rows=7, n_blocks=96, seed=len(kind), finite=finite)
    ours, theirs = dequantize(tensor), expected(tensor)
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape == tensor.shape
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), nan)  # a NaN's sign and payload carry nothing
    np.testing.assert_array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


def test_block_sizes_equal_the_gguf_package() -> None:
    for block in blocks.BY_ID.values():
        kind = gguf.GGMLQuantizationType(block.id)
        assert kind.name == block.name
        assert gguf.GGML_QUANT_SIZES[kind] == (block.elements, block.nbytes)


def test_row_order_selects_source_rows() -> None:
    plain = random_tensor("Q4_0", rows=4, n_blocks=2, seed=1, finite=True)
    order = np.array([2, 0, 3, 1])
    shuffled = TensorData("t", "Q4_0", plain.shape, plain.raw, row_order=order)
    np.testing.assert_array_equal(dequantize(shuffled), dequantize(plain)[order])


def test_large_tensor_is_expanded_in_pieces() -> None:
    tensor = random_tensor("Q8_0", rows=600, n_blocks=300, seed=3, finite=True)  # 6 MB, more than one piece
    np.testing.assert_array_equal(dequantize(tensor), expected(tensor))


def test_a_type_that_cannot_run_is_named() -> None:
    raw = np.zeros((1, 66), dtype=np.uint8)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_up\.weight.*IQ2_XXS"):
        dequantize(TensorData("blk.0.ffn_up.weight", "IQ2_XXS", (256,), raw))

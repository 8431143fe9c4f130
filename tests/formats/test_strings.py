"""String arrays against a plain loop, over contents and window sizes that make every path run."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toque.errors import FormatError
from toque.formats import strings
from toque.formats.strings import read_strings

# Zeros and small bytes look like lengths; 127, 128 and 300 are where a short length ends.
PIECES = st.one_of(
    st.text(alphabet="\0\1ab\x7fé€😀", max_size=12),
    st.sampled_from(["", "\0" * 8, "x" * 127, "x" * 128, "é" * 64, "\0" * 300, "y" * 300]),
)


def packed(values: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(value)) + value for value in values)


def mapped(data: bytes) -> mmap.mmap:
    buffer = mmap.mmap(-1, len(data))
    buffer.write(data)
    return buffer


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=40), st.integers(16, 400), st.integers(0, 9), st.binary(max_size=24))
def test_equals_a_plain_loop(values: list[str], window: int, start: int, behind: bytes) -> None:
    data = packed([value.encode() for value in values])
    before, runs = strings._WINDOW, strings._MAX_RUNS
    strings._WINDOW, strings._MAX_RUNS = window, window % 5
    try:
        array, end = read_strings(mapped(bytes(start) + data + behind + b"\0"), start, len(values), "f")
    finally:
        strings._WINDOW, strings._MAX_RUNS = before, runs
    assert array.strings() == values
    assert len(array) == len(values)
    assert end == start + len(data)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=6), min_size=1, max_size=12), st.integers(16, 64))
def test_utf8_is_judged_string_by_string(values: list[bytes], window: int) -> None:
    def valid(value: bytes) -> bool:
        try:
            value.decode()
        except UnicodeDecodeError:
            return False
        return True

    first_bad = next((index for index, value in enumerate(values) if not valid(value)), None)
    buffer = mapped(packed(values))
    before = strings._WINDOW
    strings._WINDOW = window
    try:
        if first_bad is None:
            assert read_strings(buffer, 0, len(values), "f")[0].strings() == [v.decode() for v in values]
        else:
            with pytest.raises(FormatError) as caught:
                read_strings(buffer, 0, len(values), "f")
            assert caught.value.field == f"f[{first_bad}]"
    finally:
        strings._WINDOW = before


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 30))
def test_arbitrary_bytes_are_read_as_the_loop_reads_them_or_refused(data: bytes, count: int) -> None:
    expected: list[str] | None = []
    position = 0
    for _ in range(count):
        length = int.from_bytes(data[position : position + 8], "little")
        if position + 8 + length > len(data):
            expected = None
            break
        try:
            expected.append(data[position + 8 : position + 8 + length].decode())
        except UnicodeDecodeError:
            expected = None
            break
        position += 8 + length
    buffer = mapped(data or b"\xff")
    if expected is None or (not data and count):
        with pytest.raises(FormatError):
            read_strings(buffer, 0, count, "f")
    else:
        assert read_strings(buffer, 0, count, "f")[0].strings() == expected


@pytest.mark.model
def test_opening_a_model_does_not_decode_its_vocabulary(smollm2: Path, gemma3: Path) -> None:
    import time

    from toque.formats import load_checkpoint

    # CPU time, best of several; about 15 and 30 ms on a quiet machine, and several times that on a crowded one.
    for path, bound in ((smollm2, 0.15), (gemma3, 0.4)):
        best = 1e9
        for _ in range(5):
            started = time.process_time()
            checkpoint = load_checkpoint(path)
            best = min(best, time.process_time() - started)
            assert checkpoint.metadata["tokenizer.ggml.tokens"]._strings is None
        assert best < bound, f"{path.name}: {best * 1e3:.0f} ms"

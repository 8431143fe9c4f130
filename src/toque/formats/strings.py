"""GGUF's string arrays: found and checked fast when a file is opened, decoded when somebody reads them.

An array of n strings is n times a 64-bit length and that many bytes, so each string's place depends on all before it.
A tokenizer has hundreds of thousands of them, and a process that needs no tokenizer should not pay for them; a plain
loop would cost 0.1-0.2 µs each. Instead numpy finds every place that looks like a length below 128 (one small byte,
then seven zeros), and a run of such places is accepted only where each is exactly where the one before says the next
one is. What is left, long strings and coincidences, is walked one by one.
"""

from __future__ import annotations

import codecs
import mmap
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np
import numpy.typing as npt

from toque.errors import FormatError

MAX_ARRAY = 1 << 20  # strings in one array; the largest vocabulary in use is 2^18, with 2^19 merges
MAX_BYTES = 128 << 20  # of one array

_WINDOW = 1 << 20  # bytes searched at a time
_MAX_RUNS = 2048  # in a window; more and the plain walk is quicker
_SHORT = 128  # lengths below it are ASCII bytes, which `_all_utf8` needs
_U64 = struct.Struct("<Q")

Starts = npt.NDArray[np.int64]


class StringArray(Sequence[str]):
    """A string array of a file that was checked when it was opened; decoded, once, when it is first read."""

    __slots__ = ("_data", "_starts", "_strings")

    def __init__(self, data: memoryview, starts: Starts) -> None:
        """``data`` is the whole array as it lies in the file, ``starts`` where each length begins in it."""
        self._data = data
        self._starts = starts
        self._strings: list[str] | None = None

    def strings(self) -> list[str]:
        """All of them, as one list that is kept: do not change it."""
        if self._strings is None:
            data = bytes(self._data)
            starts = self._starts.tolist()
            self._strings = [data[a + 8 : b].decode() for a, b in pairwise([*starts, len(data)])]
        return self._strings

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.strings()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.strings())

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)}>"


def read_strings(buffer: mmap.mmap, start: int, count: int, field: str) -> tuple[StringArray, int]:
    """The array of ``count`` strings that begins at ``start``, and the place after it.

    Raises FormatError when a string ends outside the file or is not UTF-8, or the array is beyond all bounds.
    """
    size = len(buffer)
    if count > MAX_ARRAY or count * 8 > size - start:
        bound = (
            f"{MAX_ARRAY} that Toque accepts"
            if count > MAX_ARRAY
            else f"file can hold in {size - start} bytes"
        )
        raise FormatError(f"{count} strings, more than the {bound}", field=f"{field}.length")
    starts = np.empty(count, dtype=np.int64)
    long: list[int] = []  # where the lengths of 128 and more are
    position, found = start, 0
    while found < count:
        window_end = min(position + _WINDOW, size)
        places, lengths, run_ends = _candidates(buffer, position, window_end)
        if len(run_ends) > _MAX_RUNS:
            places = places[:0]
        while found < count and position < window_end:
            at = int(np.searchsorted(places, position))
            if at < len(places) and places[at] == position:
                run_end = int(run_ends[np.searchsorted(run_ends, at)])
                last = min(run_end, at + count - found - 1)
                run: Starts | list[int] = places[at : last + 1]
                position = int(places[last]) + 8 + int(lengths[last])
            else:
                # To the next candidate, or through the window when it has none that can be used.
                until = int(places[at]) if at < len(places) else window_end
                run, position = _walk(buffer, position, until, count - found, long)
            starts[found : found + len(run)] = run
            found += len(run)
        if position > size or (found < count and position == size):
            raise FormatError(f"runs past the end of the file at {size}", field=f"{field}[{found - 1}]")
        if position - start > MAX_BYTES:
            raise FormatError(f"is more than the {MAX_BYTES} bytes that Toque accepts", field=field)
    _check_utf8(buffer, starts, position, long, field)
    return StringArray(memoryview(buffer)[start:position], starts - start), position


def _walk(
    buffer: mmap.mmap, position: int, until: int, wanted: int, long: list[int]
) -> tuple[list[int], int]:
    """The strings from ``position`` on, one by one, while they begin before ``until`` and some are wanted."""
    found: list[int] = []
    read, size = _U64.unpack_from, len(buffer)
    for _ in range(wanted):
        if position >= until:
            break
        length = read(buffer, position)[0] if position + 8 <= size else size
        found.append(position)
        if length >= _SHORT:
            long.append(position)
        position += 8 + length
    return found, position


def _candidates(buffer: mmap.mmap, start: int, end: int) -> tuple[Starts, Starts, Starts]:
    """Where in ``start:end`` a short length may begin, those lengths, and the indices where a run of them ends.

    A run is a stretch of candidates each of which says that the next one is where it is.
    """
    n_words = -(-(end - start) // 8)
    data = buffer[start : start + 8 * n_words + 8]
    data += b"\xff" * (8 * n_words + 8 - len(data))  # a length cut off by the file's end is no candidate
    short = np.empty((n_words, 8), dtype=np.bool_)
    for shift in range(8):
        np.less(np.frombuffer(data, "<u8", count=n_words, offset=shift), _SHORT, out=short[:, shift])
    offsets = np.flatnonzero(short.reshape(-1)[: end - start])
    lengths = np.frombuffer(data, np.uint8)[offsets].astype(np.int64)
    places = offsets + start
    broken = np.flatnonzero(places[:-1] + 8 + lengths[:-1] != places[1:])
    return places, lengths, np.append(broken, len(places) - 1)


def _check_utf8(buffer: mmap.mmap, starts: Starts, end: int, long: list[int], field: str) -> None:
    """Refuse the array if any string is not UTF-8, decoding many strings at once.

    A short length is eight ASCII bytes, so a stretch of short strings, lengths and all, is UTF-8 as a whole exactly
    when each string is. The other lengths, at the places in ``long``, are left out.
    """
    begin = int(starts[0]) if len(starts) else end
    for stop in (*long, end):
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for position in range(begin, stop, _WINDOW):
                decoder.decode(buffer[position : min(position + _WINDOW, stop)])
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            # Somewhere from here on: now one by one, to name it.
            ends = np.append(starts[1:], end)
            for index in range(int(np.searchsorted(starts, begin - 8)), len(starts)):
                try:
                    buffer[int(starts[index]) + 8 : int(ends[index])].decode()
                except UnicodeDecodeError as error:
                    byte = error.object[error.start]
                    raise FormatError(
                        f"is not UTF-8: byte {byte:#04x} at {error.start}", field=f"{field}[{index}]"
                    ) from None
            raise
        begin = stop + 8

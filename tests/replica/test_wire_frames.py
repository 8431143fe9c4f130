"""Frames: any cut of the stream gives the same payloads, and nothing else than frames gets far."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.errors import WireError
from toque.proto.frames import PREFACE, FrameDecoder, encode_frame


@given(
    st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(0, 400), max_size=12), st.booleans()
)
def test_any_chunking_gives_the_same_payloads(payloads: list[bytes], cuts: list[int], preface: bool) -> None:
    stream = (PREFACE if preface else b"") + b"".join(encode_frame(p) for p in payloads)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    decoder = FrameDecoder(50, preface=PREFACE if preface else b"")
    got = [payload for start, end in itertools.pairwise(edges) for payload in decoder.feed(stream[start:end])]
    assert got == payloads


@given(st.binary(min_size=1, max_size=64))
def test_a_stranger_is_refused_within_the_preface(data: bytes) -> None:
    decoder = FrameDecoder(50, preface=PREFACE)
    if PREFACE.startswith(data[: len(PREFACE)]):
        return
    with pytest.raises(WireError, match="instead of"):
        decoder.feed(data)


def test_a_length_over_the_bound_is_refused_before_its_bytes_arrive() -> None:
    decoder = FrameDecoder(50)
    assert decoder.feed(encode_frame(bytes(50))) == [bytes(50)]
    with pytest.raises(WireError, match="51 bytes is over the bound of 50"):
        decoder.feed(encode_frame(bytes(51))[:4])

"""Streamed text: whole characters only, nothing of a stop string, and the same whatever the chunks."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strings import texts
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from toque.errors import RequestError
from toque.text.byte_alphabet import ByteCoding
from toque.text.stop import MAX_STOP_LENGTH, MAX_STOPS, parse_stop
from toque.text.stream import TextStream
from toque.text.tokenizer import Tokenizer


def byte_level(pieces: list[bytes], special: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer whose tokens are exactly these bytes, then the special ones."""
    from toque.text.byte_alphabet import CHARACTER_OF

    vocab = {"".join(CHARACTER_OF[byte] for byte in piece): index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return plain(backend, ByteCoding.BYTE_LEVEL, len(pieces), len(special))


def sentencepiece(pieces: list[str], special: tuple[str, ...] = (), strip: bool = True) -> Tokenizer:
    backend = Backend(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if strip else steps)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return plain(backend, ByteCoding.BYTE_FALLBACK, len(pieces), len(special), strip)


def plain(backend: Backend, coding: ByteCoding, count: int, special: int, strip: bool = False) -> Tokenizer:
    return Tokenizer(
        backend,
        coding=coding,
        vocab_size=count + special,
        special_ids=frozenset(range(count, count + special)),
        eos_ids=frozenset(),
        strip_first_space=strip,
    )


def chunks(ids: list[int], chance: random.Random) -> list[list[int]]:
    cut = []
    while ids:
        size = chance.randint(0, 3)
        cut.append(ids[:size])
        ids = ids[size:]
    return cut


def stream(tokenizer: Tokenizer, pushes: list[list[int]], **options: Any) -> tuple[list[str], bool]:
    followed = TextStream(tokenizer, **options)
    deltas = [followed.push(ids).text for ids in pushes]
    deltas.append(followed.finish().text)
    return deltas, followed.stopped


# Whole characters


def test_a_character_split_over_tokens_comes_whole_and_spaces_stay() -> None:
    # field case BR-001
    tokenizer = byte_level([b" a", b"\xe6\xad", b"\xaa", b" b", b" "])
    ids = [0, 1, 2, 3, 4, 4]
    deltas, _ = stream(tokenizer, [[token] for token in ids])
    assert deltas == [" a", "", "歪", " b", " ", " ", ""]
    assert "".join(deltas) == tokenizer.decode(ids) == " a歪 b  "


def test_an_unfinished_character_becomes_a_replacement_only_at_the_end() -> None:
    tokenizer = byte_level([b"a", b"\xf0\x9f", b"\x98"])
    deltas, _ = stream(tokenizer, [[0], [1], [2]])
    assert deltas == ["a", "", "", "\ufffd"]


def test_certain_damage_is_replaced_at_once() -> None:
    tokenizer = byte_level([b"a", b"\xe6\xad", b"b"])
    deltas, _ = stream(tokenizer, [[1], [0], [2]])
    assert deltas == ["", "\ufffda", "b", ""]


def test_the_first_space_of_sentencepiece_goes_only_at_the_start_of_a_text() -> None:
    tokenizer = sentencepiece(["▁", "▁a", "b"])
    assert stream(tokenizer, [[0], [1], [2], [0], [0]])[0] == ["", " a", "b", " ", " ", ""]
    assert tokenizer.decode([0, 1, 2, 0, 0]) == " ab  "
    # After a prompt's text the answer keeps its space.
    assert stream(tokenizer, [[1], [2]], prompt_tail=[2])[0] == [" a", "b", ""]


def test_byte_tokens_wait_for_the_end_of_their_run() -> None:
    tokenizer = sentencepiece(["a", "<0xE6>", "<0xAD>", "<0xAA>", "<0x0A>"])
    assert stream(tokenizer, [[1], [2], [3], [0]])[0] == ["", "", "", "歪a", ""]
    for ids in ([1, 2, 3, 4, 1, 0], [1, 2], [4, 1, 0, 4]):
        assert "".join(stream(tokenizer, [[token] for token in ids])[0]) == tokenizer.decode(ids)


def test_special_tokens_are_shown_only_when_asked() -> None:
    tokenizer = byte_level([b"a", b"b"], special=("<end>",))
    assert "".join(stream(tokenizer, [[0, 2, 1]])[0]) == "ab"
    assert "".join(stream(tokenizer, [[0, 2, 1]], skip_special=False)[0]) == "a<end>b"


def test_a_character_begun_in_the_prompt_is_finished() -> None:
    tokenizer = byte_level([b"\xe6\xad", b"\xaa", b"b"])
    assert stream(tokenizer, [[1], [2]], prompt_tail=[2, 0])[0] == ["歪", "b", ""]
    tokenizer = sentencepiece(["b", "<0xE6>", "<0xAD>", "<0xAA>", "<0x0A>"])
    assert stream(tokenizer, [[3], [0]], prompt_tail=[4, 1, 2])[0] == ["", "歪b", ""]


def test_whole_characters_of_the_prompt_are_not_part_of_the_answer() -> None:
    tokenizer = sentencepiece(["b", "<0x0A>"])
    assert stream(tokenizer, [[0], [1]], prompt_tail=[0, 1, 1])[0] == ["b", "", "\n"]


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 13), max_size=40), st.randoms(use_true_random=False), st.booleans())
def test_deltas_add_up_to_the_whole_decoding_of_bytes(
    ids: list[int], chance: random.Random, skip: bool
) -> None:
    pieces = [
        b"a",
        b" ",
        b"\xe6\xad",
        b"\xe6",
        b"\xad",
        b"\xaa",
        b"\xf0\x9f",
        b"\x98\x80",
        b"\xff",
        b"\xc3",
        b"\xa9",
        b"\xed\xa0",
        b"\xf4\x90",
    ]
    tokenizer = byte_level(pieces, special=("<|x|>",))
    deltas, _ = stream(tokenizer, chunks(ids, chance), skip_special=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special=skip)
    assert "".join(deltas) == b"".join(
        tokenizer.token_bytes(token) for token in ids if not (skip and tokenizer.is_special(token))
    ).decode("utf-8", "replace")


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(0, 11), max_size=40), st.randoms(use_true_random=False), st.booleans(), st.booleans()
)
def test_deltas_add_up_to_the_whole_decoding_of_sentencepiece(
    ids: list[int], chance: random.Random, skip: bool, strip: bool
) -> None:
    pieces = ["▁", "▁▁", "a", "▁a", "é", "<0xE6>", "<0xAD>", "<0xAA>", "<0x0A>", "<0xFF>", "<0xC3>"]
    tokenizer = sentencepiece(pieces, special=("</s>",), strip=strip)
    deltas, _ = stream(tokenizer, chunks(ids, chance), skip_special=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special=skip)


@pytest.mark.parametrize("name", ["smollm2", "qwen", "gemma3"])
def test_real_vocabularies_stream_what_they_decode(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(f"{name}_tokenizer")
    chance = random.Random(5)
    for text in texts(150, seed=9):
        ids = tokenizer.encode(text, add_special=False)
        ids += [chance.randrange(tokenizer.vocab_size) for _ in range(10)]
        for skip in (True, False):
            deltas, _ = stream(tokenizer, chunks(ids, chance), skip_special=skip)
            assert "".join(deltas) == tokenizer.decode(ids, skip_special=skip)


def test_other_vocabularies_stream_through_their_own_decoder() -> None:
    backend = Backend(models.WordLevel(vocab={"hello": 0, "world": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = plain(backend, ByteCoding.OTHER, 3, 0)
    assert "".join(stream(tokenizer, [[0], [1], [0]])[0]) == tokenizer.decode([0, 1, 0])


# Stop strings


def characters(alphabet: str) -> Tokenizer:
    return byte_level([character.encode() for character in alphabet])


def test_nothing_of_a_stop_string_leaks_and_the_text_ends_before_it() -> None:
    # field case BR-008
    tokenizer = byte_level([b" three", b" four", b" five", b" six", b" seven"])
    deltas, stopped = stream(tokenizer, [[0], [1], [2], [3], [4]], stop=["five six"])
    assert stopped
    assert "".join(deltas) == " three four "
    assert not any("f" in delta and "four" not in delta for delta in deltas)


def test_text_is_held_back_only_while_it_may_be_a_stop() -> None:
    # field case BR-008: a long stop that never comes delays nothing but its own prefixes.
    tokenizer = characters("abx")
    followed = TextStream(tokenizer, stop=["ab" * 20])
    assert [followed.push([token]).text for token in (2, 0, 1, 0, 2, 2)] == ["x", "", "", "", "abax", "x"]


def test_a_held_back_prefix_comes_at_the_end() -> None:
    tokenizer = characters("ab")
    deltas, stopped = stream(tokenizer, [[1, 0]], stop=["ab"])
    assert (deltas, stopped) == (["b", "a"], False)


def test_the_stop_can_be_included() -> None:
    tokenizer = characters("abc")
    assert stream(tokenizer, [[2], [0], [1], [2]], stop=["ab"], include_stop=True) == (
        ["c", "", "ab", "", ""],
        True,
    )


def test_a_stop_in_the_prompt_or_begun_there_is_none() -> None:
    tokenizer = characters("abc")
    assert "".join(stream(tokenizer, [[1, 2]], stop=["ab"], prompt_tail=[0, 1, 0])[0]) == "bc"


def test_a_stop_completed_by_the_flush_counts() -> None:
    tokenizer = byte_level([b"a", b"\xe6"])
    followed = TextStream(tokenizer, stop=["\ufffd"])
    followed.push([0, 1])
    end = followed.finish()
    assert (end.text, end.stopped) == ("", True)


def test_tokens_are_counted_and_listed_up_to_the_stop() -> None:
    tokenizer = byte_level([b"x", b"ya", b"b", b"z"])
    delta = TextStream(tokenizer, stop=["ab"]).push([0, 1, 2, 3])
    assert (delta.text, delta.stopped, delta.used) == ("xy", True, 3)
    assert [(piece.token, piece.text, piece.bytes, piece.offset) for piece in delta.pieces] == [
        (0, "x", b"x", 0),
        (1, "ya", b"ya", 1),
    ]


def first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The plain meaning: the stop that is complete first wins, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], True
    return text, False


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_any_chunking_stops_at_the_same_place(text: str, stops: list[str], chance: random.Random) -> None:
    tokenizer = characters("ab")
    ids = ["ab".index(character) for character in text]
    expected = first_stop(text, stops)
    whole, stopped = stream(tokenizer, [ids], stop=stops)
    assert ("".join(whole), stopped) == expected
    followed = TextStream(tokenizer, stop=stops)
    shown = ""
    for chunk in chunks(ids, chance):
        shown += followed.push(chunk).text
        seen = text[: len(shown)]
        # What is shown is a beginning of the answer: never a character of the stop that ends it.
        assert expected[0].startswith(shown), (seen, shown)
    shown += followed.finish().text
    assert (shown, followed.stopped) == expected


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.text("ab", max_size=30), st.text("ab", min_size=1, max_size=6))
def test_no_more_is_held_back_than_a_prefix_of_the_stop(text: str, stop: str) -> None:
    tokenizer = characters("ab")
    followed = TextStream(tokenizer, stop=[stop])
    shown = ""
    for index, character in enumerate(text):
        delta = followed.push(["ab".index(character)])
        shown += delta.text
        if delta.stopped:
            break
        held = text[len(shown) : index + 1]
        longest = max(n for n in range(len(stop)) if text[: index + 1].endswith(stop[:n]))
        assert held == stop[:longest]


@pytest.mark.parametrize(
    "value", ["", [""], ["", ".\n"], [13], {"a": 1}, 13, True, ["a"] * (MAX_STOPS + 1), "x" * 100_000, [None]]
)
def test_odd_stops_are_refused_by_name(value: object) -> None:
    # field case BR-010
    with pytest.raises(RequestError) as caught:
        parse_stop(value)
    assert caught.value.param == "stop"
    assert len(str(caught.value)) < 200


def test_usual_stops_are_accepted() -> None:
    # field case BR-010
    assert parse_stop(None) == parse_stop([]) == ()
    assert parse_stop("a") == ("a",)
    assert parse_stop(["a", "b", "c", "d"]) == ("a", "b", "c", "d")
    assert parse_stop(["x" * MAX_STOP_LENGTH])
    with pytest.raises(RequestError, match="empty"):
        TextStream(characters("a"), stop=["a", ""])


def test_a_pathological_stop_costs_no_more_than_its_length() -> None:
    tokenizer = characters("ab")
    followed = TextStream(tokenizer, stop=["a" * (MAX_STOP_LENGTH - 1) + "b"])
    begun = time.thread_time()
    followed.push([0] * 20_000)
    assert time.thread_time() - begun < 1.0


def test_a_push_is_cheap(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 200, add_special=False)
    best = 1.0
    for _ in range(3):
        followed = TextStream(smollm2_tokenizer, stop=["\n\nUser:"])
        begun = time.thread_time()
        for token in ids:
            followed.push([token])
        best = min(best, (time.thread_time() - begun) / len(ids))
    assert best < 50e-6  # about 3 µs on an idle machine

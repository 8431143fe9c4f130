"""Damaged and hostile GGUF files (field case BR-061): each ends in an error that names the field, quickly and small."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from formats import gguf_builder as build
from formats.gguf_builder import GGUF, Array, Entry, Raw, Tensor, tiny_llama
from toque.errors import FormatError, ModelError, UnsupportedModelError
from toque.formats import load_checkpoint

TOKENS = "tokenizer.ggml.tokens"


def refused(
    path: Path, *, field: str | None = None, error: type[ModelError] = FormatError, traced: bool = True
) -> ModelError:
    """Load; the refusal must come in under a second and 200 MB, with a short message, and name the field."""
    started = time.process_time()  # of this process: the machine may be busy with others
    with pytest.raises(error) as caught:
        load_checkpoint(path)
    seconds = time.process_time() - started
    peak = 0
    if traced:
        tracemalloc.start()  # apart from the clock, because it makes everything several times slower
        try:
            with pytest.raises(error):
                load_checkpoint(path)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert seconds < 1, f"{seconds:.2f} s"
    assert peak < 200 << 20, f"{peak >> 20} MB"
    assert len(caught.value.message) < 500
    assert caught.value.message.isprintable()
    if field is not None:
        assert isinstance(caught.value, FormatError)
        assert caught.value.field == field
    return caught.value


def test_the_builder_makes_a_file_that_loads(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(tiny_llama().write(tmp_path / "good.gguf"))
    assert checkpoint.config.hidden_size == 64
    assert checkpoint.config.tied_embeddings
    assert list(checkpoint.metadata[TOKENS])[:2] == ["!", '"']


def test_version_2_loads(tmp_path: Path) -> None:
    file = tiny_llama()
    file.version = 2
    load_checkpoint(file.write(tmp_path / "two.gguf"))


@pytest.mark.parametrize("tenth", range(10))
def test_truncated_at_every_tenth(tmp_path: Path, tenth: int) -> None:
    data = tiny_llama().build()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: len(data) * tenth // 10])
    refused(path)


def test_truncated_anywhere_in_the_description(tmp_path: Path) -> None:
    file = tiny_llama(n_layers=1, vocab=4)
    data, end = file.build(), len(file.header())
    path = tmp_path / "cut.gguf"
    for size in range(0, end, 3):
        path.write_bytes(data[:size])
        with pytest.raises(FormatError):
            load_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda f: setattr(f, "magic", b"GGML"), "header.magic"),
        (lambda f: setattr(f, "magic", b"FUGG"), "header.magic"),
        (lambda f: setattr(f, "version", 1), "header.version"),
        (lambda f: setattr(f, "version", 99), "header.version"),
        (lambda f: setattr(f, "version", 0x03000000), "header.version"),
        (lambda f: setattr(f, "n_tensors", 1 << 63), "header.tensor_count"),
        (lambda f: setattr(f, "n_tensors", 50_000), "header.tensor_count"),
        (lambda f: setattr(f, "n_metadata", 1 << 40), "header.metadata_kv_count"),
        (lambda f: setattr(f, "n_metadata", 1 << 16), "header.metadata_kv_count"),
    ],
)
def test_header(tmp_path: Path, change: Callable[[GGUF], None], field: str) -> None:
    file = tiny_llama()
    change(file)
    refused(file.write(tmp_path / "bad.gguf"), field=field)


def test_a_big_endian_file_is_recognised(tmp_path: Path) -> None:
    file = tiny_llama()
    file.version = 0x03000000
    assert "big-endian" in refused(file.write(tmp_path / "bad.gguf")).message


def metadata_entry(entry: Entry) -> Callable[[GGUF], None]:
    return lambda file: file.metadata.insert(0, entry)


NESTED = struct.pack("<IQ", build.ARRAY, 1) * 1000 + struct.pack("<IQ", build.U8, 0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (metadata_entry(Entry("x", build.STRING, Raw(struct.pack("<Q", 1 << 60)))), "metadata[x].length"),
        (metadata_entry(Entry("x", build.STRING, b"\xff\xfe")), "metadata[x]"),
        (metadata_entry(Entry("", build.U8, 1)), "metadata[0].key"),
        (metadata_entry(Entry(b"\xc3", build.U8, 1)), "metadata[0].key"),
        (
            metadata_entry(Entry("general.architecture", build.STRING, "llama")),
            "metadata[general.architecture]",
        ),
        (metadata_entry(Entry("x", 13, Raw(b""))), "metadata[x].type"),
        (metadata_entry(Entry("x", 1 << 31, Raw(b""))), "metadata[x].type"),
        (metadata_entry(Entry("x", build.BOOL, 2)), "metadata[x]"),
        (metadata_entry(Entry("x", build.ARRAY, Array(build.BOOL, [0, 7]))), "metadata[x]"),
        (metadata_entry(Entry("x", build.ARRAY, Raw(NESTED))), "metadata[x]"),
        (metadata_entry(Entry("x", build.ARRAY, Array(13, []))), "metadata[x].type"),
        (metadata_entry(Entry("x", build.ARRAY, Array(build.U64, [], length=1 << 61))), "metadata[x].length"),
        (metadata_entry(Entry("x", build.ARRAY, Array(build.F64, [], length=1 << 40))), "metadata[x].length"),
        (
            metadata_entry(Entry("x", build.ARRAY, Array(build.STRING, [], length=1 << 63))),
            "metadata[x].length",
        ),
        (
            metadata_entry(Entry("x", build.ARRAY, Array(build.STRING, [], length=1 << 20))),
            "metadata[x].length",
        ),
    ],
)
def test_metadata(tmp_path: Path, change: Callable[[GGUF], None], field: str) -> None:
    file = tiny_llama()
    change(file)
    refused(file.write(tmp_path / "bad.gguf"), field=field)


@pytest.mark.parametrize("value", [0, 3, 4, 12, 24, 1 << 31 | 1])
def test_alignment_value(tmp_path: Path, value: int) -> None:
    file = tiny_llama().set("general.alignment", build.U32, value)
    refused(file.write(tmp_path / "bad.gguf"), field="metadata[general.alignment]")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (build.U64, 32),
        (build.I32, 32),
        (build.F32, 32.0),
        (build.STRING, "32"),
        (build.ARRAY, Array(build.U32, [32])),
    ],
)
def test_alignment_of_the_wrong_type(tmp_path: Path, kind: int, value: object) -> None:
    file = tiny_llama().set("general.alignment", kind, value)
    refused(file.write(tmp_path / "bad.gguf"), field="metadata[general.alignment]")


def test_another_alignment_loads(tmp_path: Path) -> None:
    file = tiny_llama().set("general.alignment", build.U32, 64)
    file.alignment = 64
    load_checkpoint(file.write(tmp_path / "good.gguf"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda t: setattr(t, "n_dims", 0), "tensor[0].n_dims"),
        (lambda t: setattr(t, "n_dims", 9), "tensor[0].n_dims"),
        (lambda t: setattr(t, "n_dims", 10**6), "tensor[0].n_dims"),
        (lambda t: setattr(t, "dims", (64, 0)), "tensor[0].dims"),
        (lambda t: setattr(t, "dims", (0, 64)), "tensor[0].dims"),
        (lambda t: setattr(t, "dims", (64, 2**42 + 1)), "tensor[0].dims"),
        (lambda t: setattr(t, "dims", (2**42, 2**42, 2**42, 2**42)), "tensor[0].dims"),
        (lambda t: setattr(t, "dims", (2**63, 2)), "tensor[0].dims"),
        (lambda t: setattr(t, "offset", 1 << 40), "tensor[0].offset"),
        (lambda t: setattr(t, "offset", 2**64 - 32), "tensor[0].offset"),
        (lambda t: setattr(t, "offset", 7), "tensor[0].offset"),
        (lambda t: setattr(t, "name", ""), "tensor[0].name"),
        (lambda t: setattr(t, "name", b"\xff"), "tensor[0].name"),
        (lambda t: setattr(t, "name", "n" * 300), "tensor[0].name.length"),
        (lambda t: (setattr(t, "type", build.TYPE_Q4_0), setattr(t, "dims", (48, 64))), "tensor[0].dims"),
    ],
)
def test_tensor(tmp_path: Path, change: Callable[[Tensor], None], field: str) -> None:
    file = tiny_llama()
    change(file.tensors[0])
    refused(file.write(tmp_path / "bad.gguf"), field=field)


def test_overlapping_tensors(tmp_path: Path) -> None:
    file = tiny_llama()
    file.tensors[3].offset = 32
    file.tensors[0].offset = 0
    assert "overlaps" in refused(file.write(tmp_path / "bad.gguf")).message


def test_the_same_tensor_twice(tmp_path: Path) -> None:
    file = tiny_llama()
    file.tensors.append(file.tensors[0])
    refused(file.write(tmp_path / "bad.gguf"), field=f"tensor[{len(file.tensors) - 1}].name")


def test_an_unknown_tensor_type_is_named(tmp_path: Path) -> None:
    file = tiny_llama()
    file.tensors[0].type = 77
    error = refused(file.write(tmp_path / "bad.gguf"), error=UnsupportedModelError)
    assert "token_embd.weight" in error.message
    assert "77" in error.message


def test_a_known_type_that_cannot_run_is_named(tmp_path: Path) -> None:
    file = tiny_llama(hidden=256, head_dim=64)
    tensor = file.tensor("token_embd.weight")
    tensor.type, tensor.data = 16, bytes(66 * 64)
    error = refused(file.write(tmp_path / "bad.gguf"), error=UnsupportedModelError)
    assert "token_embd.weight" in error.message
    assert "IQ2_XXS" in error.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (TOKENS, Array(build.U8, [1] * 64)),
        ("tokenizer.ggml.token_type", Array(build.U8, [1] * 64)),
        ("tokenizer.ggml.token_type", Array(build.I32, [1] * 63)),
        ("tokenizer.ggml.scores", Array(build.F32, [0.0] * 65)),
        ("tokenizer.ggml.scores", Array(build.F64, [0.0] * 64)),
        ("tokenizer.ggml.merges", Array(build.I32, [1])),
        (TOKENS, Array(build.STRING, ["a"] * 65)),
    ],
)
def test_tokenizer_arrays(tmp_path: Path, key: str, value: Array) -> None:
    file = tiny_llama().set(key, build.ARRAY, value)
    if key == TOKENS:
        file.drop("tokenizer.ggml.token_type")
    refused(file.write(tmp_path / "bad.gguf"), field=f"metadata[{key}]")


@pytest.mark.parametrize(
    "bad", [b"\xff", b"ab\xc3", b"\xed\xa0\x80", b"\xc3" + b"x" * 200, b"\xf4\x90\x80\x80"]
)
@pytest.mark.parametrize("place", [0, 40, 63])
def test_bad_utf8_in_tokens(tmp_path: Path, bad: bytes, place: int) -> None:
    tokens: list[object] = ["t"] * 64
    tokens[place] = bad
    file = tiny_llama().set(TOKENS, build.ARRAY, Array(build.STRING, tokens))
    refused(file.write(tmp_path / "bad.gguf"), field=f"metadata[{TOKENS}][{place}]")


def test_a_length_byte_never_completes_a_character(tmp_path: Path) -> None:
    # The next string's length, 128, is a continuation byte: decoded together the two would look like one character.
    tokens = ["t"] * 62 + [b"\xc3", "x" * 128]
    file = tiny_llama().set(TOKENS, build.ARRAY, Array(build.STRING, tokens))
    refused(file.write(tmp_path / "bad.gguf"), field=f"metadata[{TOKENS}][62]")


def test_no_tokenizer_at_all_is_left_to_the_tokenizer(tmp_path: Path) -> None:
    file = tiny_llama()
    file.drop(*[str(entry.key) for entry in file.metadata if str(entry.key).startswith("tokenizer.")])
    assert TOKENS not in load_checkpoint(file.write(tmp_path / "weights.gguf")).metadata


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("llama.block_count", build.U32, 0),
        ("llama.block_count", build.U32, 2**32 - 1),
        ("llama.block_count", build.STRING, "2"),
        ("llama.block_count", build.I32, -1),
        ("llama.embedding_length", build.F32, 64.0),
        ("llama.attention.head_count", build.U32, 0),
        ("llama.attention.head_count", build.ARRAY, Array(build.U32, [4, 4])),
        ("llama.attention.head_count_kv", build.U32, 3),
        ("llama.attention.head_count_kv", build.U32, 0),
        ("llama.attention.key_length", build.U32, 2**31),
        ("llama.rope.dimension_count", build.U32, 18),
        ("llama.rope.dimension_count", build.U32, 3),
        ("llama.rope.freq_base", build.F32, float("nan")),
        ("llama.rope.freq_base", build.F32, 0.0),
        ("llama.attention.layer_norm_rms_epsilon", build.F32, float("inf")),
        ("llama.attention.layer_norm_rms_epsilon", build.F32, -1.0),
        ("llama.context_length", build.U64, 2**63),
        ("general.architecture", build.U32, 5),
    ],
)
def test_hyper_parameters(tmp_path: Path, key: str, kind: int, value: object) -> None:
    file = tiny_llama()
    file[key].type, file[key].value = kind, value
    if key == "llama.attention.key_length":
        file.set("llama.attention.value_length", kind, value)
    refused(file.write(tmp_path / "bad.gguf"), field=f"metadata[{key}]")


@pytest.mark.parametrize(
    "key", ["general.architecture", "llama.block_count", "llama.embedding_length", "llama.context_length"]
)
def test_a_missing_hyper_parameter_is_named(tmp_path: Path, key: str) -> None:
    refused(tiny_llama().drop(key).write(tmp_path / "bad.gguf"), field=f"metadata[{key}]")


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_down.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    refused(tiny_llama().drop_tensor(name).write(tmp_path / "bad.gguf"), field=name)


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    file = tiny_llama()
    tensor = file.tensor("blk.0.attn_q.weight")
    tensor.dims = (32, 128)
    refused(file.write(tmp_path / "bad.gguf"), field="blk.0.attn_q.weight")


def test_an_unsupported_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    file = tiny_llama(architecture="mamba")
    file.drop_tensor("token_embd.weight")  # refused before anything else is looked at
    error = refused(file.write(tmp_path / "bad.gguf"), error=UnsupportedModelError)
    assert "mamba" in error.message
    assert "llama" in error.message


def test_an_architecture_that_cannot_run_here_is_refused(tmp_path: Path) -> None:
    path = tiny_llama(architecture="qwen3").write(tmp_path / "bad.gguf")
    with pytest.raises(UnsupportedModelError, match="qwen3 cannot run yet; supported: llama"):
        load_checkpoint(path, architectures=("llama",))


def test_a_gigabyte_string(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    file = GGUF([Entry("x", build.STRING, Raw(struct.pack("<Q", 1 << 30)))])
    path.write_bytes(file.header())
    os.truncate(path, (1 << 30) + 4096)  # sparse: the bytes are there, as zeros
    refused(path, field="metadata[x].length")


@pytest.mark.parametrize("count", [1 << 20, 1 << 21, 1 << 26])
def test_an_array_of_millions_of_empty_strings(tmp_path: Path, count: int) -> None:
    path = tmp_path / "bad.gguf"
    file = GGUF([Entry("x", build.ARRAY, Array(build.STRING, [], length=count))], n_metadata=2)
    path.write_bytes(file.header())
    os.truncate(path, (1 << 29) + 4096)
    refused(path, traced=False)  # a million traced integers would take most of the test's time


def test_strings_that_look_like_lengths(tmp_path: Path) -> None:
    # Zeros inside strings make false candidates everywhere, and long strings interrupt the runs.
    rng_tokens = [
        "\0" * 7,
        "\0" * 9,
        "a\0\0\0\0\0\0\0b",
        "z" * 127,
        "z" * 128,
        "\0" * 300,
        "",
        "é" * 64,
        "x\x03",
    ] * 7
    file = tiny_llama(vocab=63).set(TOKENS, build.ARRAY, Array(build.STRING, rng_tokens))
    checkpoint = load_checkpoint(file.write(tmp_path / "good.gguf"))
    assert list(checkpoint.metadata[TOKENS]) == rng_tokens


@pytest.mark.parametrize("kind", ["folder", "fifo", "missing", "empty", "device"])
def test_not_a_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "empty":
        path.touch()
    elif kind == "device":
        path = Path("/dev/zero")
    refused(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "x.ckpt"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)  # opening it would hang
    with pytest.raises(UnsupportedModelError, match="pickle"):
        load_checkpoint(tmp_path / name)


def test_random_damage_never_ends_in_another_error(tmp_path: Path) -> None:
    import random

    data = tiny_llama(n_layers=1, vocab=8).build()
    path = tmp_path / "fuzzed.gguf"
    end = len(tiny_llama(n_layers=1, vocab=8).header())
    rng = random.Random(5)
    loaded = 0
    for _ in range(600):
        mutated = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(end)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        path.write_bytes(mutated)
        try:
            load_checkpoint(path)
            loaded += 1
        except ModelError:
            pass
    assert 0 < loaded < 600  # some damage is harmless (a key nobody reads), most is not

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.engines import GREEDY, drain, request
from fixtures.parrot import make_parrot, parrot_vocab
from fixtures.tiny import tiny_llama
from toque.engine.loader import context_length, kv_blocks, load_engine, valid_vocab
from toque.engine.options import EngineOptions
from toque.errors import ConfigError, ModelError, RequestError
from toque.formats import load_checkpoint

REFERENCE = EngineOptions(backend="reference", max_sequences=4, kv_blocks=16)
MIB = 1 << 20


def test_a_checkpoint_becomes_an_engine() -> None:
    engine = load_engine(tiny_llama(), REFERENCE)
    engine.add(request("r", [1, 2, 3]))
    assert len(drain(engine)["r"].tokens) == GREEDY.max_tokens
    assert engine.stats().kv_blocks_total == 16
    engine.close()


def test_the_context_is_the_models_or_smaller() -> None:
    assert context_length(512, EngineOptions()) == 512
    assert context_length(512, EngineOptions(context_length=100)) == 100
    with pytest.raises(ConfigError, match=r"context_length is 513.* 512"):
        context_length(512, EngineOptions(context_length=513))


def test_a_context_that_the_whole_cache_cannot_hold_is_not_promised() -> None:
    engine = load_engine(tiny_llama(), replace(REFERENCE, kv_blocks=3))
    assert engine.limits.context_length == 96
    with pytest.raises(RequestError, match="context holds 96"):
        engine.add(request("r", [1] * 96))


def test_kv_blocks_fill_what_every_sequence_could_use_within_the_memory() -> None:
    options = EngineOptions(max_sequences=4)
    assert kv_blocks(options, 1000, MIB, 1000 * MIB) == 4 * 32
    assert kv_blocks(options, 1000, MIB, 100 * MIB) == 70
    assert kv_blocks(replace(options, kv_memory_mb=20), 1000, MIB, 1000 * MIB) == 20
    assert kv_blocks(replace(options, kv_blocks=7), 1000, MIB, 0) == 7
    assert kv_blocks(options, 100_000, MIB, None) == 1024  # nobody says how much there is: 1 GiB
    with pytest.raises(ModelError, match="no room for a KV cache"):
        kv_blocks(options, 1000, MIB, MIB)
    with pytest.raises(ModelError, match="kv_memory_mb 1 has no room"):
        kv_blocks(replace(options, kv_memory_mb=1), 1000, 2 * MIB, 1000 * MIB)


def test_the_vocabulary_ends_where_gguf_padding_begins() -> None:
    tokens = [f"t{i}" for i in range(150)]
    checkpoint = replace(tiny_llama(), metadata={"tokenizer.ggml.tokens": tokens})
    assert valid_vocab(checkpoint) == 150
    types = [1] * 140 + [5] * 10
    padded = replace(
        checkpoint, metadata={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    )
    assert valid_vocab(padded) == 140
    assert valid_vocab(tiny_llama()) == 0  # no tokenizer at all


def test_the_vocabulary_of_a_folder_is_its_tokenizers(tmp_path: Path) -> None:
    script = {"a": "b"}
    folder = make_parrot(tmp_path, script, padded_vocab=300)
    assert valid_vocab(load_checkpoint(folder)) == len(parrot_vocab(script)) < 300
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": "?"}}))
    assert valid_vocab(load_checkpoint(folder)) == 0


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ConfigError, match="backend must be one of"):
        load_engine(tiny_llama(), replace(REFERENCE, backend="quantum"))

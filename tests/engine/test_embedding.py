"""Embeddings against transformers: every pooling, from both kinds of files, alone and in batches."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fixtures.encoders import hf_embedding, tiny_bert, write_bert_gguf, write_folder
from fixtures.families import make
from toque.engine.embedding import load_embedding_engine
from toque.engine.options import EngineOptions
from toque.errors import ContextLengthError, FormatError, RequestError, UnsupportedModelError

SIZES = {"max_batch_tokens": 100, "max_sequences": 4}
OPTIONS = EngineOptions(backend="reference", **SIZES)
RANDOM = np.random.default_rng(0)
TEXTS = [[int(token) for token in RANDOM.integers(0, 96, n)] for n in (7, 1, 33, 64, 80, 2, 2, 2, 2, 5)]


def expected(model, texts=TEXTS, pooling="mean", **how):
    return np.stack([hf_embedding(model, ids, pooling, **how) for ids in texts])


@pytest.mark.parametrize(
    ("mode", "pooling"), [("mean_tokens", "mean"), ("cls_token", "cls"), ("lasttoken", "last")]
)
@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_of_a_sentence_transformers_folder_equal_transformers(mode, pooling, normalize, tmp_path):
    model = tiny_bert()
    engine = load_embedding_engine(write_folder(model, tmp_path, pooling=mode, normalize=normalize), OPTIONS)
    assert engine.dimension == 64
    vectors = engine.embed(TEXTS)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(
        vectors, expected(model, pooling=pooling, normalize=normalize), atol=1e-3, rtol=0
    )


def test_a_bare_encoder_folder_means_its_tokens_as_sentence_transformers_does(tmp_path):
    model = tiny_bert(hidden_act="gelu_new", type_vocab_size=1)
    model.save_pretrained(tmp_path)
    vectors = load_embedding_engine(tmp_path, OPTIONS).embed(TEXTS[:3])
    np.testing.assert_allclose(vectors, expected(model, TEXTS[:3], normalize=False), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_vectors_of_a_gguf_file_equal_transformers(number, pooling, tmp_path):
    model = tiny_bert()
    path = write_bert_gguf(model, tmp_path / "model.gguf", pooling=number)
    np.testing.assert_allclose(
        load_embedding_engine(path, OPTIONS).embed(TEXTS), expected(model, pooling=pooling), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("source", ["safetensors", "gguf"])
def test_the_cpu_backend_makes_the_same_vectors(source, tmp_path):
    model = tiny_bert()
    path = (
        write_folder(model, tmp_path)
        if source == "safetensors"
        else write_bert_gguf(model, tmp_path / "m.gguf")
    )
    engine = load_embedding_engine(path, EngineOptions(threads=2, **SIZES))
    np.testing.assert_allclose(engine.embed(TEXTS), expected(model), atol=1e-3, rtol=0)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_vector_is_the_same_bits_in_any_company(backend, tmp_path):
    options = EngineOptions(backend=backend, **SIZES)
    engine = load_embedding_engine(write_folder(tiny_bert(), tmp_path), options)
    together = engine.embed(TEXTS)
    alone = np.concatenate([engine.embed([ids]) for ids in TEXTS])
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(engine.embed(TEXTS[::-1])[::-1], together)
    assert engine.embed([]).shape == (0, 64)


def test_fewer_dimensions_are_the_first_ones_with_length_1(tmp_path):
    engine = load_embedding_engine(write_folder(tiny_bert(), tmp_path), OPTIONS)
    whole, part = engine.embed(TEXTS), engine.embed(TEXTS, dimensions=16)
    assert part.shape == (len(TEXTS), 16)
    cut = whole[:, :16]
    np.testing.assert_allclose(part, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "settings", "error", "param"),
    [
        ([[1], []], {}, RequestError, "input[1]"),
        ([[1] * 81], {}, ContextLengthError, "input[0]"),
        ([[1], [96]], {}, RequestError, "input[1]"),
        ([[-1]], {}, RequestError, "input[0]"),
        ([[1]], {"dimensions": 0}, RequestError, "dimensions"),
        ([[1]], {"dimensions": 65}, RequestError, "dimensions"),
    ],
)
def test_what_cannot_be_embedded_is_named(inputs, settings, error, param, tmp_path):
    engine = load_embedding_engine(write_folder(tiny_bert(), tmp_path), OPTIONS)
    with pytest.raises(error) as caught:
        engine.embed(inputs, **settings)
    assert caught.value.param == param


def test_the_length_that_the_folder_states_bounds_a_text(tmp_path):
    write_folder(tiny_bert(), tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": false}')
    engine = load_embedding_engine(tmp_path, OPTIONS)
    assert engine.context_length == 32
    with pytest.raises(ContextLengthError, match="33 tokens, the model reads at most 32"):
        engine.embed([TEXTS[2]])


def test_a_decoder_makes_embeddings_only_when_told_how_to_pool(tmp_path):
    model = make("qwen3")
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="qwen3 generates text"):
        load_embedding_engine(tmp_path, OPTIONS)
    for pooling in ("mean", "last"):
        engine = load_embedding_engine(tmp_path, OPTIONS, pooling=pooling)
        np.testing.assert_allclose(
            engine.embed(TEXTS[:4]), expected(model.model, TEXTS[:4], pooling), atol=1e-3, rtol=0
        )


def test_a_decoder_folder_that_states_its_pooling_is_an_embedding_model(tmp_path):
    """The form of Qwen3-Embedding."""
    model = make("qwen3", tie_word_embeddings=True)
    engine = load_embedding_engine(write_folder(model, tmp_path, pooling="lasttoken"), OPTIONS)
    np.testing.assert_allclose(engine.embed(TEXTS), expected(model.model, pooling="last"), atol=1e-3, rtol=0)


def _edited(folder, name, change):
    path = folder / name
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "1_Pooling/config.json",
            lambda v: v.update(pooling_mode_cls_token=True),
            "pooling_mode_cls_token, pooling_mode",
        ),
        ("1_Pooling/config.json", lambda v: v.update(pooling_mode_mean_tokens=False), "no pooling mode"),
        (
            "modules.json",
            lambda v: v[2].update(type="sentence_transformers.models.Dense"),
            r"modules\.json\[2\].*Dense",
        ),
        ("modules.json", lambda v: v.pop(1), "Normalize' as step 2"),
        (
            "config.json",
            lambda v: v.update(position_embedding_type="relative_key"),
            "position_embedding_type",
        ),
        ("config.json", lambda v: v.update(hidden_act="relu"), "hidden_act"),
        ("config.json", lambda v: v.update(architectures=["BertForSequenceClassification"]), "cross-encoder"),
        ("config.json", lambda v: v.update(is_decoder=True), "is_decoder"),
    ],
)
def test_a_step_that_is_not_run_is_refused_by_name(name, change, message, tmp_path):
    write_folder(tiny_bert(), tmp_path)
    _edited(tmp_path, name, change)
    with pytest.raises(UnsupportedModelError, match=message):
        load_embedding_engine(tmp_path, OPTIONS)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("modules.json", lambda v: v[1].update(path="../elsewhere"), "not a plain file name"),
        ("modules.json", lambda v: v[1].update(path="gone"), "gone: the folder is missing"),
        ("config.json", lambda v: v.update(max_position_embeddings=81), "position_embeddings"),
        ("config.json", lambda v: v.update(num_hidden_layers=3), r"encoder\.layer\.2\."),
    ],
)
def test_damaged_files_name_what_is_wrong(name, change, message, tmp_path):
    write_folder(tiny_bert(), tmp_path)
    _edited(tmp_path, name, change)
    with pytest.raises(FormatError, match=message):
        load_embedding_engine(tmp_path, OPTIONS)


def test_a_cross_encoder_in_gguf_is_refused(tmp_path):
    path = write_bert_gguf(tiny_bert(), tmp_path / "model.gguf", pooling=4)
    with pytest.raises(UnsupportedModelError, match="pooling_type"):
        load_embedding_engine(path, OPTIONS)


def test_the_first_berts_call_their_norms_gamma_and_beta(tmp_path):
    from safetensors.numpy import load_file, save_file

    model = tiny_bert()
    model.save_pretrained(tmp_path)
    old = {"gamma": "LayerNorm.weight", "beta": "LayerNorm.bias"}
    weights = load_file(tmp_path / "model.safetensors")
    for letter, name in old.items():
        weights = {key.replace(name, f"LayerNorm.{letter}"): value for key, value in weights.items()}
    save_file({f"bert.{name}": value for name, value in weights.items()}, tmp_path / "model.safetensors")
    vectors = load_embedding_engine(tmp_path, OPTIONS).embed(TEXTS[:2])
    np.testing.assert_allclose(vectors, expected(model, TEXTS[:2], normalize=False), atol=1e-3, rtol=0)

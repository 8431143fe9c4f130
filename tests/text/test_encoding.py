"""Encodings equal Hugging Face's, on ten thousand random and adversarial texts per model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from strings import texts

from golden import make_golden
from toque.formats.checkpoint import Checkpoint
from toque.text.tokenizer import Tokenizer

TEXTS = texts(10_000)


def differences(
    tokenizer: Tokenizer, reference: Any, given: list[str]
) -> list[tuple[str, list[str], list[str]]]:
    """Texts that are encoded differently, or decode to something else than the reference decodes to."""
    found = []
    for text in given:
        ids = tokenizer.encode(text, add_special=False)
        expected = reference.encode(text, add_special_tokens=False).ids
        if ids != expected:
            found.append((text, [*map(tokenizer.token_text, ids)], [*map(tokenizer.token_text, expected)]))
        elif tokenizer.decode(ids, skip_special=False) != reference.decode(
            expected, skip_special_tokens=False
        ):
            found.append((text, [tokenizer.decode(ids, skip_special=False)], []))
    return found[:5]


def independent(checkpoint: Checkpoint, pre_tokenizer: Any, normalizer: Any = None) -> tokenizers.Tokenizer:
    """A byte-level tokenizer from a tokenizer.json written here, as the model's own repository describes it."""
    metadata = checkpoint.metadata
    tokens = list(metadata["tokenizer.ggml.tokens"])
    types = list(metadata["tokenizer.ggml.token_type"])
    described = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "special": int(types[index]) == 3,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for index, token in enumerate(tokens)
            if types[index] in (3, 4)
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens) if types[index] != 5},
            "merges": [line.split(" ") for line in metadata["tokenizer.ggml.merges"]],
        },
    }
    return tokenizers.Tokenizer.from_str(json.dumps(described))


def byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def test_smollm2_like_its_published_tokenizer(
    smollm2_checkpoint: Checkpoint, smollm2_tokenizer: Tokenizer
) -> None:
    digits = {"type": "Digits", "individual_digits": True}
    steps = {"type": "Sequence", "pretokenizers": [digits, byte_level(True)]}
    assert differences(smollm2_tokenizer, independent(smollm2_checkpoint, steps), TEXTS) == []


def test_qwen_like_its_published_tokenizer(qwen_checkpoint: Checkpoint, qwen_tokenizer: Tokenizer) -> None:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    steps = {"type": "Sequence", "pretokenizers": [split, byte_level(False)]}
    reference = independent(qwen_checkpoint, steps, normalizer={"type": "NFC"})
    assert differences(qwen_tokenizer, reference, TEXTS) == []


@pytest.mark.parametrize("model", ["smollm2", "qwen", "gemma3"])
def test_like_transformers(model: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(f"{model}_tokenizer")
    golden = json.loads(make_golden.GOLDEN.read_text())[model]
    selected = make_golden.FILES[model][1](TEXTS)
    assert len(selected) > 5000
    made = make_golden.digests([tokenizer.encode(text, add_special=False) for text in selected])
    wrong = [
        index
        for index, (ours, theirs) in enumerate(zip(made, golden["digests"], strict=True))
        if ours != theirs
    ]
    assert wrong == [], f"hundreds of texts that differ; see {make_golden.__file__} --show"
    assert tokenizer.encode("Hello", add_special=True) == golden["with_special"]


def test_merge_order_is_the_files(qwen_tokenizer: Tokenizer) -> None:
    # field case BR-036
    ids = qwen_tokenizer.encode("brutalist", add_special=False)
    assert [qwen_tokenizer.token_text(token) for token in ids] == ["br", "ut", "alist"]


def test_composed_and_decomposed_characters_are_the_same_to_qwen(qwen_tokenizer: Tokenizer) -> None:
    assert qwen_tokenizer.encode("e\u0301", add_special=False) == qwen_tokenizer.encode(
        "\u00e9", add_special=False
    )


def test_digits_stand_alone_where_the_model_cuts_them(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("12345", add_special=False)
    assert [smollm2_tokenizer.token_text(token) for token in ids] == list("12345")


def test_gemma_takes_runs_of_tabs_and_spaces_as_one(gemma3_tokenizer: Tokenizer) -> None:
    ids = gemma3_tokenizer.encode("\t\t\t\t\t\ttest" + " " * 20 + "x", add_special=False)
    assert [gemma3_tokenizer.token_bytes(token) for token in ids] == [b"\t" * 6, b"test", b" " * 20, b"x"]


def test_words_glued_to_an_added_token_are_cut_there(qwen_tokenizer: Tokenizer) -> None:
    ids = qwen_tokenizer.encode("a<tool_call>b", add_special=False)
    assert [qwen_tokenizer.token_text(token) for token in ids] == ["a", "<tool_call>", "b"]
    assert not qwen_tokenizer.is_special(ids[1])
    assert qwen_tokenizer.decode(ids, skip_special=True) == "a<tool_call>b"

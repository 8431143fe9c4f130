"""What a tokenizer promises besides the ids: special tokens, ends, BOS, bytes, bounds, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from toque.errors import FormatError, RequestError, UnsupportedModelError
from toque.formats.checkpoint import Checkpoint
from toque.text.gguf_tokenizer import tokenizer_from_gguf
from toque.text.pre_tokenizers import SPLITTINGS
from toque.text.tokenizer import Tokenizer, load_tokenizer

Metadata = Callable[..., dict[str, Any]]


def test_facts_of_the_real_files(
    smollm2_tokenizer: Tokenizer, qwen_tokenizer: Tokenizer, gemma3_tokenizer: Tokenizer
) -> None:
    smollm2, qwen, gemma3 = smollm2_tokenizer, qwen_tokenizer, gemma3_tokenizer
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.add_bos, set(smollm2.eos_ids)) == (
        49152,
        1,
        False,
        {0, 2},
    )
    # The padding rows of Qwen's embedding are not tokens.
    assert (qwen.vocab_size, qwen.add_bos, set(qwen.eos_ids)) == (151665, False, {151643, 151645})
    assert (gemma3.vocab_size, gemma3.bos_id, gemma3.add_bos, set(gemma3.eos_ids)) == (262144, 2, True, {1})
    assert (smollm2.degraded, qwen.degraded, gemma3.degraded) == (None, None, None)
    assert gemma3.bos_text == "<bos>"
    assert qwen.token_bytes(151900) == b""
    assert qwen.decode([151900, 9707, 10**12, -1]) == "Hello"


def test_bos_once_and_only_where_asked(gemma3_tokenizer: Tokenizer, byte_level_metadata: Metadata) -> None:
    # field case BR-033
    assert gemma3_tokenizer.encode("hi", add_special=True) == [
        2,
        *gemma3_tokenizer.encode("hi", add_special=False),
    ]
    assert gemma3_tokenizer.encode("<bos>hi", add_special=False)[:2] == [
        2,
        gemma3_tokenizer.encode("hi", add_special=False)[0],
    ]
    for flag, pre, expected in (
        (True, "gpt-2", True),
        (False, "llama-bpe", False),
        (None, "gpt-2", False),
        (None, "llama-bpe", True),
    ):
        tokenizer = tokenizer_from_gguf(byte_level_metadata(add_bos_token=flag, pre=pre))
        assert tokenizer.add_bos is expected
        assert (tokenizer.encode("the", add_special=True)[0] == 1) is expected
        assert 1 not in tokenizer.encode("the", add_special=False)


def test_special_tokens_in_the_text_are_ids_and_can_be_left_out(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("a<|im_end|>b", add_special=False)
    assert ids[1] == 2
    assert smollm2_tokenizer.is_special(2)
    assert smollm2_tokenizer.decode(ids) == "ab"
    assert smollm2_tokenizer.decode(ids, skip_special=False) == "a<|im_end|>b"


def test_turn_ends_count_when_the_template_writes_them(byte_level_metadata: Metadata) -> None:
    def ends(template: str | None) -> set[str]:
        metadata = byte_level_metadata()
        metadata["tokenizer.ggml.tokens"] += ["<end_of_turn>", "<|endoftext|>", "<|eot_id|>"]
        metadata["tokenizer.ggml.token_type"] += [3, 3, 3]
        if template is not None:
            metadata["tokenizer.chat_template"] = template
        tokenizer = tokenizer_from_gguf(metadata)
        return {tokenizer.token_text(token) for token in tokenizer.eos_ids}

    assert ends(None) == {"<eos>", "<|endoftext|>"}
    assert ends("{{ messages[0].content }}<end_of_turn>") == {"<eos>", "<|endoftext|>", "<end_of_turn>"}


def test_named_turn_end_ids_count(byte_level_metadata: Metadata) -> None:
    assert tokenizer_from_gguf(byte_level_metadata(eot_token_id=5, eom_token_id=6)).eos_ids == {0, 5, 6}


@pytest.mark.parametrize("pre", [None, "no-such-splitter", "default"])
def test_an_unknown_splitter_is_loud_and_visible(
    pre: str | None, byte_level_metadata: Metadata, caplog: pytest.LogCaptureFixture
) -> None:
    # field case BR-036
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre=pre))
    assert tokenizer.degraded is not None
    assert "tokenizer.ggml.pre" in tokenizer.degraded
    assert "tokenizer.ggml.pre" in caplog.text
    assert tokenizer.decode(tokenizer.encode("the cat", add_special=False)) == "the cat"


def test_a_known_splitter_is_quiet(byte_level_metadata: Metadata, caplog: pytest.LogCaptureFixture) -> None:
    assert tokenizer_from_gguf(byte_level_metadata()).degraded is None
    assert caplog.text == ""


@pytest.mark.parametrize("pre", sorted(SPLITTINGS))
def test_every_splitter_keeps_the_text(pre: str, byte_level_metadata: Metadata) -> None:
    text = "Hello  WORLD's 12345 é中文かな ½!\n\n\t x  "
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre=pre))
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 12345 ok", ["it", "'s", "Ġ12345", "Ġok"]),
        ("smollm", "a 12345", ["a", "Ġ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", "IT'S 12345.\n\nx", ["IT", "'S", "Ġ", "123", "45", ".ĊĊ", "x"]),
        ("qwen2", "IT'S 123", ["IT", "'S", "Ġ", "1", "2", "3"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", "Ġ", "123", "4"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", "Ġ", "1", "2"]),
        ("deepseek-v3", "a12345中文 b", ["a", "123", "45", "中文", "Ġb"]),
        ("deepseek-coder", "ab 12\nc", ["ab", "Ġ", "1", "2", "Ċ", "c"]),
    ],
)
def test_words_are_cut_as_the_family_does(
    pre: str, text: str, words: list[str], byte_level_metadata: Metadata
) -> None:
    from toque.text.byte_alphabet import byte_level_bytes

    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre=pre))
    cut = [word for word, _ in tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [byte_level_bytes(word).decode() for word in cut] == [
        byte_level_bytes(word).decode() for word in words
    ]


def test_a_word_that_is_a_token_wins_where_merges_are_ignored(byte_level_metadata: Metadata) -> None:
    # field case BR-036: "Việt" of Llama 3. Here "cat" is a token that no merge gives.
    words = {"ca": ("c", "a")}
    for pre, expected in (("llama-bpe", ["cat"]), ("gpt-2", ["ca", "t"])):
        metadata = byte_level_metadata(words, pre=pre, add_bos_token=False)
        metadata["tokenizer.ggml.tokens"].append("cat")
        metadata["tokenizer.ggml.token_type"].append(1)
        tokenizer = tokenizer_from_gguf(metadata)
        assert [
            tokenizer.token_text(token) for token in tokenizer.encode("cat", add_special=False)
        ] == expected


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": ["no such"]}, "tokenizer.ggml.merges"),
        ({"merges": [3]}, "tokenizer.ggml.merges"),
        ({"token_type": [1, 2]}, "tokenizer.ggml.token_type"),
        ({"eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id"),
        ({"bos_token_id": "1"}, "tokenizer.ggml.bos_token_id"),
        ({"add_bos_token": 3}, "tokenizer.ggml.add_bos_token"),
        ({"model": "llama"}, "tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [float("nan")] * 262}, "tokenizer.ggml.scores"),
    ],
)
def test_damaged_metadata_is_refused_by_name(
    changes: dict[str, Any], field: str, byte_level_metadata: Metadata
) -> None:
    with pytest.raises(FormatError) as caught:
        tokenizer_from_gguf(byte_level_metadata(**changes))
    assert caught.value.field == field


def test_an_empty_special_token_is_refused(byte_level_metadata: Metadata) -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"][0] = ""
    with pytest.raises(FormatError, match="empty"):
        tokenizer_from_gguf(metadata)


def test_another_kind_of_tokenizer_is_refused(byte_level_metadata: Metadata) -> None:
    with pytest.raises(UnsupportedModelError, match="gpt2, llama and bert"):
        tokenizer_from_gguf(byte_level_metadata(model="rwkv"))
    with pytest.raises(FormatError, match="no tokenizer"):
        load_tokenizer(SimpleNamespace(metadata={}, folder=None, path=Path("/nonexistent")))  # type: ignore[arg-type]


def test_a_lone_surrogate_is_the_callers_error(smollm2_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        smollm2_tokenizer.encode("a\ud800b", add_special=False)


@pytest.mark.parametrize("name", ["smollm2", "qwen", "gemma3"])
def test_long_words_take_linear_time_and_let_others_run(name: str, request: pytest.FixtureRequest) -> None:
    # field case BR-035
    tokenizer: Tokenizer = request.getfixturevalue(f"{name}_tokenizer")
    cjk = "".join(chr(0x4E00 + (i * 7919) % 0x5000) for i in range(100_000))
    for text in ("a" * 200_000, "_" * 200_000, " " * 200_000, "\n" * 50_000, " " * 200_000 + "a", cjk):
        ticks: list[float] = []
        done = threading.Event()

        def tick(ticks: list[float] = ticks, done: threading.Event = done) -> None:
            while not done.wait(0.002):
                ticks.append(time.perf_counter())

        other = threading.Thread(target=tick)
        other.start()
        try:
            wall, begun = time.perf_counter(), time.thread_time()
            ids = tokenizer.encode(text, add_special=False)
            spent, end = time.thread_time() - begun, time.perf_counter()
        finally:
            done.set()
            other.join()
        if end - wall > 0.1:  # the other thread ran in the meantime
            assert sum(wall < at < end for at in ticks) >= 2
        begun = time.thread_time()
        tokenizer.encode(text[: len(text) // 4], add_special=False)
        quarter = time.thread_time() - begun
        assert spent < 2.0
        assert spent < 8 * quarter + 0.1, text[:3]
        assert len(ids) >= tokenizer.at_least_tokens(text)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["smollm2", "qwen", "gemma3"])
def test_the_lower_bound_is_one_and_is_of_use(name: str, request: pytest.FixtureRequest) -> None:
    from strings import texts

    tokenizer: Tokenizer = request.getfixturevalue(f"{name}_tokenizer")
    for text in (*texts(500, seed=3), "e\u0301" * 400, "\u1112\u1161\u11ab" * 300, " " * 5000):
        assert tokenizer.at_least_tokens(text) <= len(tokenizer.encode(text, add_special=False))
    assert tokenizer.at_least_tokens("x" * 10_000_000) > 8192


def test_smollm2_is_built_quickly(smollm2_checkpoint: Checkpoint) -> None:
    seconds = []
    for _ in range(5):
        begun = time.process_time()
        load_tokenizer(smollm2_checkpoint)
        seconds.append(time.process_time() - begun)
    assert min(seconds) < 0.3  # about 0.1 on an idle machine; the bound leaves room for a busy one


def test_importing_costs_no_heavy_library() -> None:
    code = (
        "import sys; import toque.text.tokenizer, toque.text.stream, toque.text.template, toque.text.gguf_tokenizer;"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class TestFolder:
    """tokenizer.json and the files beside it."""

    @staticmethod
    def write(folder: Path, *, added: list[dict[str, Any]] | None = None, **files: Any) -> Path:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers

        from toque.text.byte_alphabet import CHARACTER_OF

        vocab = {CHARACTER_OF[byte]: byte for byte in range(256)}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(
            [AddedToken("<s>", normalized=False), AddedToken("<|im_end|>", normalized=False)]
        )
        described = json.loads(backend.to_str())
        described["added_tokens"] += added or []
        (folder / "tokenizer.json").write_text(json.dumps(described))
        for name, value in files.items():
            (folder / f"{name}.json").write_text(json.dumps(value))
        return folder

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        return load_tokenizer(SimpleNamespace(metadata={}, folder=folder, path=folder))  # type: ignore[arg-type]

    def test_reads_named_tokens_and_lists_of_ends(self, tmp_path: Path) -> None:
        self.write(
            tmp_path,
            tokenizer_config={
                "bos_token": {"content": "<s>"},
                "chat_template": "<|im_end|>",
                "add_bos_token": True,
            },
            special_tokens_map={"eos_token": "<s>"},
            generation_config={"eos_token_id": [3, 4, 10**9]},
        )
        tokenizer = self.load(tmp_path)
        assert (tokenizer.bos_id, tokenizer.bos_text, tokenizer.add_bos) == (256, "<s>", True)
        assert tokenizer.eos_ids == {3, 4, 256, 257}
        assert tokenizer.encode("a", add_special=True) == [256, ord("a")]
        assert tokenizer.encode("a", add_special=False) == [ord("a")]

    def test_refuses_an_empty_added_token(self, tmp_path: Path) -> None:
        # field case BR-035: it would match between any two characters, for ever.
        empty = {
            "id": 258,
            "content": "",
            "special": False,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
        }
        self.write(tmp_path, added=[empty | {"normalized": False}])
        with pytest.raises(FormatError, match=r"added_tokens.2.*empty"):
            self.load(tmp_path)

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", '{"model": 3}', '{"model": {"type": "no"}}', "[" * 100_000]
    )
    def test_refuses_a_damaged_file(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(FormatError, match=r"tokenizer\.json"):
            self.load(tmp_path)

    def test_says_what_to_do_without_one(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModelError, match="save_pretrained"):
            self.load(tmp_path)

    def test_reads_a_real_one_like_the_library(self, smollm2: Path) -> None:
        folder = smollm2.parent / "all-MiniLM-L6-v2"
        reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        reference.no_truncation()
        reference.no_padding()
        tokenizer = self.load(folder)
        text = "A sentence, for WordPiece: naïve tokenization! " * 60
        assert tokenizer.encode(text, add_special=True) == reference.encode(text).ids
        assert len(tokenizer.encode(text, add_special=True)) > 512

"""The PARROT fixture says what it was told to say, on transformers and on the reference backend."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from fixtures.checkpoints import batch_of
from fixtures.hf import hf_checkpoint
from fixtures.parrot import CHAT_TEMPLATE, END, make_parrot, parrot_vocab, script
from toque.backends.base import BackendOptions
from toque.backends.reference import ReferenceBackend
from toque.formats import load_checkpoint
from toque.graph.fuse import fuse
from toque.models import build_graph
from toque.text.tokenizer import load_tokenizer
from toque.types import SamplingParams

SCRIPT = script("go:", [" a", b"\xe6\xad", b"\xaa", " b"])


def greedy(model, prompt, count):
    checkpoint = hf_checkpoint(model)
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors.keys()))
    executable = ReferenceBackend().lower(graph, checkpoint, BackendOptions())
    executable.allocate_kv(4)
    executable.open_slot(0, SamplingParams(temperature=0.0, seed=0), prompt, (), (), 0)
    tokens, position, output = list(prompt), 0, []
    for _ in range(count):
        result = executable.step(batch_of([(tokens, position, [2])], rows=[len(tokens) - 1]))
        position += len(tokens)
        tokens = [int(result.tokens[0])]
        output += tokens
    return output


def test_scripted_answer_is_the_same_on_transformers_and_reference(tmp_path):
    path = make_parrot(tmp_path / "parrot", SCRIPT)
    vocab, tokenizer = parrot_vocab(SCRIPT), AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    prompt = tokenizer("let's go:")["input_ids"]
    expected = [vocab.id(piece) for piece in (" a", b"\xe6\xad", b"\xaa", " b", END)]
    assert greedy(model, prompt, 5) == expected
    assert tokenizer.decode(expected, skip_special_tokens=True) == " a歪 b"
    judged = model.generate(**tokenizer("let's go:", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert judged[0].tolist() == prompt + expected


def test_logits_are_the_scripted_numbers(tmp_path):
    path = make_parrot(tmp_path / "parrot", {"x": {"a": 1.5, "b": -2.0}}, padded_vocab=300)
    model = AutoModelForCausalLM.from_pretrained(path)
    checkpoint = hf_checkpoint(model)
    executable = ReferenceBackend().lower(
        build_graph(checkpoint.config, checkpoint.tensors.keys()), checkpoint, BackendOptions()
    )
    executable.allocate_kv(1)
    logits = executable.logits(batch_of([([ord("x")], 0, [0])]))[0]
    expected = np.zeros(300, np.float32)
    expected[ord("a")], expected[ord("b")] = 1.5, -2.0
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_chat_template_ends_where_the_script_starts(tmp_path):
    path = make_parrot(tmp_path / "parrot", script("\n", ["Hello"]), chat_template=CHAT_TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(path)
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert prompt[-1] == ord("\n")
    assert prompt[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_added_bos_is_the_first_token(tmp_path):
    path = make_parrot(tmp_path / "parrot", SCRIPT, add_bos=True)
    assert AutoTokenizer.from_pretrained(path)("a")["input_ids"] == [parrot_vocab(SCRIPT).id(END), ord("a")]


def test_script_refuses_a_piece_with_two_successors():
    with pytest.raises(ValueError, match="followed by both"):
        script(":", ["a", "b", "a", "c"])


@pytest.mark.parametrize("chat_template", [None, CHAT_TEMPLATE])
def test_toque_reads_what_the_fixture_writes(chat_template, tmp_path):
    path = make_parrot(tmp_path / "parrot", SCRIPT, chat_template=chat_template, padded_vocab=300)
    checkpoint = load_checkpoint(path)
    tokenizer = load_tokenizer(checkpoint)
    vocab = parrot_vocab(SCRIPT)
    assert checkpoint.config.vocab_size == 300
    assert tokenizer.encode("let's go:", add_special=True) == list(b"let's go:")
    assert vocab.id(END) in tokenizer.eos_ids
    answer = [vocab.id(piece) for piece in (" a", b"\xe6\xad", b"\xaa", " b")]
    assert tokenizer.decode(answer) == " a歪 b"
    assert [tokenizer.token_bytes(token) for token in answer] == [b" a", b"\xe6\xad", b"\xaa", b" b"]

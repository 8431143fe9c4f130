"""Perplexity, divergence and agreement, against a plain loop over whole windows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fixtures.checkpoints import prefill_logits
from fixtures.tiny import tiny_llama
from toque.cli.eval import command
from toque.engine.evaluate import documentation, evaluate, lower_for_evaluation
from toque.errors import ConfigError
from toque.formats.quantize import quantize_checkpoint

TEXT = [int(token) for token in np.random.default_rng(5).integers(0, 160, 230)]


def plain(checkpoint, tokens, context, prefix):  # type: ignore[no-untyped-def]
    """Log-probabilities [n, vocab] of every predicted token's position, and those tokens."""
    rows, targets = [], []
    size = context - len(prefix)
    for start in range(0, len(tokens), size):
        window = [*prefix, *tokens[start : start + size]]
        executable = lower_for_evaluation(checkpoint, "reference", context)
        logits = prefill_logits(executable, window).astype(np.float64)
        first = max(len(prefix), 1)
        rows.append(logits[first - 1 : -1])
        targets += window[first:]
    logits = np.concatenate(rows)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), targets


@pytest.mark.parametrize(("context", "prefix"), [(100, []), (100, [7]), (64, []), (300, [1, 2])])
def test_perplexity_is_that_of_a_plain_loop(context: int, prefix: list[int]) -> None:
    checkpoint = tiny_llama()
    logprobs, targets = plain(checkpoint, TEXT, context, prefix)
    found = evaluate(
        lower_for_evaluation(checkpoint, "reference", context), TEXT, context=context, prefix=prefix
    )
    assert found.tokens == len(targets) == len(TEXT) - (0 if prefix else -(-len(TEXT) // context))
    expected = math.exp(-logprobs[np.arange(len(targets)), targets].mean())
    assert found.perplexity == pytest.approx(expected, rel=1e-5)


def test_divergence_and_agreement_are_those_of_a_plain_loop() -> None:
    checkpoint = tiny_llama()
    small = quantize_checkpoint(checkpoint, "int4")
    theirs, _ = plain(checkpoint, TEXT, 100, [7])
    ours, _ = plain(small, TEXT, 100, [7])
    found = evaluate(
        lower_for_evaluation(small, "reference", 100),
        TEXT,
        context=100,
        prefix=[7],
        reference=lower_for_evaluation(checkpoint, "reference", 100),
    )
    assert found.kl == pytest.approx((np.exp(theirs) * (theirs - ours)).sum(axis=1).mean(), rel=1e-4)
    assert found.top1 == pytest.approx((theirs.argmax(axis=1) == ours.argmax(axis=1)).mean())
    assert found.reference_perplexity != found.perplexity


def test_a_model_agrees_with_itself() -> None:
    checkpoint = tiny_llama()
    one, other = (lower_for_evaluation(checkpoint, "reference", 64) for _ in range(2))
    found = evaluate(one, TEXT, context=64, reference=other)
    assert (found.kl, found.top1) == (0.0, 1.0)
    assert found.perplexity == found.reference_perplexity


def test_what_has_nothing_to_predict_is_refused() -> None:
    model = lower_for_evaluation(tiny_llama(), "reference", 64)
    with pytest.raises(ConfigError, match="too short"):
        evaluate(model, [5], context=64)
    with pytest.raises(ConfigError, match="context must be at least 3, got 2"):
        evaluate(model, TEXT, context=2, prefix=[1])


def test_the_standard_library_is_text_enough() -> None:
    text = documentation()
    assert 70_000 < len(text) < 300_000
    assert "\ufffd" not in text


@pytest.mark.model
@pytest.mark.slow
def test_the_cpu_backend_predicts_as_float_does(smollm2: Path, tmp_path: Path) -> None:
    """On the real model, against float32 on the same file.

    Over thousands of tokens perplexity must be within 0.5 %; over these 300 chance alone is 0.4 %.
    """
    (tmp_path / "text.txt").write_text(documentation()[1000:2200])
    done = CliRunner().invoke(
        command,
        [str(smollm2), "--reference", "--text", str(tmp_path / "text.txt"), "--threads", "1", "--json"],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["perplexity"] == pytest.approx(found["reference_perplexity"], rel=0.0125)
    assert found["kl"] < 0.01
    assert found["top1"] > 0.93
    assert 3 < found["perplexity"] < 40

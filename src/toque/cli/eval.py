"""`toque eval`: a model's quality on a text."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import click


@click.command()
@click.argument("model")
@click.option(
    "--text",
    "text_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="UTF-8 text; by default the standard library's documentation.",
)
@click.option(
    "--reference",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[=MODEL]",
    help="Compare with a float run of the same model, or of --reference=MODEL.",
)
@click.option(
    "--tokens", type=click.IntRange(2), default=4096, show_default=True, help="Of the text, at most."
)
@click.option("--context", type=click.IntRange(4), default=512, show_default=True, help="Tokens in a window.")
@click.option("--backend", default="cpu", show_default=True, help="cpu or reference.")
@click.option("--threads", type=click.IntRange(0), default=0, help="0: the CPUs this process may use.")
@click.option("--quantize", default="", help="int8, int4 or fp8: quantize a float model as it is loaded.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model: str,
    text_file: Path | None,
    reference: str | None,
    tokens: int | None,
    context: int,
    backend: str,
    threads: int,
    quantize: str,
    as_json: bool,
) -> None:
    """Measure MODEL's perplexity, and with --reference how far its predictions are from a float run's."""
    from toque.engine.evaluate import documentation, evaluate, lower_for_evaluation
    from toque.formats import load_checkpoint
    from toque.formats.quantize import quantize_checkpoint
    from toque.text.tokenizer import load_tokenizer

    checkpoint = load_checkpoint(_path(model))
    tokenizer = load_tokenizer(checkpoint)
    text = documentation() if text_file is None else text_file.read_text(encoding="utf-8")
    tokens = tokens or (4096 if reference is None else 512)
    ids = tokenizer.encode(text[: tokens * 16], add_special=False)[:tokens]
    context = min(context, checkpoint.config.context_length)
    other = None
    if reference is not None:
        source = load_checkpoint(_path(reference)) if reference else checkpoint
        other = lower_for_evaluation(source, "reference", context)
    small = quantize_checkpoint(checkpoint, quantize) if quantize else checkpoint
    executable = lower_for_evaluation(small, backend, context, threads=threads)
    prefix = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    started = time.perf_counter()
    result = evaluate(executable, ids, context=context, prefix=prefix, reference=other)
    seconds = time.perf_counter() - started
    facts = {
        "model": model,
        "quantization": small.quantization,
        "backend": backend,
        "text": "standard library documentation" if text_file is None else str(text_file),
        "context": context,
        **{key: value for key, value in asdict(result).items() if value is not None},
        "seconds": round(seconds, 2),
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo(f"{model} ({small.quantization}, {backend}): perplexity {result.perplexity:.4f}")
    if result.reference_perplexity is not None:
        change = result.perplexity / result.reference_perplexity - 1
        click.echo(f"reference perplexity {result.reference_perplexity:.4f} ({change:+.2%})")
        click.echo(f"KL divergence {result.kl:.5f} nats, same first choice {result.top1:.2%}")
    click.echo(f"{result.tokens} tokens in windows of {context}, {seconds:.1f} s")


def _path(model: str) -> Path:
    from toque.registry.store import Store

    path = Path(model)
    return path if path.exists() else Store().resolve(model)

"""`toque quantize`: write a smaller copy of a model."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--scheme", required=True, help="int8, int4 or fp8 (folders); int8, int4, q8_0 or q4_0 (GGUF).")
@click.option("--requantize", is_flag=True, help="Accept a model that is quantized already; it loses more.")
def command(source: str, target: Path, scheme: str, requantize: bool) -> None:
    """Quantize the model IN (a GGUF file, a folder with safetensors, or a name in the store) into OUT.

    OUT is a GGUF file when it ends in .gguf, else (from a folder) a folder in compressed-tensors layout; llama.cpp
    and vLLM load them too. Embeddings and the output matrix stay at 8 bits (GGUF) or as they are (folders).
    """
    from toque.formats.convert import quantize_model
    from toque.registry.store import Store
    from toque.text.gguf_export import gguf_tokenizer

    path = Path(source)
    path = path if path.exists() else Store().resolve(source)
    quantize_model(
        path,
        target,
        scheme,
        requantize=requantize,
        tokenizer=lambda checkpoint: gguf_tokenizer(checkpoint.path, checkpoint.config.vocab_size),
    )
    before, after = _size(path), _size(target)
    click.echo(f"{target}: {after / 1e6:.1f} MB, {after / before:.0%} of {path.name}")


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir() if file.suffix == ".safetensors")
    return path.stat().st_size

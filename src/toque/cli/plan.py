"""`toque plan`: what a model will need, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from toque.engine.plan import MachineRates, MemoryPlan
    from toque.formats.checkpoint import Checkpoint

_BENCH_BYTES = 96 << 20  # of weights: more than any cache here holds
_REPEATS = 12  # the best counts: a busy neighbour slows some
_TOKENS = 128  # of a prompt, enough for the kernels' full rate


@click.command()
@click.argument("model")
@click.option("--context-length", type=click.IntRange(0), default=0, help="0: the model's own.")
@click.option("--max-sequences", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--kv-memory-mb", type=click.IntRange(0), default=0, help="Bound of the KV cache; 0: from free memory."
)
@click.option("--kv-dtype", default="auto", show_default=True, help="Of the KV cache: auto or int8.")
@click.option("--threads", type=click.IntRange(0), default=0, help="0: the CPUs this process may use.")
@click.option("--quantize", default="", help="int8, int4 or fp8: as if it were quantized as it is loaded.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model: str,
    context_length: int,
    max_sequences: int,
    kv_memory_mb: int,
    kv_dtype: str,
    threads: int,
    quantize: str,
    as_json: bool,
) -> None:
    """Say what MODEL needs and how fast it should be on this machine, without reading any weight."""
    from toque import _native
    from toque.backends.cpu.machine import usable_cpus
    from toque.engine.loader import context_length as served_context
    from toque.engine.memory import available_bytes
    from toque.engine.options import EngineOptions
    from toque.engine.plan import plan_memory
    from toque.formats import load_checkpoint
    from toque.formats.quantize import quantize_checkpoint
    from toque.registry.store import Store

    path = Path(model)
    checkpoint = load_checkpoint(path if path.exists() else Store().resolve(model))
    if quantize:
        checkpoint = quantize_checkpoint(checkpoint, quantize)
    config = checkpoint.config
    options = EngineOptions(
        context_length=context_length,
        max_sequences=max_sequences,
        kv_memory_mb=kv_memory_mb,
        kv_dtype=kv_dtype,
        threads=threads,
    )
    context = served_context(config.context_length, options)

    def plan_of(model: Checkpoint) -> MemoryPlan:
        return plan_memory(model, options, _native.packed_size, _native.kv_bytes, available_bytes())

    plan, threads = plan_of(checkpoint), threads or usable_cpus()
    rates = measure(threads, plan.kernels)
    contexts = () if config.pooling else tuple(at for at in (128, 2048) if at < context)
    seconds = decode_seconds(checkpoint, plan_of, threads, kv_dtype, contexts) if contexts else {}
    decode = {
        at: round(plan.decode_rate(rates, at) if seconds is None else 1 / seconds[at], 1) for at in contexts
    }
    prefill = round(plan.prefill_rate(rates), 1)
    if as_json:
        facts = {
            "model": model,
            "architecture": config.architecture,
            "parameters": checkpoint.parameters,
            "quantization": checkpoint.quantization,
            "context": context,
            **asdict(plan),
            "enough": plan.enough,
            "bandwidth": round(rates.bandwidth),
            "multiplications_per_second": round(rates.multiplications),
            "decode_tokens_per_second": decode,
            "prefill_tokens_per_second": prefill,
        }
        click.echo(json.dumps(facts, indent=2))
        return
    lines = {
        "model": f"{config.architecture}, {checkpoint.parameters / 1e6:,.0f} million parameters, "
        f"{checkpoint.quantization}, context {context}",
        "weights": f"{_mb(plan.weight_bytes)} packed ({_mb(plan.file_bytes)} in the file)",
        "workspace": f"about {_mb(plan.workspace_bytes)}",
        "KV cache": ""
        if config.pooling
        else f"{plan.kv_per_token / 1024:.1f} KiB per token"
        + (f", up to {_mb(plan.kv_bytes)}" if plan.kv_bytes is not None else ""),
        "memory": "unknown" if plan.available is None else f"{_mb(plan.available)} available",
        "fits": ""
        if config.pooling
        else ", ".join(f"{fit.sequences} x {fit.context}" for fit in plan.fits) + " (sequences x tokens)",
        "decode": ", ".join(f"{rate:,} tokens/s at context {at}" for at, rate in decode.items()),
        "prefill": f"{prefill:,} tokens/s",
        "measured": f"{rates.bandwidth / 1e9:.1f} GB/s of weights, {rates.multiplications / 1e9:.0f} GMAC/s",
    }
    for key, value in lines.items():
        if value:
            click.echo(f"{key + ':':<11}{value}")
    if plan.enough is False:
        click.echo("This machine has not enough memory for it.", err=True)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def decode_seconds(
    checkpoint: Checkpoint,
    plan_of: Callable[[Checkpoint], MemoryPlan],
    threads: int,
    kv_dtype: str,
    contexts: Sequence[int],
) -> dict[int, float] | None:
    """See `toque.engine.rehearsal.expected_seconds`. It takes about a second, of the largest models some ten."""
    from toque.backends.base import BackendOptions
    from toque.backends.cpu import CpuBackend
    from toque.engine.rehearsal import expected_seconds

    options = BackendOptions(threads, max_batch_tokens=1, max_sequences=1, kv_dtype=kv_dtype)
    return expected_seconds(checkpoint, plan_of, CpuBackend(), options, contexts)


def measure(threads: int, kind: str) -> MachineRates:
    """Read many matrices of a GGML type with one token, and multiply some with many tokens: about a second."""
    import numpy as np

    from toque import _native
    from toque.engine.plan import MachineRates
    from toque.formats.blocks import BY_NAME

    rows, columns = 1024, 2048
    raw = np.zeros(
        (rows, BY_NAME[kind].row_bytes(columns)), np.uint8
    )  # zeros take as long as any other weights
    size = _native.packed_size(kind, rows, columns)
    count = _BENCH_BYTES // size
    arena = _native.Arena(count * (size + 64))
    weights = [_native.pack(arena, kind, raw, columns) for _ in range(count)]
    isa = _native.resolve_isa("")
    one, many = np.ones((1, columns), np.float32), np.ones((_TOKENS, columns), np.float32)
    reading = _native.time_linear(isa, weights, one, threads=threads, repeats=_REPEATS)
    multiplying = _native.time_linear(isa, weights[:4], many, threads=threads, repeats=_REPEATS)
    return MachineRates(count * size / reading, 4 * rows * columns * _TOKENS / multiplying)

"""`toque serve`: one gateway, and a replica process for each model, over the OpenAI API."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import click


@click.command()
@click.argument("models", nargs=-1)
@click.option(
    "--config", "config_file", type=click.Path(dir_okay=False, path_type=Path), help="YAML settings."
)
@click.option("--host", default=None, help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, default=None, help="Port; 0 takes any free one.  [default: 8000]")
@click.option("--api-key", "api_keys", multiple=True, help="A key that clients must send; may be repeated.")
@click.option("--insecure", is_flag=True, default=None, help="Listen beyond loopback without any key.")
@click.option("--cors-origin", "cors_origins", multiple=True, help="Browser origin that may call; * for all.")
@click.option("--grace", type=float, default=None, help="Seconds open streams may finish in after SIGTERM.")
@click.option("--max-queued-requests", type=int, default=None, help="More than these wait: 429.")
@click.option("--backend", default=None, help="cpu or reference.  [default: cpu]")
@click.option("--threads", type=int, default=None, help="0: the CPUs this process may use.")
@click.option("--isa", default=None, help="Force an instruction set, such as avx2; also TOQUE_ISA.")
@click.option("--context-length", type=int, default=None, help="0: the model's own.")
@click.option("--kv-memory-mb", type=int, default=None, help="Bound of the KV cache; 0: from free memory.")
@click.option(
    "--kv-dtype", default=None, help="KV cache: auto (16 bits a number) or int8 (half).  [default: auto]"
)
@click.option("--max-batch-tokens", type=int, default=None, help="Most tokens in one engine step.")
@click.option("--max-sequences", type=int, default=None, help="Most requests that run at once.")
@click.option(
    "--step-target-ms", type=float, default=None, help="A step stays under this while streams decode."
)
@click.option("--prefix-cache/--no-prefix-cache", default=None, help="Share KV blocks of equal beginnings.")
@click.option("--quantize", default=None, help="int8, int4 or fp8: quantize a float model as it is loaded.")
@click.option(
    "--speculate",
    default=None,
    help="ngram[:K] or draft=PATH[:K]: guess tokens ahead; the text stays the same.",
)
@click.option(
    "--tool-parser",
    default=None,
    help="hermes, llama3, pythonic, mistral, gemma or qwen3-coder; else by template.",
)
@click.option("--tenant-weights", default=None, help="Shares when tenants compete, such as a=2,b=0.5.")
@click.option(
    "--gateway-only", is_flag=True, help="Serve the registry's fleet and leave leading it to others."
)
@click.option("--log-level", default=None, help="debug, info, warning or error.")
@click.option("--metrics-compat", default=None, help="vllm: /metrics under vLLM's names, too.")
@click.option("--log-format", default=None, help="text, or json: an object a line.  [default: text]")
def command(
    models: tuple[str, ...],
    config_file: Path | None,
    host: str | None,
    port: int | None,
    api_keys: tuple[str, ...],
    insecure: bool | None,
    cors_origins: tuple[str, ...],
    grace: float | None,
    max_queued_requests: int | None,
    backend: str | None,
    threads: int | None,
    isa: str | None,
    context_length: int | None,
    kv_memory_mb: int | None,
    kv_dtype: str | None,
    max_batch_tokens: int | None,
    max_sequences: int | None,
    step_target_ms: float | None,
    prefix_cache: bool | None,
    quantize: str | None,
    speculate: str | None,
    tool_parser: str | None,
    tenant_weights: str | None,
    gateway_only: bool,
    log_level: str | None,
    metrics_compat: str | None,
    log_format: str | None,
) -> None:
    """Serve MODELS (catalog names, GGUF files, folders, or sources such as hf:org/repo) over the OpenAI API.

    Without MODELS it serves the fleet of the registry: what `toque deploy` and the deployments of --config say. That
    fleet outlives this server, and others may serve it beside.

    Every option is also a setting: --kv-memory-mb is engine.kv_memory_mb in YAML and TOQUE_ENGINE_KV_MEMORY_MB in the
    environment. Flags win over the environment, that over the file.
    """
    from toque.cli.progress_bar import progress_bar
    from toque.config import load_settings
    from toque.gateway.serve import serve

    settings = load_settings(
        {
            "server.host": host,
            "server.port": port,
            "server.insecure": insecure,
            "server.cors_origins": cors_origins or None,
            "server.grace_s": grace,
            "server.log_level": log_level,
            "server.metrics_compat": metrics_compat,
            "server.log_format": log_format,
            "auth.api_keys": api_keys or None,
            "limits.max_queued_requests": max_queued_requests,
            "engine.backend": backend,
            "engine.threads": threads,
            "engine.isa": isa,
            "engine.context_length": context_length,
            "engine.kv_memory_mb": kv_memory_mb,
            "engine.kv_dtype": kv_dtype,
            "engine.max_batch_tokens": max_batch_tokens,
            "engine.max_sequences": max_sequences,
            "engine.step_target_ms": step_target_ms,
            "engine.prefix_cache": prefix_cache,
            "engine.tenant_weights": tenant_weights,
            "engine.quantize": quantize,
            "engine.speculate": speculate,
            "fleet.tool_parser": tool_parser,
            "models": models or None,
        },
        file=config_file,
    )
    drawn = partial(progress_bar, enabled=True) if sys.stderr.isatty() else None
    serve(settings.models, settings, drawn, control=not gateway_only)

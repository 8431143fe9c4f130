"""From a model file to a running engine."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toque.backends.base import BLOCK_SIZE, BackendOptions
from toque.engine.engine import Engine
from toque.engine.grammars import Grammars
from toque.engine.memory import available_bytes
from toque.engine.options import EngineOptions
from toque.errors import ConfigError, ModelError, UnsupportedModelError
from toque.text.grammar.compiler import Compiler

if TYPE_CHECKING:
    from toque.formats.checkpoint import Checkpoint

KV_SHARE = 0.7  # of the memory that is left once the weights are loaded
SCORED_ROWS = 128  # rows of logits a step can hold at least, so that scoring a prompt takes few steps
_MAX_TOKENIZER_JSON = 256 << 20
_UNUSED = 5  # GGUF token type of the padding at the end of a vocabulary


def load_engine(model: Path | str | Checkpoint, options: EngineOptions | None = None) -> Engine:
    """Read, lower and size a model. Raises ModelError for files that cannot be used, ConfigError for bad settings."""
    from toque.backends import load_backend
    from toque.formats.checkpoint import Checkpoint
    from toque.graph.fuse import fuse
    from toque.models import build_graph
    from toque.text.tokenizer import load_tokenizer

    began = time.perf_counter()
    options = options or EngineOptions()
    if isinstance(model, Checkpoint):
        checkpoint = model
    else:
        from toque.formats import load_checkpoint

        checkpoint = load_checkpoint(Path(model))
    if options.quantize:
        from toque.formats.quantize import quantize_checkpoint

        checkpoint = quantize_checkpoint(checkpoint, options.quantize)
    config = checkpoint.config
    if config.pooling:
        raise UnsupportedModelError(f"{checkpoint.path.name} was made for embeddings and generates no text")
    context = context_length(config.context_length, options)
    backend = load_backend(options.backend)
    max_rows = max(options.max_sequences, SCORED_ROWS)
    valid = valid_vocab(checkpoint)
    grammars = Compiler(lambda: load_tokenizer(checkpoint), config.vocab_size)
    executable = backend.lower(
        fuse(build_graph(replace(config, context_length=context), checkpoint.tensors.keys())),
        checkpoint,
        BackendOptions(
            threads=options.threads,
            isa=options.isa,
            max_batch_tokens=options.max_batch_tokens,
            max_sequences=max_rows,
            kv_dtype=options.kv_dtype,
            valid_vocab=valid,
        ),
    )
    draft = None
    speculation = options.speculation
    if speculation is not None:
        from toque.engine.speculate.load import load_draft, make_speculator

        draft = load_draft(speculation, checkpoint, options, context=context, valid=valid, slots=max_rows)
    # A draft model keeps as many blocks of its own as the model it drafts for.
    block_bytes = executable.kv_bytes_per_block + (draft.executable.kv_bytes_per_block if draft else 0)
    blocks = kv_blocks(options, context, block_bytes, available_bytes())
    executable.allocate_kv(blocks)
    # A context that the whole cache cannot hold would be promised in vain.
    context = min(context, blocks * BLOCK_SIZE)
    engine = Engine(
        executable,
        options,
        context_length=context,
        n_blocks=blocks,
        max_rows=max_rows,
        valid_vocab=valid,
        identity=str(checkpoint.path),
        grammars=Grammars(grammars.compile, grammars.warm),
        speculator=make_speculator(speculation, draft, options, blocks=blocks) if speculation else None,
    )
    engine.load_seconds = time.perf_counter() - began
    return engine


def context_length(trained: int, options: EngineOptions) -> int:
    """The context to serve. Raises ConfigError when more is asked for than the model was trained for."""
    if options.context_length > trained:
        raise ConfigError(
            f"context_length is {options.context_length}, but the model was made for at most {trained} tokens",
            param="context_length",
        )
    return options.context_length or trained


def kv_blocks(options: EngineOptions, context: int, bytes_per_block: int, available: int | None) -> int:
    """How many KV blocks to reserve: all that every sequence could ever fill, within the memory bound.

    ``available`` bytes is what the process may still use (None: unknown). Raises ModelError when not one block fits.
    """
    if options.kv_blocks:
        return options.kv_blocks
    most = options.max_sequences * -(-context // BLOCK_SIZE)
    if options.kv_memory_mb:
        budget, source = options.kv_memory_mb << 20, f"kv_memory_mb {options.kv_memory_mb}"
    elif available is not None:
        budget, source = int(available * KV_SHARE), f"{available >> 20} MiB of available memory"
    else:
        budget, source = 1 << 30, "an unknown amount of memory"
    blocks = min(most, budget // bytes_per_block)
    if blocks < 1:
        raise ModelError(
            f"{source} has no room for a KV cache: one block of {BLOCK_SIZE} tokens takes {bytes_per_block} bytes"
        )
    return blocks


def valid_vocab(checkpoint: Checkpoint) -> int:
    """Ids the tokenizer can name; above it are padded rows of the head that must never be sampled. 0: unknown."""
    tokens = checkpoint.metadata.get("tokenizer.ggml.tokens")
    if tokens is not None:
        types = checkpoint.metadata.get("tokenizer.ggml.token_type")
        count = len(tokens)
        if types is not None and len(types) == count:
            while count > 1 and types[count - 1] == _UNUSED:
                count -= 1
        return min(count, checkpoint.config.vocab_size)
    if checkpoint.folder is not None:
        return min(_tokenizer_json_size(checkpoint.folder / "tokenizer.json"), checkpoint.config.vocab_size)
    return 0


def _tokenizer_json_size(path: Path) -> int:
    """The largest id of a ``tokenizer.json`` plus one; 0 when there is none, or it does not say."""
    from toque.text.hf_files import read_json

    data = read_json(path, _MAX_TOKENIZER_JSON)
    model, added = data.get("model"), data.get("added_tokens")
    vocab: Any = model.get("vocab") if isinstance(model, dict) else None
    ids: list[Any] = []
    if isinstance(vocab, dict):
        ids += vocab.values()
    elif isinstance(vocab, list):  # unigram: a list of (text, score)
        ids.append(len(vocab) - 1)
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
    return max((number for number in ids if isinstance(number, int)), default=-1) + 1

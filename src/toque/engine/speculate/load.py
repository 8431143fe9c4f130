"""From the setting to a speculator: reads and checks the draft model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from toque.backends.base import BLOCK_SIZE, BackendOptions, Executable
from toque.engine.speculate.draft import DraftProposer
from toque.engine.speculate.ngram import NgramProposer
from toque.engine.speculate.settings import Speculation
from toque.engine.speculate.speculator import Speculator
from toque.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from toque.engine.options import EngineOptions
    from toque.formats.checkpoint import Checkpoint


class DraftModel:
    """A draft model's executable, before it is known how many KV blocks it may have."""

    def __init__(self, executable: Executable, context_length: int) -> None:
        self.executable = executable
        self.context_length = context_length


def load_draft(
    speculation: Speculation,
    target: Checkpoint,
    options: EngineOptions,
    *,
    context: int,
    valid: int,
    slots: int,
) -> DraftModel | None:
    """The draft model for a target that serves ``context`` tokens; None where the setting names none.

    ``valid`` ids of the target can be sampled (0: all). Raises ConfigError for a model of another vocabulary, and what
    `load_checkpoint` raises.
    """
    if speculation.draft is None:
        return None
    from toque.backends import load_backend
    from toque.formats import load_checkpoint
    from toque.graph.fuse import fuse
    from toque.models import build_graph

    checkpoint = load_checkpoint(speculation.draft)
    if checkpoint.config.pooling:
        raise UnsupportedModelError(f"{checkpoint.path.name} was made for embeddings and drafts no text")
    _check_vocabulary(checkpoint, target)
    config = checkpoint.config
    context = min(context, config.context_length)
    executable = load_backend(options.backend).lower(
        fuse(build_graph(replace(config, context_length=context), checkpoint.tensors.keys())),
        checkpoint,
        BackendOptions(
            threads=options.threads,
            isa=options.isa,
            max_batch_tokens=options.max_batch_tokens,
            max_sequences=slots,
            kv_dtype=options.kv_dtype,
            valid_vocab=min(valid or target.config.vocab_size, config.vocab_size),
        ),
    )
    return DraftModel(executable, context)


def make_speculator(
    speculation: Speculation, draft: DraftModel | None, options: EngineOptions, *, blocks: int
) -> Speculator:
    """``blocks`` of KV are allocated for the draft model."""
    if draft is None:
        return Speculator(NgramProposer(), speculation.most)
    draft.executable.allocate_kv(blocks)
    proposer = DraftProposer(
        draft.executable,
        n_blocks=blocks,
        context_length=min(draft.context_length, blocks * BLOCK_SIZE),
        max_tokens=options.max_batch_tokens,
        max_sequences=options.max_sequences,
    )
    return Speculator(proposer, speculation.most)


def _check_vocabulary(draft: Checkpoint, target: Checkpoint) -> None:
    """Token ids must mean the same text in both models."""
    from toque.text.tokenizer import load_tokenizer

    ours, theirs = load_tokenizer(draft), load_tokenizer(target)
    if ours.vocab_size == theirs.vocab_size and ours.eos_ids == theirs.eos_ids:
        differs = (t for t in range(ours.vocab_size) if ours.token_bytes(t) != theirs.token_bytes(t))
        if (token := next(differs, None)) is None:
            return
        why = f"token {token} is {ours.token_text(token)!r} in one and {theirs.token_text(token)!r} in the other"
    elif ours.vocab_size != theirs.vocab_size:
        why = f"{ours.vocab_size} tokens in one and {theirs.vocab_size} in the other"
    else:
        why = f"an answer ends with {sorted(ours.eos_ids)} in one and {sorted(theirs.eos_ids)} in the other"
    raise ConfigError(
        f"speculate needs a draft model of the same vocabulary as {target.path.name}, {draft.path.name} has another:"
        f" {why}",
        param="speculate",
    )

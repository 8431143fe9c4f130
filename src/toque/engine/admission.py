"""What an engine refuses before it queues it: requests that can never be served as they are."""

from __future__ import annotations

from dataclasses import dataclass

from toque.errors import ContextLengthError, RequestError
from toque.types import EngineRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in tokens. Ids from ``valid_vocab`` up to ``vocab_size`` are padding: readable, never generated."""

    context_length: int
    kv_tokens: int
    vocab_size: int
    valid_vocab: int


def check_request(request: EngineRequest, limits: Limits) -> int:
    """The number of tokens to generate at most, cut to what the context has room for.

    Raises ContextLengthError when the prompt and one token more do not fit the context, RequestError naming the field
    for ids that do not exist, an empty prompt, a beginning that is already the whole answer, or a total that the
    whole KV cache cannot hold.
    """
    prompt, sampling = request.prompt, request.sampling
    if not prompt:
        raise RequestError("the prompt has no tokens", param="prompt")
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise RequestError(
            f"the prompt has token id {wrong}, the model knows 0 to {limits.vocab_size - 1}", param="prompt"
        )
    if request.generated and not (min(request.generated) >= 0 and max(request.generated) < limits.vocab_size):
        raise RequestError(
            f"generated holds an id that is not between 0 and {limits.vocab_size - 1}", param="generated"
        )
    for token, _ in sampling.logit_bias:
        if token >= limits.valid_vocab:
            raise RequestError(
                f"logit_bias names token id {token}, the model knows 0 to {limits.valid_vocab - 1}",
                param="logit_bias",
            )
    for token in sampling.stop_token_ids:
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"stop_token_ids names token id {token}, the model knows 0 to {limits.vocab_size - 1}",
                param="stop_token_ids",
            )
    room = limits.context_length - len(prompt)
    if room < (0 if sampling.max_tokens == 0 else 1):
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens and the context holds {limits.context_length}"
            " tokens, prompt and answer together: shorten the prompt",
            param="prompt",
        )
    if sampling.max_tokens is None:
        # Without a limit the answer may be as long as fits; the last token is never written to the KV cache.
        new_tokens = min(room, max(limits.kv_tokens - len(prompt) + 1, 1))
    else:
        new_tokens = min(room, sampling.max_tokens)
    written = len(prompt) + new_tokens - 1
    if written > limits.kv_tokens:
        raise RequestError(
            f"the request needs room for {written} tokens ({len(prompt)} of prompt, {new_tokens} to generate) and the"
            f" whole KV cache holds {limits.kv_tokens}: lower max_tokens or give the engine more KV memory",
            param="max_tokens" if len(prompt) <= limits.kv_tokens else "prompt",
        )
    if request.generated and len(request.generated) >= new_tokens:
        raise RequestError(
            f"{len(request.generated)} tokens of the answer are given and it has {new_tokens} at most: it is complete",
            param="generated",
        )
    return new_tokens

"""The nouns that several layers share. Values only: no I/O, no clocks, no behaviour beyond validation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

from toque.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-text or stop token, or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the client left
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary scaling as the checkpoint states it. ``kind`` is ``linear``, ``llama3``, ``yarn`` or ``longrope``.

    ``long_factors`` and ``short_factors`` are longrope's: a divisor for each frequency, for models that serve more than
    ``original_context`` tokens, and for others.
    """

    kind: str
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    long_factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """An architecture's hyper-parameters, the same whichever file format they came from.

    ``architecture`` uses GGUF's spelling (``llama``, ``qwen2``, ``gemma3`` …). Sizes are in elements.
    """

    architecture: str
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_dim: int = 0  # 0: the whole head
    rope_scaling: RopeScaling | None = None
    rope_local_theta: float = 0.0  # gemma3's sliding-window layers
    sliding_window: int = 0
    sliding_window_pattern: int = 0  # every n-th layer is global (gemma3: 6)
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    attention_scale: float = 0.0  # 0: 1/sqrt(head_dim)
    embedding_scale: float = 1.0
    hidden_act: str = "silu"
    tied_embeddings: bool = False
    n_experts: int = 0
    n_experts_used: int = 0
    expert_ffn_size: int = 0  # 0: ffn_size
    norm_expert_weights: bool = True  # the weights of a token's experts are made to sum to 1
    n_positions: int = 0  # rows of a table of learned positions; 0: rotary
    n_token_types: int = 0
    pooling: str = ""  # "mean", "cls" or "last": the model makes an embedding; "": it generates text
    normalize_embeddings: bool = True
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when to stop. Invalid values raise :class:`RequestError` naming the field.

    ``temperature`` 0 is greedy; ``top_k`` 0 or -1, ``top_p`` 1, ``min_p`` 0 are off. ``logprobs`` is the number of
    alternatives reported with each token (None: no logprobs, 0: the sampled token's only). ``prompt_logprobs`` asks
    the same for the prompt's tokens. Logprobs are those of the model, before penalties and temperature.
    ``presence_penalty`` and ``frequency_penalty`` count generated tokens only; ``repetition_penalty`` counts the
    prompt too, as in Hugging Face transformers.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None  # None: until the context is full
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 2.0)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _int_in_range("top_k", self.top_k, -1, 2**31 - 1)
        if self.seed is not None:
            _int_in_range("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _int_in_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _int_in_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.max_tokens is not None:
            _int_in_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _int_in_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}",
                param="stop_token_ids",
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, got {len(self.logit_bias)}",
                param="logit_bias",
            )
        for pair in self.logit_bias:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise RequestError(
                    f"logit_bias takes (token id, bias) pairs, got {_brief_any(pair)}; of a dict, its items()",
                    param="logit_bias",
                )
            token, bias = pair
            _int_in_range("logit_bias", token, 0, 2**31 - 1)
            _in_range("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        # Below this, dividing by the temperature only loses precision: every such request is greedy in effect.
        return self.temperature < 1e-4


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {type(value).__name__}", param=name)
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} must be between {low:g} and {high:g}, got {_brief(value)}", param=name)


def _int_in_range(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {type(value).__name__}", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, got {_brief(value)}", param=name)


def _brief(value: float) -> str:
    return _brief_any(value)


def _brief_any(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 24 else text[:21] + "..."


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position's logprobs: the token, its logprob and rank-ordered alternatives ``(token, logprob)``."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What an engine accepts: token ids and parameters that are already checked against the model.

    ``tenant`` and ``cache_salt`` separate prefix caches; ``priority`` orders the queue (lower first).
    ``stop_token_ids`` in ``sampling`` already include the model's end-of-text ids unless ``ignore_eos``. ``generated``
    are the first tokens of the answer, where another engine has begun it: what follows is what that one would have
    given (of a request without a seed, what it might have). ``max_tokens`` and ``min_tokens`` count them too.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    deadline: float | None = None  # seconds since the epoch
    grammar: str | None = None  # what the answer must match: an encoded toque.text.grammar.spec.GrammarSpec
    generated: tuple[int, ...] = ()


class StepEventKind(IntEnum):
    SCHEDULED = 1  # given a place in the engine; tokens: those of them that the prefix cache had
    PREFILL = 2  # a step computed so many tokens of the prompt
    PREEMPTED = 3  # put back into the queue, its tokens known but not computed


class StepEvent(NamedTuple):
    """Something that became of a request inside its engine, ``at_us`` microseconds after the engine had got it."""

    kind: StepEventKind
    at_us: int
    tokens: int
    step: int


@dataclass(slots=True)
class SequenceOutput:
    """What one engine step added to one request. The fold of these is the whole answer."""

    request_id: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the id that ended it; it is the last of `tokens`
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; set on the first output
    prompt_logprobs: list[TokenLogprob | None] | None = None  # entry 0 is None; on the first output
    error: str | None = None
    error_code: str | None = None  # the `code` of the error class it stands for, e.g. "deadline_exceeded"
    queue_seconds: float = 0.0  # from arrival at the engine to the first step; on the first output
    embedding: bytes | None = None  # of a model that makes embeddings: its vector, little-endian float32
    device_us: int = 0  # device time attributed to the request since its previous output, in microseconds
    events: list[StepEvent] | None = None  # since its previous output; steps that only decode have none


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine, cheap enough to take every step. Counters only grow while the process lives."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_hits: int = 0  # tokens
    prefix_queries: int = 0  # tokens
    tokens_per_second: float = 0.0
    step_seconds: float = 0.0  # total time spent inside steps
    device_seconds: float = 0.0  # the part of it in which the device computed; requests carry all of it
    load_seconds: float = 0.0  # what loading took
    up_seconds: float = 0.0  # since loading began
    drafted_tokens: int = 0  # guesses that steps verified
    accepted_tokens: int = 0  # of those, how many came true: tokens without a step of their own
    schedule_seconds: float = 0.0  # the part of step_seconds before the device began: planning
    cpu_seconds: float = 0.0  # of the replica's process, all its threads
    memory_bytes: int = 0  # resident, of the replica's process


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a gateway needs to know of a served model without loading its weights."""

    name: str
    architecture: str
    parameters: int
    quantization: str
    context_length: int
    vocab_size: int
    digest: str = ""
    created: int = 0
    embedding_size: int = 0  # numbers in a vector of a model that makes embeddings; 0: it generates text

from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_UNSPECIFIED: _ClassVar[State]
    STATE_STARTING: _ClassVar[State]
    STATE_READY: _ClassVar[State]
    STATE_DEGRADED: _ClassVar[State]
    STATE_DRAINING: _ClassVar[State]
    STATE_DEAD: _ClassVar[State]

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_NONE: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]
    FINISH_ABORT: _ClassVar[Finish]
    FINISH_ERROR: _ClassVar[Finish]
STATE_UNSPECIFIED: State
STATE_STARTING: State
STATE_READY: State
STATE_DEGRADED: State
STATE_DRAINING: State
STATE_DEAD: State
FINISH_NONE: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish
FINISH_ABORT: Finish
FINISH_ERROR: Finish

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Description(_message.Message):
    __slots__ = ("protocol", "name", "pid", "state", "reason", "model", "max_sequences")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    name: str
    pid: int
    state: State
    reason: str
    model: Model
    max_sequences: int
    def __init__(self, protocol: _Optional[int] = ..., name: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[_Union[State, str]] = ..., reason: _Optional[str] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., max_sequences: _Optional[int] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("architecture", "parameters", "quantization", "context_length", "vocab_size", "digest")
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    architecture: str
    parameters: int
    quantization: str
    context_length: int
    vocab_size: int
    digest: str
    def __init__(self, architecture: _Optional[str] = ..., parameters: _Optional[int] = ..., quantization: _Optional[str] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class ClientMessage(_message.Message):
    __slots__ = ("hello", "submit", "abort", "drain")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    abort: Abort
    drain: Drain
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "client")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    client: str
    def __init__(self, protocol: _Optional[int] = ..., client: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request_id", "prompt", "sampling", "tenant", "cache_salt", "priority", "deadline", "grammar", "generated")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    prompt: bytes
    sampling: Sampling
    tenant: str
    cache_salt: str
    priority: int
    deadline: float
    grammar: str
    generated: bytes
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., deadline: _Optional[float] = ..., grammar: _Optional[str] = ..., generated: _Optional[bytes] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_tokens", "bias_values", "seed", "logprobs", "prompt_logprobs", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_tokens: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    seed: int
    logprobs: int
    prompt_logprobs: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_tokens: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("handles",)
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("description", "step", "stats", "error")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    description: Description
    step: StepOutputs
    stats: Stats
    error: RequestError
    def __init__(self, description: _Optional[_Union[Description, _Mapping]] = ..., step: _Optional[_Union[StepOutputs, _Mapping]] = ..., stats: _Optional[_Union[Stats, _Mapping]] = ..., error: _Optional[_Union[RequestError, _Mapping]] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("handles", "counts", "tokens", "details", "device_us")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_US_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    counts: bytes
    tokens: bytes
    details: _containers.RepeatedCompositeFieldContainer[Detail]
    device_us: bytes
    def __init__(self, handles: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., details: _Optional[_Iterable[_Union[Detail, _Mapping]]] = ..., device_us: _Optional[bytes] = ...) -> None: ...

class Detail(_message.Message):
    __slots__ = ("index", "finish", "stop_token", "cached_tokens", "logprobs", "prompt_logprobs", "error", "error_code", "queue_seconds", "embedding", "events")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    finish: Finish
    stop_token: int
    cached_tokens: int
    logprobs: Logprobs
    prompt_logprobs: Logprobs
    error: str
    error_code: str
    queue_seconds: float
    embedding: bytes
    events: bytes
    def __init__(self, index: _Optional[int] = ..., finish: _Optional[_Union[Finish, str]] = ..., stop_token: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., error: _Optional[str] = ..., error_code: _Optional[str] = ..., queue_seconds: _Optional[float] = ..., embedding: _Optional[bytes] = ..., events: _Optional[bytes] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("tokens", "values", "top_counts", "top_tokens", "top_values")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_VALUES_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    top_counts: _containers.RepeatedScalarFieldContainer[int]
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ..., top_counts: _Optional[_Iterable[int]] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_values: _Optional[_Iterable[float]] = ...) -> None: ...

class Stats(_message.Message):
    __slots__ = ("running", "waiting", "queued_tokens", "kv_blocks_used", "kv_blocks_total", "steps", "prompt_tokens", "generated_tokens", "preemptions", "prefix_hits", "prefix_queries", "tokens_per_second", "step_seconds", "device_seconds", "load_seconds", "up_seconds", "drafted_tokens", "accepted_tokens", "schedule_seconds", "cpu_seconds", "memory_bytes")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    queued_tokens: int
    kv_blocks_used: int
    kv_blocks_total: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    prefix_hits: int
    prefix_queries: int
    tokens_per_second: float
    step_seconds: float
    device_seconds: float
    load_seconds: float
    up_seconds: float
    drafted_tokens: int
    accepted_tokens: int
    schedule_seconds: float
    cpu_seconds: float
    memory_bytes: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., steps: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., step_seconds: _Optional[float] = ..., device_seconds: _Optional[float] = ..., load_seconds: _Optional[float] = ..., up_seconds: _Optional[float] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., schedule_seconds: _Optional[float] = ..., cpu_seconds: _Optional[float] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("handle", "kind", "message", "param", "code", "retry_after_s")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_ENGINE: _ClassVar[RequestError.Kind]
        KIND_REQUEST: _ClassVar[RequestError.Kind]
        KIND_CONTEXT_LENGTH: _ClassVar[RequestError.Kind]
        KIND_UNAVAILABLE: _ClassVar[RequestError.Kind]
        KIND_QUEUE_FULL: _ClassVar[RequestError.Kind]
        KIND_DEADLINE: _ClassVar[RequestError.Kind]
    KIND_ENGINE: RequestError.Kind
    KIND_REQUEST: RequestError.Kind
    KIND_CONTEXT_LENGTH: RequestError.Kind
    KIND_UNAVAILABLE: RequestError.Kind
    KIND_QUEUE_FULL: RequestError.Kind
    KIND_DEADLINE: RequestError.Kind
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    handle: int
    kind: RequestError.Kind
    message: str
    param: str
    code: str
    retry_after_s: float
    def __init__(self, handle: _Optional[int] = ..., kind: _Optional[_Union[RequestError.Kind, str]] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., code: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

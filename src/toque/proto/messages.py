"""Translation between the wire's messages and `toque.types`: every field in one place, both ways.

What arrives is checked: a message that does not parse, or that is inconsistent, raises WireError; a request
whose values are out of range raises RequestError like any other.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from google.protobuf.message import DecodeError

from toque.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    OverloadedError,
    QueueFullError,
    RequestError,
    ToqueError,
    UnavailableError,
    WireError,
)
from toque.proto import replica_pb2 as pb
from toque.types import (
    EngineRequest,
    EngineStats,
    FinishReason,
    SamplingParams,
    SequenceOutput,
    StepEvent,
    StepEventKind,
    TokenLogprob,
)

PROTOCOL = 1
ReplicaError = pb.RequestError

_FINISH = {
    FinishReason.STOP: pb.FINISH_STOP,
    FinishReason.LENGTH: pb.FINISH_LENGTH,
    FinishReason.ABORT: pb.FINISH_ABORT,
    FinishReason.ERROR: pb.FINISH_ERROR,
}
_FINISH_BACK: dict[int, FinishReason | None] = {number: reason for reason, number in _FINISH.items()}
_FINISH_BACK[pb.FINISH_NONE] = None

_EVENT_KINDS = frozenset(StepEventKind)
_MOST = 2**32 - 1

_STATS = tuple(field.name for field in fields(EngineStats))  # the message has the same names


def parse_client_message(payload: bytes) -> pb.ClientMessage:
    try:
        return pb.ClientMessage.FromString(payload)
    except DecodeError:
        raise WireError(f"{len(payload)} bytes that are no ClientMessage") from None


def parse_server_message(payload: bytes) -> pb.ServerMessage:
    try:
        return pb.ServerMessage.FromString(payload)
    except DecodeError:
        raise WireError(f"{len(payload)} bytes that are no ServerMessage") from None


# Requests


def encode_submit(handle: int, request: EngineRequest) -> bytes:
    s = request.sampling
    sampling = pb.Sampling(
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        bias_tokens=[token for token, _ in s.logit_bias],
        bias_values=[bias for _, bias in s.logit_bias],
        seed=s.seed,
        logprobs=s.logprobs,
        prompt_logprobs=s.prompt_logprobs,
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        stop_token_ids=s.stop_token_ids,
        ignore_eos=s.ignore_eos,
    )
    submit = pb.Submit(
        handle=handle,
        request_id=request.request_id,
        prompt=pack(request.prompt),
        sampling=sampling,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        priority=request.priority,
        deadline=request.deadline,
        grammar=request.grammar,
        generated=pack(request.generated),
    )
    return pb.ClientMessage(submit=submit).SerializeToString()


def decode_submit(submit: pb.Submit, request_id: str) -> EngineRequest:
    """The request, under the id that the engine knows it by. Raises RequestError for bad values."""
    s = submit.sampling
    if len(s.bias_tokens) != len(s.bias_values):
        raise RequestError(
            f"logit_bias has {len(s.bias_tokens)} tokens and {len(s.bias_values)} values", param="logit_bias"
        )
    sampling = SamplingParams(
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=tuple(zip(s.bias_tokens, s.bias_values, strict=True)),
        seed=s.seed if s.HasField("seed") else None,
        logprobs=s.logprobs if s.HasField("logprobs") else None,
        prompt_logprobs=s.prompt_logprobs if s.HasField("prompt_logprobs") else None,
        max_tokens=s.max_tokens if s.HasField("max_tokens") else None,
        min_tokens=s.min_tokens,
        stop_token_ids=tuple(s.stop_token_ids),
        ignore_eos=s.ignore_eos,
    )
    return EngineRequest(
        request_id=request_id,
        prompt=tuple(unpack(submit.prompt)),
        sampling=sampling,
        tenant=submit.tenant,
        cache_salt=submit.cache_salt,
        priority=submit.priority,
        deadline=submit.deadline if submit.HasField("deadline") else None,
        grammar=submit.grammar if submit.HasField("grammar") else None,
        generated=tuple(unpack(submit.generated)),
    )


def encode_hello(client: str) -> bytes:
    return pb.ClientMessage(hello=pb.Hello(protocol=PROTOCOL, client=client)).SerializeToString()


def encode_abort(handles: Sequence[int]) -> bytes:
    return pb.ClientMessage(abort=pb.Abort(handles=handles)).SerializeToString()


def encode_drain(grace_s: float) -> bytes:
    return pb.ClientMessage(drain=pb.Drain(grace_s=grace_s)).SerializeToString()


# Answers


def encode_step(handles: Sequence[int], outputs: Sequence[SequenceOutput]) -> bytes:
    """One message for one step: ``outputs[i]`` is what sequence ``handles[i]`` got."""
    message = pb.ServerMessage()
    step = message.step
    tokens: list[int] = []
    single = True
    for index, output in enumerate(outputs):
        new = output.tokens
        if len(new) == 1:
            tokens.append(new[0])
        else:
            single = False
            tokens += new
        if (
            output.finish_reason is not None
            or output.logprobs is not None
            or output.cached_tokens
            or output.queue_seconds
            or output.prompt_logprobs is not None
            or output.stop_token is not None
            or output.error is not None
            or output.error_code is not None
            or output.embedding is not None
            or output.events is not None
        ):
            _fill_detail(step.details.add(index=index), output)
    step.handles = pack(handles)
    step.tokens = pack(tokens)
    if not single:
        step.counts = pack([len(output.tokens) for output in outputs])
    device_us = [output.device_us for output in outputs]
    if any(device_us):
        step.device_us = pack(device_us)
    return message.SerializeToString()


def decode_step(
    step: pb.StepOutputs, request_ids: Mapping[int, str]
) -> tuple[list[int], list[SequenceOutput]]:
    """The handles, and the output of each; handles that ``request_ids`` does not know (aborted a moment ago)
    get outputs without a request id. Raises WireError when the columns disagree."""
    handles, tokens = unpack(step.handles), unpack(step.tokens)
    name = request_ids.get
    if not step.counts:
        if len(tokens) != len(handles):
            raise WireError(f"a step of {len(handles)} sequences, {len(tokens)} tokens")
        outputs = [SequenceOutput(name(h, ""), [token]) for h, token in zip(handles, tokens, strict=True)]
    else:
        counts = unpack(step.counts)
        if len(counts) != len(handles) or sum(counts) != len(tokens):
            raise WireError(f"a step of {len(handles)} sequences, {len(counts)} counts, {len(tokens)} tokens")
        outputs = []
        start = 0
        for handle, count in zip(handles, counts, strict=True):
            outputs.append(SequenceOutput(name(handle, ""), tokens[start : start + count]))
            start += count
    if step.device_us:
        column = unpack(step.device_us)
        if len(column) != len(handles):
            raise WireError(f"a step of {len(handles)} sequences, {len(column)} device times")
        for output, device_us in zip(outputs, column, strict=True):
            output.device_us = device_us
    for detail in step.details:
        if detail.index >= len(outputs):
            raise WireError(f"detail of sequence {detail.index} in a step of {len(outputs)}")
        _read_detail(detail, outputs[detail.index])
    return handles, outputs


def pack(ids: Sequence[int]) -> bytes:
    """A column: little-endian uint32. Raises RequestError for what is none."""
    try:
        column = array("I", ids)
    except (OverflowError, TypeError) as error:
        raise RequestError(f"token ids are integers from 0 to {2**32 - 1}: {error}", param="prompt") from None
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def unpack(data: bytes) -> list[int]:
    if len(data) % 4:
        raise WireError(f"a column of uint32 takes {len(data)} bytes")
    column = array("I")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tolist()


def _fill_detail(detail: pb.Detail, output: SequenceOutput) -> None:
    if output.finish_reason is not None:
        detail.finish = _FINISH[output.finish_reason]
    if output.stop_token is not None:
        detail.stop_token = output.stop_token
    detail.cached_tokens = output.cached_tokens
    detail.queue_seconds = output.queue_seconds
    detail.error = output.error or ""
    detail.error_code = output.error_code or ""
    detail.embedding = output.embedding or b""
    if output.events:
        detail.events = pack([min(number, _MOST) for event in output.events for number in event])
    if output.logprobs is not None:
        _fill_logprobs(detail.logprobs, output.logprobs)
    if output.prompt_logprobs is not None:
        _fill_logprobs(detail.prompt_logprobs, (entry for entry in output.prompt_logprobs if entry))


def _read_detail(detail: pb.Detail, output: SequenceOutput) -> None:
    output.finish_reason = _FINISH_BACK.get(detail.finish)
    output.stop_token = detail.stop_token if detail.HasField("stop_token") else None
    output.cached_tokens = detail.cached_tokens
    output.queue_seconds = detail.queue_seconds
    output.error = detail.error or None
    output.error_code = detail.error_code or None
    output.embedding = detail.embedding or None
    if detail.events:
        output.events = _read_events(unpack(detail.events))
    if detail.HasField("logprobs"):
        output.logprobs = _read_logprobs(detail.logprobs)
    if detail.HasField("prompt_logprobs"):
        output.prompt_logprobs = [None, *_read_logprobs(detail.prompt_logprobs)]


def _read_events(column: list[int]) -> list[StepEvent]:
    if len(column) % 4:
        raise WireError(f"a column of events has {len(column)} numbers, not 4 for each")
    rows = (column[i : i + 4] for i in range(0, len(column), 4))
    # A newer replica may tell of what this side has no name for.
    return [StepEvent(StepEventKind(kind), *row) for kind, *row in rows if kind in _EVENT_KINDS]


def _fill_logprobs(message: pb.Logprobs, entries: Iterable[TokenLogprob]) -> None:
    message.SetInParent()  # none at all is not the same as no list
    for entry in entries:
        message.tokens.append(entry.token)
        message.values.append(entry.logprob)
        message.top_counts.append(len(entry.top))
        message.top_tokens.extend([token for token, _ in entry.top])
        message.top_values.extend([value for _, value in entry.top])


def _read_logprobs(message: pb.Logprobs) -> list[TokenLogprob]:
    top = list(zip(message.top_tokens, message.top_values, strict=False))
    if not len(message.tokens) == len(message.values) == len(message.top_counts) or sum(
        message.top_counts
    ) != len(top):
        raise WireError("the columns of a Logprobs message have different lengths")
    entries = []
    start = 0
    for token, value, count in zip(message.tokens, message.values, message.top_counts, strict=True):
        entries.append(TokenLogprob(token, value, tuple(top[start : start + count])))
        start += count
    return entries


def encode_stats(stats: EngineStats) -> bytes:
    message = pb.Stats(**{name: getattr(stats, name) for name in _STATS})
    return pb.ServerMessage(stats=message).SerializeToString()


def decode_stats(message: pb.Stats) -> EngineStats:
    return EngineStats(**{name: getattr(message, name) for name in _STATS})


# Errors. The order matters: the first class that the error is an instance of.
_KINDS: tuple[tuple[type[ToqueError], pb.RequestError.Kind], ...] = (
    (ContextLengthError, ReplicaError.KIND_CONTEXT_LENGTH),
    (RequestError, ReplicaError.KIND_REQUEST),
    (QueueFullError, ReplicaError.KIND_QUEUE_FULL),
    (OverloadedError, ReplicaError.KIND_UNAVAILABLE),
    (DeadlineError, ReplicaError.KIND_DEADLINE),
)


def encode_error(handle: int, error: Exception) -> bytes:
    message = pb.RequestError(handle=handle, kind=ReplicaError.KIND_ENGINE, message=str(error)[:4096])
    for cls, kind in _KINDS:
        if isinstance(error, cls):
            message.kind = kind
            break
    if isinstance(error, ToqueError):
        message.param = error.param or ""
        message.code = error.error_code or ""
    if isinstance(error, OverloadedError):
        message.retry_after_s = error.retry_after_s
    return pb.ServerMessage(error=message).SerializeToString()


def decode_error(message: pb.RequestError) -> ToqueError:
    param, code = message.param or None, message.code or None
    match message.kind:
        case ReplicaError.KIND_CONTEXT_LENGTH:
            return ContextLengthError(message.message, param=param, code=code)
        case ReplicaError.KIND_REQUEST:
            return RequestError(message.message, param=param, code=code)
        case ReplicaError.KIND_QUEUE_FULL:
            return QueueFullError(message.message, retry_after_s=message.retry_after_s, code=code)
        case ReplicaError.KIND_UNAVAILABLE:
            return UnavailableError(message.message, retry_after_s=message.retry_after_s, code=code)
        case ReplicaError.KIND_DEADLINE:
            return DeadlineError(message.message, param=param, code=code)
        case _:
            return EngineError(message.message, param=param, code=code)

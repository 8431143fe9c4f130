"""Translation between the wire's messages and `toque.types`: every field in one place, both ways.

What arrives is checked: a message that does not parse, or that is inconsistent, raises WireError; a request
whose values are out of range raises RequestError like any other.
"""

from __future__ import annotations

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
from toque.types import EngineRequest, EngineStats, FinishReason, SamplingParams, SequenceOutput, TokenLogprob

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
        prompt=request.prompt,
        sampling=sampling,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        priority=request.priority,
        deadline=request.deadline,
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
        prompt=tuple(submit.prompt),
        sampling=sampling,
        tenant=submit.tenant,
        cache_salt=submit.cache_salt,
        priority=submit.priority,
        deadline=submit.deadline if submit.HasField("deadline") else None,
    )


def encode_hello(client: str) -> bytes:
    return pb.ClientMessage(hello=pb.Hello(protocol=PROTOCOL, client=client)).SerializeToString()


def encode_abort(handles: Sequence[int]) -> bytes:
    return pb.ClientMessage(abort=pb.Abort(handles=handles)).SerializeToString()


def encode_drain(grace_s: float) -> bytes:
    return pb.ClientMessage(drain=pb.Drain(grace_s=grace_s)).SerializeToString()


# Answers


def encode_step(handles: list[int], outputs: list[SequenceOutput]) -> bytes:
    """One message for one step: ``outputs[i]`` is what sequence ``handles[i]`` got."""
    tokens: list[int] = []
    for output in outputs:
        tokens += output.tokens
    step = pb.StepOutputs(handles=handles, tokens=tokens)
    if len(tokens) != len(outputs) or any(len(output.tokens) != 1 for output in outputs):
        step.counts.extend([len(output.tokens) for output in outputs])
    for index, output in enumerate(outputs):
        if (
            output.finish_reason is None
            and output.logprobs is None
            and not output.cached_tokens
            and output.prompt_logprobs is None
            and output.error is None
            and output.error_code is None
            and not output.queue_seconds
            and output.stop_token is None
        ):
            continue
        detail = step.details.add(
            index=index,
            stop_token=output.stop_token,
            cached_tokens=output.cached_tokens,
            error=output.error or "",
            error_code=output.error_code or "",
            queue_seconds=output.queue_seconds,
        )
        if output.finish_reason is not None:
            detail.finish = _FINISH[output.finish_reason]
        if output.logprobs is not None:
            _fill_logprobs(detail.logprobs, output.logprobs)
        if output.prompt_logprobs is not None:
            _fill_logprobs(
                detail.prompt_logprobs, [entry for entry in output.prompt_logprobs if entry is not None]
            )
    return pb.ServerMessage(step=step).SerializeToString()


def decode_step(step: pb.StepOutputs, request_ids: Mapping[int, str]) -> list[tuple[int, SequenceOutput]]:
    """``(handle, output)`` of each sequence, in the step's order.

    ``request_ids`` names the live handles; outputs for others (aborted a moment ago) are left out. Raises
    WireError when the columns disagree.
    """
    handles = list(step.handles)
    tokens = list(step.tokens)
    counts = list(step.counts)
    if counts:
        if len(counts) != len(handles) or sum(counts) != len(tokens):
            raise WireError(
                f"step of {len(handles)} sequences has {len(counts)} counts, {len(tokens)} tokens"
            )
        pieces: list[list[int]] = []
        start = 0
        for count in counts:
            pieces.append(tokens[start : start + count])
            start += count
    elif len(tokens) != len(handles):
        raise WireError(f"a step of {len(handles)} sequences, {len(tokens)} tokens")
    else:
        pieces = [[token] for token in tokens]
    outputs = [
        SequenceOutput(request_ids.get(handle, ""), piece)
        for handle, piece in zip(handles, pieces, strict=True)
    ]
    for detail in step.details:
        if detail.index >= len(outputs):
            raise WireError(f"detail of sequence {detail.index} in a step of {len(outputs)}")
        output = outputs[detail.index]
        output.finish_reason = _FINISH_BACK.get(detail.finish)
        output.stop_token = detail.stop_token if detail.HasField("stop_token") else None
        output.cached_tokens = detail.cached_tokens
        output.error = detail.error or None
        output.error_code = detail.error_code or None
        output.queue_seconds = detail.queue_seconds
        if detail.HasField("logprobs"):
            output.logprobs = _read_logprobs(detail.logprobs)
        if detail.HasField("prompt_logprobs"):
            output.prompt_logprobs = [None, *_read_logprobs(detail.prompt_logprobs)]
    return [(h, output) for h, output in zip(handles, outputs, strict=True) if h in request_ids]


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

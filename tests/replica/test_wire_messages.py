"""Every field of every noun survives the wire, and what does not belong on it is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque import errors
from toque.errors import RequestError, ToqueError, WireError
from toque.proto import replica_pb2 as pb
from toque.proto.messages import (
    decode_error,
    decode_stats,
    decode_step,
    decode_submit,
    encode_error,
    encode_stats,
    encode_step,
    encode_submit,
    pack,
    parse_client_message,
    parse_server_message,
)
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

ROOT = Path(__file__).resolve().parents[2]
tokens = st.integers(0, 2**31 - 1)
finite = st.floats(-100, 100)
logprobs = st.builds(TokenLogprob, tokens, finite, st.lists(st.tuples(tokens, finite), max_size=3).map(tuple))
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(-1, 2**31 - 1),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 10),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.lists(st.tuples(tokens, finite), max_size=3).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    max_tokens=st.none() | st.integers(0, 2**31 - 1),
    min_tokens=st.integers(0, 2**31 - 1),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)
requests = st.builds(
    EngineRequest,
    request_id=st.text(max_size=8),
    prompt=st.lists(tokens, max_size=5).map(tuple),
    sampling=sampling,
    tenant=st.text(max_size=5),
    cache_salt=st.text(max_size=5),
    priority=st.integers(-100, 100),
    deadline=st.none() | st.floats(0, 1e12),
    grammar=st.none() | st.text(max_size=5),
    generated=st.lists(tokens, max_size=3).map(tuple),
)
maybe_text = st.none() | st.text(min_size=1, max_size=5)
outputs = st.builds(
    SequenceOutput,
    request_id=st.just(""),
    tokens=st.lists(tokens, max_size=3),
    logprobs=st.none() | st.lists(logprobs, max_size=3),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_token=st.none() | tokens,
    cached_tokens=st.integers(0, 2**31 - 1),
    prompt_logprobs=st.none() | st.lists(logprobs, max_size=3).map(lambda found: [None, *found]),
    error=maybe_text,
    error_code=maybe_text,
    queue_seconds=st.floats(0, 1e6),
    embedding=st.none() | st.binary(min_size=4, max_size=8),
    events=st.none()
    | st.lists(
        st.builds(StepEvent, st.sampled_from(StepEventKind), *(st.integers(0, 2**32 - 1),) * 3),
        min_size=1,
        max_size=3,
    ),
    device_us=st.integers(0, 2**32 - 1),
)


@given(requests)
def test_a_request_arrives_as_it_was_sent(request: EngineRequest) -> None:
    message = parse_client_message(encode_submit(7, request))
    assert message.submit.handle == 7
    assert decode_submit(message.submit, request.request_id) == request


@given(st.lists(outputs, min_size=1, max_size=5))
def test_a_step_arrives_as_it_was_sent(step: list[SequenceOutput]) -> None:
    handles = [10 + i for i in range(len(step))]
    names = {handle: f"r{handle}" for handle in handles}
    expected = [dataclasses.replace(o, request_id=names[h]) for h, o in zip(handles, step, strict=True)]
    message = parse_server_message(encode_step(handles, step))
    assert decode_step(message.step, names) == (handles, expected)


def test_every_field_of_an_output_is_covered_above() -> None:
    """A field added to the noun but not to the wire must fail here, not vanish."""
    covered = {
        "request_id", "tokens", "logprobs", "finish_reason", "stop_token", "cached_tokens", "prompt_logprobs",
        "error", "error_code", "queue_seconds", "embedding", "device_us", "events",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(SequenceOutput)} == covered
    assert {field.name for field in dataclasses.fields(EngineStats)} == {
        f.name for f in pb.Stats.DESCRIPTOR.fields
    }


def test_a_plain_decode_step_is_two_columns() -> None:
    rows = [SequenceOutput("", [1000 + i]) for i in range(64)]
    payload = encode_step(list(range(100, 164)), rows)
    assert len(payload) <= 2 * 64 * 4 + 16


def test_outputs_of_released_requests_have_no_name() -> None:
    message = parse_server_message(encode_step([1, 2], [SequenceOutput("", [5]), SequenceOutput("", [6])]))
    assert decode_step(message.step, {2: "b"}) == (
        [1, 2],
        [SequenceOutput("", [5]), SequenceOutput("b", [6])],
    )


@pytest.mark.parametrize("prompt", [(-1,), (2**32,), ("x",)])
def test_what_is_no_token_id_does_not_travel(prompt: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="token ids are integers"):
        encode_submit(1, EngineRequest("r", prompt, SamplingParams()))


@pytest.mark.parametrize(
    "step",
    [
        pb.StepOutputs(handles=pack([1, 2]), tokens=pack([5])),
        pb.StepOutputs(handles=pack([1, 2]), counts=pack([1]), tokens=pack([5])),
        pb.StepOutputs(handles=pack([1]), counts=pack([2]), tokens=pack([5])),
        pb.StepOutputs(handles=pack([1]), tokens=pack([5]), details=[pb.Detail(index=1)]),
        pb.StepOutputs(
            handles=pack([1]), tokens=pack([5]), details=[pb.Detail(logprobs=pb.Logprobs(tokens=[5]))]
        ),
        pb.StepOutputs(handles=b"123", tokens=b"123"),
    ],
)
def test_columns_that_disagree_are_refused(step: pb.StepOutputs) -> None:
    with pytest.raises(WireError):
        decode_step(step, {1: "a", 2: "b"})


def test_stats_arrive_as_they_were_sent() -> None:
    stats = EngineStats(*range(1, len(dataclasses.fields(EngineStats)) + 1))
    assert decode_stats(parse_server_message(encode_stats(stats)).stats) == stats


@pytest.mark.parametrize(
    "error",
    [
        errors.RequestError("bad", param="top_p"),
        errors.ContextLengthError("long", param="prompt"),
        errors.UnavailableError("later", retry_after_s=2.5),
        errors.QueueFullError("full"),
        errors.DeadlineError("late"),
        errors.EngineError("ours"),
    ],
)
def test_errors_keep_their_class_and_what_they_name(error: ToqueError) -> None:
    got = decode_error(parse_server_message(encode_error(3, error)).error)
    assert type(got) is type(error)
    assert (got.message, got.param, got.error_code) == (error.message, error.param, error.error_code)
    assert getattr(got, "retry_after_s", None) == getattr(error, "retry_after_s", None)


def test_values_out_of_range_are_a_request_error() -> None:
    submit = pb.Submit(handle=1, prompt=pack([1]), sampling=pb.Sampling(temperature=9.0))
    with pytest.raises(RequestError, match="temperature must be between 0 and 2, got 9"):
        decode_submit(submit, "r")


@given(st.binary(max_size=64))
def test_arbitrary_bytes_parse_or_are_refused(data: bytes) -> None:
    for parse in (parse_client_message, parse_server_message):
        with contextlib.suppress(WireError):
            parse(data)


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    """Compares the descriptors, which are what matters; the rest differs between generator versions."""
    subprocess.run(
        [sys.executable, str(ROOT / "proto" / "generate.py"), "--out", str(tmp_path)],
        check=True,
        capture_output=True,
    )
    pattern = re.compile(r"AddSerializedFile\((.*)\)")
    for made in tmp_path.glob("*_pb2.py"):
        committed = ROOT / "src" / "toque" / "proto" / made.name
        assert pattern.findall(made.read_text()) == pattern.findall(committed.read_text()), made.name
        assert (tmp_path / f"{made.name}i").read_text() == committed.with_suffix(".pyi").read_text()

"""What only the gRPC carrier has: Describe and the standard health service, for any gRPC client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from replica.clients import Start
from toque.proto import health_pb2
from toque.proto import replica_pb2 as pb
from toque.proto.messages import encode_abort

Status = health_pb2.HealthCheckResponse


@pytest.fixture
def channel(shared_folder: Path) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"unix:{shared_folder}/r.grpc") as channel:
        yield channel


def check(channel: grpc.Channel, service: str = "") -> int:
    call = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=Status.FromString,
    )
    answer = call(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True, timeout=20)
    return int(answer.status)


def describe(channel: grpc.Channel) -> pb.Description:
    call = channel.unary_unary(
        "/toque.replica.v1.Replica/Describe",
        request_serializer=pb.DescribeRequest.SerializeToString,
        response_deserializer=pb.Description.FromString,
    )
    description: pb.Description = call(pb.DescribeRequest(), wait_for_ready=True, timeout=20)
    return description


def test_health_and_describe_follow_the_state(start_replica: Start, run_folder: Path) -> None:
    process = start_replica("--load-s", "2", grpc=True)
    with grpc.insecure_channel(f"unix:{run_folder}/r.grpc") as channel:
        follow(channel, process.pid)


def follow(channel: grpc.Channel, pid: int) -> None:
    assert check(channel) == Status.NOT_SERVING
    first = describe(channel)
    assert (first.state, first.reason) == (pb.STATE_STARTING, "loading the model")
    watch = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=Status.FromString,
    )
    changes = watch(health_pb2.HealthCheckRequest(service="toque.replica.v1.Replica"), timeout=20)
    assert [next(changes).status for _ in range(2)] == [Status.NOT_SERVING, Status.SERVING]
    ready = describe(channel)
    assert (ready.state, ready.pid, ready.model.architecture) == (pb.STATE_READY, pid, "fake")


def test_unknown_services_are_not_found(channel: grpc.Channel) -> None:
    assert check(channel, "toque.replica.v1.Replica") in (Status.SERVING, Status.NOT_SERVING)
    with pytest.raises(grpc.RpcError) as refused:
        check(channel, "nobody")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("payload", "code", "says"),
    [
        (b"\xff" * 40, grpc.StatusCode.INVALID_ARGUMENT, "no ClientMessage"),
        (encode_abort([1]), grpc.StatusCode.INVALID_ARGUMENT, "starts with hello"),
        (bytes((16 << 20) + 1), grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
    ],
)
def test_garbage_and_huge_messages_end_their_session_only(
    channel: grpc.Channel, payload: bytes, code: grpc.StatusCode, says: str
) -> None:
    """Field case BR-080: a documented bound, and a status rather than a broken connection."""
    session = channel.stream_stream("/toque.replica.v1.Replica/Session")
    with pytest.raises(grpc.RpcError) as refused:
        list(session(iter([payload]), wait_for_ready=True, timeout=20))
    assert refused.value.code() is code
    assert says in refused.value.details()
    deadline = time.monotonic() + 5
    while check(channel) != Status.SERVING:
        assert time.monotonic() < deadline

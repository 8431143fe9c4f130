"""The same sessions over gRPC, with Describe and the standard health service. The one file here that imports grpc."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from toque.errors import ConfigError, WireError
from toque.proto import health_pb2, replica_pb2
from toque.proto.frames import MAX_TO_CLIENT, MAX_TO_REPLICA
from toque.replica.replica import Replica

MAX_SESSIONS = 8
_SPARE_WORKERS = 4  # for Describe and Check while every session is taken
_WATCH_INTERVAL_S = 0.25
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_TO_REPLICA),
    ("grpc.max_send_message_length", MAX_TO_CLIENT),
    ("grpc.so_reuseport", 0),
]
_SERVING = (replica_pb2.STATE_READY, replica_pb2.STATE_DEGRADED)
_SERVICES = ("", "toque.replica.v1.Replica")


class GrpcServer:
    """Serves a replica at ``target`` (``unix:PATH``) from construction until `close`. Raises ConfigError."""

    def __init__(self, replica: Replica, target: str) -> None:
        if not target.startswith("unix:"):
            raise ConfigError(f"grpc must be unix:PATH, got {target!r}", param="grpc")
        self._replica = replica
        self._sessions = threading.BoundedSemaphore(MAX_SESSIONS)
        self._closing = threading.Event()
        pool = ThreadPoolExecutor(MAX_SESSIONS + _SPARE_WORKERS, thread_name_prefix="grpc")
        self._server = grpc.server(pool, options=_OPTIONS)
        self._server.add_generic_rpc_handlers((self._replica_service(), self._health_service()))
        try:
            self._server.add_insecure_port(target)
        except RuntimeError as error:
            raise ConfigError(f"cannot serve gRPC at {target}: {error}", param="grpc") from error
        self._server.start()

    def close(self, grace_s: float = 0.5) -> None:
        self._closing.set()
        self._server.stop(grace_s).wait()

    # toque.replica.v1.Replica

    def _replica_service(self) -> grpc.GenericRpcHandler[Any, Any]:
        handlers = {
            "Describe": _unary(self._describe, replica_pb2.DescribeRequest.FromString),
            "Session": grpc.stream_stream_rpc_method_handler(self._session),  # payloads stay bytes
        }
        return grpc.method_handlers_generic_handler("toque.replica.v1.Replica", handlers)

    def _describe(self, request: object, context: grpc.ServicerContext) -> replica_pb2.Description:
        return self._replica.description()

    def _session(self, payloads: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if not self._sessions.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"this replica takes {MAX_SESSIONS} sessions")
        link = _GrpcLink()
        session = self._replica.open(link)
        if not context.add_callback(link.end):
            link.end()
        reader = threading.Thread(target=self._read, args=(payloads, session, link), daemon=True)
        reader.start()
        try:
            yield from iter(link.outbox.get, None)
        finally:
            self._replica.close(session)
            self._sessions.release()
        if link.error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, link.error)

    def _read(self, payloads: Iterator[bytes], session: Any, link: _GrpcLink) -> None:
        try:
            for payload in payloads:
                self._replica.receive(session, payload)
        except WireError as error:
            link.error = error.message
        except grpc.RpcError:
            pass  # the client is gone; raised out of the iterator
        finally:
            link.end()

    # grpc.health.v1.Health

    def _health_service(self) -> grpc.GenericRpcHandler[Any, Any]:
        parse = health_pb2.HealthCheckRequest.FromString
        handlers = {
            "Check": _unary(self._check, parse),
            "Watch": grpc.unary_stream_rpc_method_handler(
                self._watch, request_deserializer=parse, response_serializer=_serialize
            ),
        }
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers)

    def _check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in _SERVICES:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:100]!r} here")
        return self._health()

    def _watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> Iterator[health_pb2.HealthCheckResponse]:
        if request.service not in _SERVICES:
            yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            return
        said = None
        while context.is_active() and not self._closing.is_set():
            health = self._health()
            if health.status != said:
                said = health.status
                yield health
            self._closing.wait(_WATCH_INTERVAL_S)

    def _health(self) -> health_pb2.HealthCheckResponse:
        serving = self._replica.state in _SERVING[:1]
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        return health_pb2.HealthCheckResponse(status=status)


class _GrpcLink:
    """Payloads on their way to the thread that writes them. None ends it."""

    def __init__(self) -> None:
        self.outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.error = ""

    def send(self, payload: bytes) -> None:
        self.outbox.put(payload)

    def end(self) -> None:
        self.outbox.put(None)


def _unary(function: Callable[..., Any], parse: Callable[[bytes], Any]) -> grpc.RpcMethodHandler[Any, Any]:
    return grpc.unary_unary_rpc_method_handler(
        function, request_deserializer=parse, response_serializer=_serialize
    )


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data

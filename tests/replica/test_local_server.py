"""The local carrier against clients that misbehave."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replica.clients import Start, collect, flat, request
from toque.errors import ConfigError
from toque.proto.frames import MAX_TO_REPLICA, PREFACE, encode_frame
from toque.proto.messages import encode_abort, encode_hello, encode_submit, parse_server_message, unpack
from toque.replica.local import listen
from toque.routing.session import ReplicaSession

HELLO = PREFACE + encode_frame(encode_hello("test"))


@pytest.fixture
async def served(shared_folder: Path) -> Path:
    path = shared_folder / "r.sock"
    session = ReplicaSession("r", str(path))
    session.start()
    await session.wait_ready(20)
    await session.close()
    return path


def connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5)
    sock.connect(str(path))
    return sock


def closed(sock: socket.socket) -> bool:
    """Whether the peer has closed, after whatever it had to say."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


GARBAGE = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "gRPC": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix",
    "no hello": PREFACE + encode_frame(encode_abort([1])),
    "not protobuf": PREFACE + encode_frame(b"\xff" * 40),
    "empty message": PREFACE + encode_frame(b""),
    "garbage after hello": HELLO + encode_frame(b"\xff" * 40),
    "hello twice": HELLO + encode_frame(encode_hello("again")),
    "huge length": HELLO + (MAX_TO_REPLICA + 1).to_bytes(4, "little"),
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_ends_its_own_session_only(served: Path, name: str) -> None:
    neighbour = ReplicaSession("n", str(served))
    neighbour.start()
    await neighbour.wait_ready(20)
    stream = neighbour.generate(request(4, max_tokens=100))
    await anext(stream)
    with connect(served) as sock:
        sock.sendall(GARBAGE[name])
        assert closed(sock)
    assert flat([o async for o in stream]) == [4] * 99
    await neighbour.close()


async def test_a_client_that_reads_nothing_does_not_hold_up_others(served: Path) -> None:
    neighbour = ReplicaSession("n", str(served))
    neighbour.start()
    await neighbour.wait_ready(20)
    with connect(served) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asked = request(*range(1, 500), max_tokens=20_000, logprobs=20)
        sock.sendall(HELLO + b"".join(encode_frame(encode_submit(i, asked)) for i in range(20)))
        await asyncio.sleep(0.3)
        started = time.monotonic()
        assert flat(await collect(neighbour, request(4, max_tokens=20))) == [4] * 20
        assert time.monotonic() - started < 30  # the other one never reads
    await neighbour.close()


async def test_a_client_that_reads_late_still_gets_everything(served: Path) -> None:
    with connect(served) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asked = request(*range(1, 400), max_tokens=399, logprobs=20, prompt_logprobs=20)
        sock.sendall(HELLO + encode_frame(encode_submit(1, asked)))
        await asyncio.sleep(1.0)
        tokens: list[int] = []
        while len(tokens) < 399:
            (length,) = memoryview(receive(sock, 4)).cast("I")
            message = parse_server_message(receive(sock, length))
            tokens += unpack(message.step.tokens)
    assert tokens == list(range(1, 400))


def receive(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        piece = sock.recv(n - len(data))
        assert piece, "closed early"
        data += piece
    return data


def test_the_folder_is_made_for_this_user_alone(run_folder: Path) -> None:
    path = run_folder / "new" / "r.sock"
    with listen(path):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_that_others_can_enter_is_refused(run_folder: Path) -> None:
    os.chmod(run_folder, 0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        listen(run_folder / "r.sock")


def test_a_path_too_long_for_a_socket_is_refused(run_folder: Path) -> None:
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        listen(run_folder / ("x" * 100))


def test_a_socket_left_behind_is_replaced_and_one_in_use_is_not(run_folder: Path) -> None:
    path = run_folder / "r.sock"
    listen(path).close()
    with listen(path), pytest.raises(ConfigError, match="another process serves"):
        listen(path)


async def test_idle_costs_no_cpu(start_replica: Start, run_folder: Path) -> None:
    process = start_replica()
    session = ReplicaSession("r", str(run_folder / "r.sock"))
    session.start()
    await session.wait_ready(20)
    await collect(session, request(1, max_tokens=3))

    def cpu_s() -> float:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = cpu_s()
    await asyncio.sleep(2)
    assert cpu_s() - before <= 0.04
    await session.close()


def test_the_replica_process_imports_nothing_heavy() -> None:
    heavy = ("torch", "grpc", "pydantic", "click", "asyncio", "starlette", "numpy")
    code = f"import sys, toque.replica.__main__; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

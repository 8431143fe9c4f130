"""Sessions as frames over a Unix socket, served by one thread with a selector."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from toque.errors import ConfigError, WireError
from toque.proto.frames import MAX_TO_CLIENT, MAX_TO_REPLICA, PREFACE, FrameDecoder, encode_frame
from toque.replica.replica import Replica
from toque.replica.requests import Session

MAX_CONNECTIONS = 64
MAX_UNSENT = 2 * MAX_TO_CLIENT  # what a client that does not read may leave unsent before its session ends
MAX_SOCKET_PATH = 107
_CHUNK = 1 << 18
_UCRED = struct.Struct("3i")


def listen(path: Path) -> socket.socket:
    """A listening socket that only this user can reach: its folder is made 0700, or must be so already."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(f"socket path {path} is longer than {MAX_SOCKET_PATH} bytes", param="socket")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    if folder.st_uid != os.geteuid() or stat.S_IMODE(folder.st_mode) & 0o077:
        raise ConfigError(
            f"the folder of socket {path} must be this user's alone (mode 0700)", param="socket"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            _refuse_if_served(path)
            path.unlink()
        listener.bind(os.fspath(path))
        listener.listen(16)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on socket {path}: {error.strerror}", param="socket") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def _refuse_if_served(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return
    raise ConfigError(f"another process serves socket {path}", param="socket")


class LocalServer:
    """Accepts connections and moves bytes. ``serve`` runs in one thread; `wake` and `_Connection.send` in any.

    The step loop writes to the sockets itself, so that a token does not wait for a second thread; only what a full
    socket did not take is left to this one.
    """

    def __init__(self, replica: Replica, listener: socket.socket) -> None:
        self._replica = replica
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._connections: set[_Connection] = set()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)

    @property
    def wake_fd(self) -> int:
        """For `signal.set_wakeup_fd`."""
        return self._wake_in.fileno()

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Calls ``callback`` in the serving thread when ``fd`` becomes readable."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: it is over
            self._wake_in.send(b"\0")

    def serve_once(self, timeout_s: float) -> None:
        """Waits for something to happen, at most so long, and deals with it."""
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_out:
                with contextlib.suppress(BlockingIOError):
                    while self._wake_out.recv(4096):
                        pass
            elif isinstance(key.data, _Connection):
                self._serve(key.data, events)
            else:
                self._selector.unregister(key.fileobj)
                key.data()
        for connection in [c for c in self._connections if c.wants_attention]:
            self._attend(connection)

    def close(self, flush_s: float = 1.0) -> None:
        """Closes everything, after giving clients a moment to take what is already theirs."""
        self._listener.close()
        for connection in list(self._connections):
            connection.flush(flush_s)
            self._drop(connection)
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self._connections) >= MAX_CONNECTIONS or not _same_user(sock):
            sock.close()
            return
        sock.setblocking(False)
        connection = _Connection(sock, self.wake)
        connection.session = self._replica.open(connection)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _serve(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            connection.flush(0)
            self._attend(connection)
        if not events & selectors.EVENT_READ or connection.dead:
            return
        try:
            data = connection.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        try:
            for payload in connection.decoder.feed(data):
                self._replica.receive(connection.session, payload)
        except WireError as error:
            print(f"session {connection.session.number} closed: {error.message}", flush=True)
            self._drop(connection)

    def _attend(self, connection: _Connection) -> None:
        """After a send that did not go through at once: watch for room, stop watching, or give the client up."""
        if connection.dead:
            if connection in self._connections:
                self._drop(connection)
            return
        connection.wants_attention = False  # before looking: whoever sends from now on says so again
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.close()
        self._replica.close(connection.session)


class _Connection:
    """One client's socket. ``send`` writes at once what the socket takes and keeps the rest."""

    session: Session

    def __init__(self, sock: socket.socket, wake: Callable[[], None]) -> None:
        self.sock = sock
        self.decoder = FrameDecoder(MAX_TO_REPLICA, preface=PREFACE)
        self.dead = False
        self.wants_attention = False
        self._wake = wake
        self._lock = threading.Lock()
        self._unsent = bytearray()

    @property
    def unsent(self) -> int:
        return len(self._unsent)

    def send(self, payload: bytes) -> None:
        frame = encode_frame(payload)
        with self._lock:
            if self.dead:
                return
            if not self._unsent:
                sent = self._write(frame)
                if sent == len(frame):
                    return
                frame = frame[sent:]
            self._unsent += frame
            self.dead = self.dead or len(self._unsent) > MAX_UNSENT
            self.wants_attention = True
        self._wake()

    def flush(self, timeout_s: float) -> None:
        with self._lock:
            if timeout_s and self._unsent and not self.dead:
                self.sock.settimeout(timeout_s)
                with contextlib.suppress(OSError):
                    self.sock.sendall(self._unsent)
                self._unsent.clear()
            elif self._unsent and not self.dead:
                del self._unsent[: self._write(self._unsent)]

    def close(self) -> None:
        with self._lock:
            self.dead = True
            self._unsent.clear()
            self.sock.close()

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self.sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.dead = True
            return 0


def _same_user(sock: socket.socket) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the folder's mode keeps others out
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(uid == os.geteuid())

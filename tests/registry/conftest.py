"""A package index and a model hub on loopback, and an empty store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from formats.gguf_builder import tiny_llama
from registry.loopback import Web, handler


@pytest.fixture
def web() -> Iterator[Web]:
    world = Web()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(world))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    world.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield world
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def index(web: Web, monkeypatch: pytest.MonkeyPatch) -> Web:
    """The web as pip's only index."""
    for variable in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONSTRAINT", "PIP_CERT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"{web.url}/simple")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # no pause between attempts
    return web


@pytest.fixture(scope="session")
def model_bytes() -> bytes:
    return tiny_llama().build()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"

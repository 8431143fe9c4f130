"""`toque serve` without models: several gateways on the fleet of one registry database."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from .server import Server, serve

ASKED = {"prompt": "go!", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def config(parrot_folder: Path, tmp_path: Path) -> Path:
    file = tmp_path / "toque.yaml"
    file.write_text(
        "deployments:\n"
        f"  - name: chat\n    model: {parrot_folder}\n    engine: {{backend: reference, kv_blocks: 512}}\n"
    )
    return file


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A registry of its own, and sockets in a folder of its own; replicas that outlive their servers end here."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path / "home"
    for process in replicas(tmp_path):
        process.kill()
        process.wait(10)


def replicas(folder: Path) -> list[psutil.Process]:
    """The replica processes whose sockets are in the folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "toque.replica" in words and any(word.startswith(str(folder)) for word in words):
            found.append(process)
    return found


def stream(server: Server, texts: list[str], begun: threading.Event) -> None:
    body = {"model": "chat", **ASKED, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            texts.append(line)
            if len(texts) > 10:
                begun.set()


def test_a_second_gateway_serves_on_when_the_first_is_killed(
    config: Path, home: Path, tmp_path: Path
) -> None:
    with serve("--config", str(config), "--port", "0", name="chat", home=home) as first:
        undisturbed = first.post("/v1/completions", **ASKED).json()["choices"][0]["text"]
        (replica,) = replicas(tmp_path)
        with serve("--gateway-only", "--port", "0", name="chat", home=home) as second:
            second.until(lambda: second.get("/ready").status_code == 200)
            assert [model["id"] for model in second.get("/v1/models").json()["data"]] == ["chat"]
            lines: list[str] = []
            begun = threading.Event()
            reading = threading.Thread(target=stream, args=(second, lines, begun))
            reading.start()
            assert begun.wait(60)
            first.process.send_signal(signal.SIGKILL)
            reading.join(60)
            assert "data: [DONE]" in lines
            assert second.post("/v1/completions", **ASKED).json()["choices"][0]["text"] == undisturbed
            assert second.get("/ready").status_code == 200
            assert [process.pid for process in replicas(tmp_path)] == [replica.pid]
        # A server that comes later takes up what runs, with or without the configuration.
        with serve("--port", "0", name="chat", home=home) as third:
            third.until(lambda: third.get("/ready").status_code == 200)
            assert third.post("/v1/completions", **ASKED).json()["choices"][0]["text"] == undisturbed
            assert [process.pid for process in replicas(tmp_path)] == [replica.pid]

"""`toque serve`, the whole line: command, gateway, wire, replica, engine; with a model whose text is scripted."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from .conftest import TEXT
from .server import Server, run, serving

USER = [{"role": "user", "content": "hi"}]
ENDLESS = {"prompt": "go!", "max_tokens": 16_000, "ignore_eos": True}


def test_a_chat_streamed_or_not(server: Server) -> None:
    with server.client() as client:
        whole = client.chat.completions.create(model="parrot", messages=USER, temperature=0)  # type: ignore[arg-type]
        assert whole.choices[0].message.content == TEXT
        assert whole.choices[0].finish_reason == "stop"
        text, usage = "", None
        for chunk in client.chat.completions.create(
            model="parrot",
            messages=USER,  # type: ignore[arg-type]
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == TEXT
        assert usage is not None
        assert whole.usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            whole.usage.prompt_tokens,
            whole.usage.completion_tokens,
        )


def test_completions_of_several_prompts(server: Server) -> None:
    with server.client() as client:
        answer = client.completions.create(
            model="parrot", prompt=["a\n", "b!"], n=2, max_tokens=4, temperature=0, echo=True, logprobs=1
        )
    assert [choice.text for choice in answer.choices] == ["a\n a歪 b", "a\n a歪 b", "b!xyxy", "b!xyxy"]
    logprobs = answer.choices[2].logprobs
    assert logprobs is not None
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[2] == pytest.approx(0.0, abs=1e-3)


def test_a_stop_string_ends_the_text_and_the_work(server: Server) -> None:
    before = server.metric("toque_engine_steps_total")
    answer = server.post("/v1/completions", **ENDLESS, temperature=0, stop=["yxyx"]).json()
    assert answer["choices"][0]["text"] == "x"
    assert answer["choices"][0]["finish_reason"] == "stop"
    server.until(lambda: server.metric("toque_requests_running") == 0)
    assert server.metric("toque_engine_steps_total") - before < 8_000  # it did not come to its own end


def test_a_scoring_request(server: Server) -> None:
    """Field case BR-012, through the engine."""
    answer = server.post("/v1/completions", prompt="go!x", max_tokens=0, echo=True, logprobs=1).json()
    choice = answer["choices"][0]
    assert choice["text"] == "go!x"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][3] == pytest.approx(0.0, abs=1e-3)
    assert answer["usage"]["completion_tokens"] == 0


def test_keys_errors_and_health(server: Server) -> None:
    assert httpx.get(server.url + "/live").status_code == 200
    assert httpx.get(server.url + "/ready").status_code == 200
    with server.client() as client:
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="16384"):
            client.completions.create(model="parrot", prompt="x" * 20_000)
        assert [model.id for model in client.models.list()] == ["parrot"]
    assert server.post("/v1/completions", prompt="a\n", max_tokens=5).status_code == 200
    assert server.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize("stream", [True, False])
def test_work_stops_when_clients_leave(server: Server, stream: bool) -> None:
    """Field case BR-048, through the engine: sequences and KV blocks are back soon."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"model": "parrot", **ENDLESS, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k1\r\ncontent-length: {len(body)}\r\n"
    before = server.metric("toque_engine_steps_total")
    sockets = [socket.create_connection((host, int(port))) for _ in range(4)]
    for connection in sockets:
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    server.until(lambda: server.metric("toque_requests_running") == 4)
    for connection in sockets:
        connection.close()
    server.until(lambda: server.metric("toque_requests_running") == 0)
    server.until(lambda: server.metric("toque_kv_cache_usage_ratio") < 0.9)
    steps = server.metric("toque_engine_steps_total")
    assert steps - before < 8_000  # they did not come to their own end
    time.sleep(0.3)
    assert server.metric("toque_engine_steps_total") <= steps + 1
    assert server.post("/v1/completions", prompt="a\n", max_tokens=5).status_code == 200


def test_counters_add_up_to_the_usage_shown(server: Server) -> None:
    names = (
        "toque_prompt_tokens_total",
        "toque_generation_tokens_total",
        "toque_time_to_first_token_seconds_count",
    )
    before = [server.metric(name) for name in names]
    usages = [server.post("/v1/completions", prompt="a\n", max_tokens=4).json()["usage"] for _ in range(5)]
    usages += [server.post("/v1/completions", prompt=["a\n", "b!"], n=2, max_tokens=4).json()["usage"]]
    grown = [server.metric(name) - value for name, value in zip(names, before, strict=True)]
    assert grown == [sum(u["prompt_tokens"] for u in usages), sum(u["completion_tokens"] for u in usages), 6]


def _endless_stream(server: Server, lines: list[str], started: threading.Event) -> None:
    body = {"model": server.model, **ENDLESS, "stream": True}
    with httpx.stream(
        "POST", server.url + "/v1/completions", json=body, headers=server.headers, timeout=30
    ) as answer:
        for line in answer.iter_lines():
            if line:
                lines.append(line)
            if len(lines) == 5:
                started.set()


def test_a_killed_replicas_stream_pauses_and_goes_on_with_the_same_text(parrot_folder: Path) -> None:
    asked = {"prompt": "go!", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    with serving(parrot_folder) as server:
        undisturbed = server.post("/v1/completions", **asked).json()["choices"][0]["text"]
        (replica,) = server.replicas()
        texts: list[str] = []
        body = {"model": server.model, **asked, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if len(texts) == 5:
                    replica.send_signal(signal.SIGKILL)
        assert line == "data: [DONE]" or not line
        assert "".join(texts) == undisturbed
        assert server.get("/live").status_code == 200
        assert [process.pid for process in server.replicas()] != [replica.pid]
        server.until(lambda: server.get("/ready").status_code == 200)


def test_sigterm_lets_open_streams_finish_and_exits_with_0(parrot_folder: Path) -> None:
    with serving(parrot_folder, "--grace", "60") as server:
        lines: list[str] = []
        body = {
            "model": "m",
            "prompt": "go!",
            "max_tokens": 150,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
            source = answer.iter_lines()
            while len(lines) < 5:
                lines += [line for line in [next(source)] if line]
            server.process.send_signal(signal.SIGTERM)
            lines += [line for line in source if line]
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "xy" * 75
        assert server.process.wait(60) == 0


def test_after_the_grace_streams_end_in_an_error_event(parrot_folder: Path) -> None:
    with serving(parrot_folder, "--grace", "0.5") as server:
        lines: list[str] = []
        started = threading.Event()
        reader = threading.Thread(target=_endless_stream, args=(server, lines, started))
        reader.start()
        assert started.wait(60)
        assert server.terminate() == 0
        reader.join(60)
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "service_unavailable"


def test_the_ready_line_shows_a_call_that_works(parrot_folder: Path) -> None:
    from toque.config import load_settings
    from toque.gateway.serve import greeting

    text = greeting([("m", False)], load_settings(environ={}), 8000, 0.4)
    assert "http://127.0.0.1:8000/v1" in text
    found = re.search(r"-d '(.*)'", text)
    assert found
    assert json.loads(found.group(1))["model"] == "m"
    text = greeting([("m", True)], load_settings(environ={}), 8000, 0.4)
    assert "/v1/embeddings" in text
    assert json.loads(text.split("-d '")[1][:-1]) == {"model": "m", "input": "Say hello"}


def test_what_keeps_it_from_serving_is_one_line_and_exit_code_1(parrot_folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 64)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (["serve", str(parrot_folder), "--port", port], f"port {port}"),
            (["serve", str(damaged), "--port", "0", "--backend", "reference"], "damaged"),
            (["serve", str(parrot_folder), "--host", "0.0.0.0", "--port", "0"], "insecure"),
            (["serve", str(parrot_folder), "--port", "0", "--backend", "none"], "none"),
        ]
        for arguments, word in cases:
            done = run(*arguments)
            assert done.returncode == 1, (arguments, done)
            assert word in done.stderr
            assert "Traceback" not in done.stderr
            assert len(done.stderr.splitlines()) <= 6, done.stderr


def test_keys_made_and_revoked_while_it_runs(parrot_folder: Path, tmp_path: Path) -> None:
    from toque.gateway.key_file import KeyFile

    keys = KeyFile(tmp_path / "keys.json")
    first, text = keys.create("a", requests_per_minute=1000)
    with serving(parrot_folder, name="parrot", home=tmp_path) as server:

        def asked(key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            body = {"model": "parrot", "prompt": "a\n", "max_tokens": 2}
            return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)

        assert asked("").status_code == 401
        answer = asked(text)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == "999"
        made = run("keys", "create", "b", home=tmp_path)
        assert made.returncode == 0
        other = made.stdout.strip()
        server.until(lambda: asked(other).status_code == 200)
        assert run("keys", "revoke", first.id, home=tmp_path).returncode == 0
        server.until(lambda: asked(text).status_code == 401)
        assert asked(other).status_code == 200
        log = server.log.read_text()
        assert text not in log
        assert other not in log

"""A real server as an operator watches it: spans down to the engine's steps, logs as JSON, metrics under two names."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from fixtures.collector import collector

from .server import run, serving

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONFIG = """
tracing: {{endpoint: "{url}"}}
server: {{log_format: json, metrics_compat: vllm}}
"""


def test_one_request_is_found_everywhere_by_its_trace(parrot_folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "toque.yaml"
    with collector() as received:
        config.write_text(CONFIG.format(url=received.url))
        flags = ("--config", str(config))
        with serving(parrot_folder, *flags, name="parrot", home=tmp_path / "home") as server:
            answer = httpx.post(
                server.url + "/v1/completions",
                json={"model": "parrot", "prompt": "secretive\n", "max_tokens": 6},
                headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"},
                timeout=30,
            )
            usage = answer.json()["usage"]
            metrics = server.get("/metrics").text
            assert server.metric("toque_replica_memory_bytes") > 2**20
            assert server.metric("toque_replica_cpu_seconds_total") > 0
            assert 'vllm:generation_tokens_total{engine="0",model_name="parrot"} 6.0' in metrics
            (replica,) = server.get("/admin/v1/stats").json()["models"]["parrot"]["replicas"].values()
            assert replica["state"] == "ready"
            assert server.terminate() == 0
            log = server.log.read_text()
        spans = {span.name: span for span in received.spans()}
    assert set(spans) == {"text_completion parrot", "attempt parrot-0.1", "queue", "prefill", "decode"}
    root = spans["text_completion parrot"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert answer.headers["traceparent"] == f"00-{TRACE}-{root.span_id.hex()}-01"
    told = {attribute.key: attribute.value for attribute in root.attributes}
    assert told["gen_ai.usage.input_tokens"].int_value == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"].int_value == usage["completion_tokens"] == 6
    assert spans["queue"].parent_span_id == spans["attempt parrot-0.1"].span_id
    assert spans["prefill"].start_time_unix_nano >= spans["queue"].start_time_unix_nano
    assert spans["decode"].end_time_unix_nano <= root.end_time_unix_nano

    lines = [json.loads(line) for line in log.splitlines()]
    (line,) = [line for line in lines if line.get("endpoint") == "/v1/completions"]
    assert (line["request_id"], line["trace_id"], line["status"]) == ("mine", TRACE, 200)
    assert any(line.get("replica", "").startswith("parrot-0") for line in lines)
    assert "secretive" not in log
    for name in (TRACE, "mine", answer.json()["id"]):
        life = run("logs", name, home=tmp_path / "home").stdout
        assert f"trace {TRACE}" in life
        assert "closed: ok 200 (length), 6 tokens" in life

"""The books of a real server: what its clients were told, also after it was killed in the middle (BR-079)."""

from __future__ import annotations

import csv
import io
import json
import time
from decimal import Decimal
from pathlib import Path

import httpx

from .server import run, serving

CONFIG = """
ledger:
  currency: EUR
  prices:
    parrot: {input: 0.5, output: 2.0, cached_input: 0.1}
  hourly: {cpu: 3.6}
"""


def test_usage_survives_a_killed_gateway_and_adds_up(parrot_folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "toque.yaml"
    config.write_text(CONFIG)
    home = tmp_path / "home"
    flags = ("--config", str(config))
    shown = []
    with serving(parrot_folder, *flags, name="parrot", home=home) as server:
        for number in range(5):
            messages = [{"role": "user", "content": "hi" * number}]
            shown.append(
                server.post("/v1/chat/completions", messages=messages, n=1 + number % 2).json()["usage"]
            )
        body = {"model": "parrot", "prompt": "go!", "max_tokens": 16_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as stream:
            asked = time.monotonic()
            lines = stream.iter_lines()  # while it lives the connection does
            for line in lines:
                if line and time.monotonic() - asked > 0.1:
                    if server.noted():
                        break
                    asked = time.monotonic()
            shown.append(server.post("/v1/completions", prompt="x\n", max_tokens=3).json()["usage"])
            server.process.kill()  # the last answer is out, and hardly in the database
            server.process.wait()
    with serving(parrot_folder, *flags, name="parrot", home=home) as server:
        answer = server.post("/v1/completions", prompt="y\n", max_tokens=3).json()
        shown.append(answer["usage"])
        last_id = answer["id"]
        server.until(lambda: server.metric("toque_ledger_open_requests") == 0)
        assert server.metric("toque_list_amount_total") > 0
        top = run("top", "--url", server.url, "--once")
        assert "parrot" in top.stdout, top.stderr
        assert "ledger: ok" in top.stdout
        assert server.terminate() == 0
        assert "no server answers" in run("top", "--url", server.url, "--once").stderr
    done = run("usage", "--by", "endpoint", "--json", *flags, home=home)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    chat, completions = found["data"]
    total = found["total"]
    assert (total["requests"], total["ok"], total["lost"]) == (8, 7, 1)
    assert chat["endpoint"] == "/v1/chat/completions"
    for name in ("prompt_tokens", "completion_tokens"):
        assert chat[name] == sum(usage[name] for usage in shown[:5])
    lost_prompt = len("go!")
    assert completions["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in shown[5:]) + lost_prompt
    lost = completions["completion_tokens"] - sum(usage["completion_tokens"] for usage in shown[5:])
    assert lost >= 1
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in shown)
    assert total["cached_tokens"] == cached
    prompt = sum(usage["prompt_tokens"] for usage in shown)
    completion = sum(usage["completion_tokens"] for usage in shown)
    expected = Decimal("0.5") * (prompt - cached) + Decimal("0.1") * cached + 2 * completion
    assert Decimal(total["list_amount"]) * 10**6 == expected
    assert total["currency"] == "EUR"
    assert total["device_seconds"] > 0
    assert Decimal(total["real_cost"]) > 0
    told = run("logs", last_id, *flags, home=home)
    for step in ("admitted", "prepared", "routed to parrot", "scheduled in step", "prefill of 2 tokens",
                 "first token", "finished (length) after 3 tokens", "closed: ok 200 (length), 3 tokens"):  # fmt: skip
        assert step in told.stdout
    life = json.loads(run("logs", last_id, "--json", *flags, home=home).stdout)[0]
    kinds = [event["event"] for event in life["events"]]
    assert kinds == [
        "admitted", "prepared", "routed", "scheduled", "prefill", "first_token", "finished", "closed",
    ]  # fmt: skip
    assert life["replica"].startswith("parrot")
    assert life["attempts"] == []
    assert run("logs", "nobody", *flags, home=home).returncode == 1
    month = time.strftime("%Y-%m", time.gmtime())
    done = run("usage", "--month", month, "--csv", *flags, home=home)
    *lines, last = csv.DictReader(io.StringIO(done.stdout))
    assert sum(Decimal(line["list_amount"]) for line in lines) == Decimal(last["list_amount"])
    assert last["list_amount"] == total["list_amount"]
    table = run("usage", *flags, home=home)
    assert "parrot" in table.stdout
    assert "list EUR" in table.stdout


def test_usage_of_a_home_that_has_none_is_a_clear_error(tmp_path: Path) -> None:
    done = run("usage", home=tmp_path)
    assert done.returncode == 1
    assert "there is no ledger" in done.stderr
    assert run("usage", "--by", "colour", home=tmp_path).stderr.startswith("toque: usage is grouped by")

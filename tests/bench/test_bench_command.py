"""`toque bench`, the whole line: it starts a server, measures it, stops it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.parrot import CHAT_TEMPLATE, make_parrot
from toque.gateway.key_file import NAME, KeyFile

TOQUE = [sys.executable, "-m", "toque"]


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "parrot"
    transitions = {"\n": "x", "x": "y", "y": "x"}
    return make_parrot(folder, transitions, chat_template=CHAT_TEMPLATE, context_length=8192)


def bench(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOQUE, "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={"TOQUE_HOME": str(home), "PATH": "/usr/bin:/bin", "TOQUE_API_KEY": "for-other-servers"},
        check=False,
    )


def test_every_workload_against_a_server_of_its_own(parrot: Path, tmp_path: Path) -> None:
    report, home = tmp_path / "report.json", tmp_path / "home"
    KeyFile(home / NAME).create("tenant")  # this machine's keys do not stand in the way
    done = bench(
        str(parrot), "--requests", "4", "--concurrency", "2", "--output-tokens", "8", "--json", str(report),
        home=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = {r["workload"]: r for r in json.loads(report.read_text())["reports"]}
    assert set(figures) == {"sequential", "concurrent", "shared-prefix"}
    for r in figures.values():
        assert (r["requests"], r["failed"], r["output_tokens"]) == (4, 0, 32)
        assert 0 < r["ttft"]["p50"] <= r["ttft"]["p99"] <= r["end_to_end"]["p99"]
        assert r["output_tokens_per_second"] == pytest.approx(32 / r["seconds"])
    assert figures["shared-prefix"]["cached_tokens"] > 1000
    table = done.stdout
    assert all(word in table for word in ("sequential", "TTFT p95", "inter-token p99", "end to end p50"))
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= 80
    assert not (home / "ledger").exists()  # a benchmark is no usage


def test_json_on_standard_output_and_failures_as_exit_code_1(tmp_path: Path) -> None:
    done = bench(
        "m", "--url", "http://127.0.0.1:9", "--requests", "2", "--workload", "sequential", "--json", "-",
        home=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    (report,) = json.loads(done.stdout)["reports"]
    assert (report["requests"], report["failed"]) == (2, 2)
    assert report["errors"]


def test_a_server_that_does_not_come_is_a_clear_error(tmp_path: Path) -> None:
    done = bench("no-such-model", home=tmp_path)
    assert done.returncode == 1
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr

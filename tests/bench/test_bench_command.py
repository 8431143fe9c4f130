"""`toque bench`, the whole line: it starts a server, measures it, stops it, and compares what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.parrot import CHAT_TEMPLATE, make_parrot
from toque.gateway.key_file import NAME, KeyFile

TOQUE = [sys.executable, "-m", "toque"]
DEAD = ("m", "--url", "http://127.0.0.1:9")  # nobody listens there


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "parrot"
    transitions = {"\n": "x", "x": "y", "y": "x"}
    return make_parrot(folder, transitions, chat_template=CHAT_TEMPLATE, context_length=16384)


def bench(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOQUE, "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={"TOQUE_HOME": str(home), "PATH": "/usr/bin:/bin", "TOQUE_API_KEY": "for-other-servers"},
        check=False,
    )


def test_the_standard_loads_against_a_server_of_its_own(parrot: Path, tmp_path: Path) -> None:
    report, home = tmp_path / "report.json", tmp_path / "home"
    KeyFile(home / NAME).create("tenant")  # this machine's keys do not stand in the way
    done = bench(
        str(parrot), "--requests", "4", "--concurrency", "2", "--output-tokens", "8", "--json", str(report),
        home=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(report.read_text())
    assert document["settings"]["lengths_in"] == "tokens"
    figures = {r["name"]: r["summary"] for r in document["results"]}
    assert list(figures) == ["sequential", "concurrent", "shared-prefix"]
    for r in figures.values():
        assert (r["requests"], r["failed"], r["output_tokens"]) == (4, 0, 32)
        assert 0 < r["ttft"]["p50"] <= r["ttft"]["p99"] <= r["e2e"]["p99"]
        assert r["output_tokens_per_second"] == pytest.approx(32 / r["seconds"])
    # The parrot has a token a letter: what was asked for in tokens is met up to a word's letters.
    assert figures["sequential"]["prompt_tokens"] / 4 == pytest.approx(99, rel=0.2)
    assert figures["shared-prefix"]["cached_tokens"] > 1000
    table = done.stdout
    assert all(word in table for word in ("sequential", "TTFT p95", "ITL p99", "TPOT mean", "E2E p50"))
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= 80
    assert not (home / "ledger").exists()  # a benchmark is no usage
    same = bench("compare", str(report), str(report), home=home)
    assert same.returncode == 0, same.stderr
    assert "+0.0%" in same.stdout
    assert "unclear" in same.stdout
    changes = json.loads(bench("compare", str(report), str(report), "--json", home=home).stdout)
    assert {c["ratio"] for c in changes if c["a"]} == {1.0}


def test_an_open_loop_of_conversations_over_completions_and_chat(parrot: Path, tmp_path: Path) -> None:
    page, table, report = (tmp_path / name for name in ("r.html", "r.csv", "r.json"))
    done = bench(
        str(parrot), "--profile", "poisson", "--rate", "20", "--dataset", "multi-turn", "--turns", "2",
        "--requests", "3", "--input-tokens", "20-30", "--output-tokens", "4", "--repeats", "2",
        "--slo", "ttft=30s,itl=30s", "--html", str(page), "--csv", str(table), "--json", str(report), home=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(report.read_text())["results"]
    assert result["name"] == "poisson 20/s"
    assert (result["summary"]["requests"], result["summary"]["goodput"]["met"]) == (12, 12)
    assert "goodput %" in done.stdout
    assert "poisson 20/s" in page.read_text()
    assert len(table.read_text().splitlines()) == 13


def test_json_on_standard_output_and_failures_as_exit_code_1(tmp_path: Path) -> None:
    done = bench(*DEAD, "--requests", "2", "--workload", "sequential", "--json", "-", home=tmp_path)
    assert done.returncode == 1
    (result,) = json.loads(done.stdout)["results"]
    assert (result["summary"]["requests"], result["summary"]["errors"]) == (2, {"connect": 2})
    assert result["summary"]["messages"]


def test_a_server_that_does_not_come_is_a_clear_error(tmp_path: Path) -> None:
    done = bench("no-such-model", home=tmp_path)
    assert done.returncode == 1
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ((*DEAD, "--profile", "constant", "--rate", "fast"), "--rate"),
        ((*DEAD, "--profile", "concurrent", "--concurrency", "0"), "--concurrency"),
        ((*DEAD, "--slo", "ttft=soon"), "--slo"),
        ((*DEAD, "--body", "[1]"), "--body"),
        (("m", "--url", "ftp://x"), "--url"),
        (("no-such-model", "--profile", "sweep", "--rate", "5"), "--rate"),  # before a server is started
    ],
)
def test_a_wrong_flag_is_named(arguments: tuple[str, ...], flag: str, tmp_path: Path) -> None:
    done = bench(*arguments, home=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"toque: {flag} ")
    assert "Traceback" not in done.stderr

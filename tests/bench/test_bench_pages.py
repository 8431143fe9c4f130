"""What a measurement leaves behind: JSON, CSV, and a page that needs nothing from anywhere."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from fixtures.scripted_server import Server, run
from toque.bench.client import Target
from toque.bench.dataset import Synthetic
from toque.bench.document import as_csv, document, read
from toque.bench.html import page
from toque.bench.lengths import Lengths
from toque.bench.run import ClosedLoop, Load, OpenLoop
from toque.bench.session import Session
from toque.bench.slo import Slo
from toque.bench.svg import Series, bar_chart, line_chart, nice_ticks, standalone

FACTS = {
    "model": "m<script>", "url": "http://server:1/v1/", "started": "2026-01-01T00:00:00+00:00",
    "settings": {"repeats": 2, "warm_up": 1},
}  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two loads, twice: one after another, and an open loop in which one request fails."""
    text = Synthetic(Lengths("fixed", 20), Lengths("fixed", 4))
    loads = [Load("one", text, ClosedLoop(), 3), Load("two", text, OpenLoop("constant", 2), 5)]
    session = Session(Target("server", 1, "/v1/", "m"), repeats=2)
    results = run(Server(status={6: 503}), session.run(loads), monkeypatch)
    return read(json.dumps(document(results, FACTS, Slo(ttft=0.2))).encode(), "x")


def test_the_document_has_every_request_and_the_figures_follow_from_them(report: dict[str, Any]) -> None:
    one, two = report["results"]
    assert (one["profile"], two["profile"]) == ("synchronous", "constant 2/s")
    assert one["dataset"] == "input 20, output 4"
    assert [len(r["samples"]) for r in one["repeats"] + two["repeats"]] == [3, 3, 5, 5]
    row = one["repeats"][0]["samples"][1]
    assert row["planned"] == pytest.approx(0.16)
    assert row["first"] - row["planned"] == pytest.approx(0.1)
    assert row["gaps_us"] == [20000] * 3
    assert (row["output_tokens"], row["error"]) == (4, "")
    assert two["summary"]["errors"] == {"HTTP 503": 1}
    failed = [r for run in two["repeats"] for r in run["samples"] if r["error"]]
    assert [(r["error"], r["first"]) for r in failed] == [("HTTP 503", None)]
    assert two["summary"]["goodput"]["met"] == 9


def test_the_csv_has_a_line_per_request(report: dict[str, Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(report))))
    assert len(rows) == 16
    assert [row["name"] for row in rows] == ["one"] * 6 + ["two"] * 10
    good = [row for row in rows if not row["error"]]
    assert {float(row["ttft"]) for row in good} == {0.1}
    assert {float(row["e2e"]) for row in good} == {0.16}
    assert {float(row["tpot"]) for row in good} == {0.02}
    assert {float(row["longest_gap"]) for row in good} == {0.02}
    (bad,) = [row for row in rows if row["error"]]
    assert (bad["ttft"], bad["tpot"]) == ("", "")


def test_the_page_has_the_figures_and_fetches_nothing(report: dict[str, Any]) -> None:
    text = page(report)
    assert "<script" not in text.replace("m&lt;script", "")
    for place in re.findall(r'(?:src|href)\s*=\s*"([^"]*)"|url\(|@import', text):
        pytest.fail(f"the page fetches {place}")
    assert set(re.findall(r"https?://[^\s\"<&]+", text)) == {
        "http://www.w3.org/2000/svg",
        "http://server:1/v1/",
    }
    assert "m&lt;script&gt;" in text
    assert "prefers-color-scheme: dark" in text
    for row in ("TTFT p95 ms", "TPOT mean ms", "ITL p99 ms", "E2E p50 ms", "goodput %", "send delay p99 ms"):
        assert f"<td>{row}</td>" in text
    assert "<td>TTFT p50 ms</td><td>100.0</td><td>100.0</td>" in text
    assert "HTTP 503" in text
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    titles = [ElementTree.fromstring(chart).get("aria-label") for chart in charts]
    assert titles == [
        "TTFT over offered rate", "ITL over offered rate", "E2E over offered rate", "Answered over offered",
        "Output rate", "TTFT: share of values up to", "ITL: share of values up to", "E2E: share of values up to",
    ]  # fmt: skip


@pytest.mark.parametrize("top", [1e-6, 0.7, 1.0, 3.3, 99.9, 100.0, 12345.0, 0.0, float("nan"), float("inf")])
def test_ticks_are_round_and_reach_the_top(top: float) -> None:
    ticks = nice_ticks(top)
    assert ticks[0] == 0
    assert 2 <= len(ticks) <= 12
    step = ticks[1]
    assert f"{step:e}"[0] in "125"
    assert ticks == pytest.approx([i * step for i in range(len(ticks))])
    if 0 < top < float("inf"):
        assert ticks[-1] >= top * 0.999 > ticks[-1] - 1.01 * step


def test_lines_and_bars_are_where_their_values_are() -> None:
    chart = ElementTree.fromstring(line_chart("t", "x", "y", [Series("a & b", [(0, 0), (5, 50), (10, 100)])]))
    (line,) = chart.findall(f"{SVG}polyline")
    points = [tuple(map(float, p.split(","))) for p in (line.get("points") or "").split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y1 == pytest.approx(y1 - y2)
    assert x2 > x0
    assert y2 < y0
    hints = [t.text for t in chart.iter(f"{SVG}title")]
    assert hints[1] == "a & b: 50 at 5"
    groups = [("g", [("ours", 10.0), ("theirs", 5.0)]), ("h", [("ours", 1.0)])]

    def lengths(own: bool) -> list[float]:
        found = ElementTree.fromstring(bar_chart("t", "tok/s", groups, own_scales=own))
        return [float(r.get("width") or 0) for r in found.findall(f"{SVG}rect") if r.get("height") == "12"]

    assert lengths(False) == [330, 165, 33]
    assert lengths(True) == [330, 165, 330]
    alone = ElementTree.fromstring(standalone(bar_chart("t", "", groups)))
    assert "dark" in (alone.find(f"{SVG}style").text or "")  # type: ignore[union-attr]
    ElementTree.fromstring(line_chart("nothing", "x", "y", [Series("empty", [])]))

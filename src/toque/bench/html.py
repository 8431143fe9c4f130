"""The report as one HTML page: figures, charts, settings; nothing is fetched from anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from toque.bench.svg import STYLE, Series, bar_chart, line_chart

_PAGE_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #57606a; --paper: #ffffff; --edge: #d9dee3; --band: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af; --paper: #0d1117; --edge: #343b44;
  --band: #161b22; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1180px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
p, li { color: var(--soft); max-width: 75ch; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--edge); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { background: var(--band); }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; align-items: start; }
.charts svg { max-width: 100%; height: auto; }
pre { background: var(--band); padding: 1rem; overflow-x: auto; }
"""
_MOST_POINTS = 200  # of a distribution's line


def page(report: dict[str, Any]) -> str:
    """From the JSON document of `document`."""
    results: list[dict[str, Any]] = report["results"]
    facts = {key: value for key, value in report.items() if key != "results"}
    title = f"{report['model']} at {report['url']}"
    body = [
        f"<h1>Benchmark of {escape(title)}</h1>",
        f"<p>{escape(report['started'])}, {report['settings']['repeats']} run(s) of each load, "
        f"{report['settings']['warm_up']} warm-up request(s) before each run not counted.</p>",
        *_table(results),
        '<h2>Charts</h2><div class="charts">',
        *_charts(results),
        "</div>",
        *_errors(results),
        "<h2>How it was measured</h2><ul>",
        "<li>Latencies count from the moment a request was due, also where this client sent it later (its delay is in "
        "the table): in the open loops (constant, poisson) those times are fixed before the first is sent, so a slow "
        "answer delays no other request and hides none.</li>",
        "<li>TTFT: until the first text. ITL: between two events with text. TPOT: from the first text to the last, per "
        "token after the first. E2E: until the answer's last byte. Percentiles are nearest ranks over the requests "
        "(gaps, for ITL) of all runs.</li>",
        "<li>Rates: answered requests over the time from the first planned send to the last byte.</li>",
        *_counting(results),
        f"</ul><h2>Settings</h2><pre>{escape(json.dumps(facts, indent=2))}</pre>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_PAGE_STYLE}{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def rows(summary: dict[str, Any]) -> dict[str, str]:
    """The figures of one load as people read them; also what the terminal shows."""
    lines = {
        "requests": str(summary["requests"]),
        "failed": str(summary["failed"]),
        "requests/s": f"{summary['requests_per_second']:.2f}",
        "output tokens/s": f"{summary['output_tokens_per_second']:.0f}",
        "total tokens/s": f"{summary['total_tokens_per_second']:.0f}",
    }
    for name, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2e")):
        for part, value in summary[key].items():
            lines[f"{name} {part} ms"] = f"{value * 1e3:.1f}"
    is_open, goodput = summary["offered_per_second"] is not None, summary["goodput"]
    lines["send delay p99 ms"] = f"{summary['send_delay']['p99'] * 1e3:.1f}" if is_open else ""
    lines["goodput %"] = f"{100 * goodput['share']:.1f}" if goodput else ""
    lines["good requests/s"] = f"{goodput['requests_per_second']:.2f}" if goodput else ""
    return lines


def figures(results: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """A line of cells for each figure that some load has: (name, a cell for each load)."""
    columns = [rows(result["summary"]) for result in results]
    lines = [(name, [column[name] for column in columns]) for name in (columns[0] if columns else ())]
    return [(name, cells) for name, cells in lines if any(cells)]


def _table(results: Sequence[dict[str, Any]]) -> list[str]:
    head = "".join(f"<th>{escape(result['name'])}</th>" for result in results)
    lines = [f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>']
    for name in ("profile", "dataset"):
        cells = "".join(f"<td>{escape(result[name])}</td>" for result in results)
        lines.append(f"<tr><td>{name}</td>{cells}</tr>")
    for name, values in figures(results):
        cells = "".join(f"<td>{value}</td>" for value in values)
        lines.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    lines.append("</tbody></table></div>")
    return lines


def _charts(results: Sequence[dict[str, Any]]) -> list[str]:
    rates = [(r["name"], [("output tokens/s", r["summary"]["output_tokens_per_second"])]) for r in results]
    charts = [_of_rate(results, key) for key in ("ttft", "itl", "e2e")] if _open(results) else []
    if _open(results):
        points = [
            (r["summary"]["offered_per_second"], r["summary"]["requests_per_second"]) for r in _open(results)
        ]
        good = [
            (r["summary"]["offered_per_second"], r["summary"]["goodput"]["requests_per_second"])
            for r in _open(results)
            if r["summary"]["goodput"]
        ]
        lines = [Series("answered", sorted(points)), Series("good", sorted(good))]
        charts.append(line_chart("Answered over offered", "offered requests/s", "requests/s", lines))
    charts.append(bar_chart("Output rate", "", rates))
    for key, name in (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "E2E")):
        lines = [Series(r["name"], _distribution(r, key), dots=False) for r in results]
        charts.append(line_chart(f"{name}: share of values up to", "ms", "%", lines))
    return charts


def _open(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in results if r["summary"]["offered_per_second"] is not None]


def _of_rate(results: Sequence[dict[str, Any]], key: str) -> str:
    lines = []
    for part in ("p50", "p95", "p99"):
        points = [(r["summary"]["offered_per_second"], 1e3 * r["summary"][key][part]) for r in _open(results)]
        lines.append(Series(part, sorted(points)))
    return line_chart(f"{key.upper()} over offered rate", "offered requests/s", "ms", lines)


def _distribution(result: dict[str, Any], key: str) -> list[tuple[float, float]]:
    """(milliseconds, percent of values that are no larger), thinned out evenly by rank."""
    good = [row for run in result["repeats"] for row in run["samples"] if not row["error"]]
    if key == "itl":
        values = [gap / 1e3 for row in good for gap in row["gaps_us"]]
    elif key == "ttft":
        values = [1e3 * (row["first"] - row["planned"]) for row in good if row["first"] is not None]
    else:
        values = [1e3 * (row["done"] - row["planned"]) for row in good]
    values.sort()
    ranks = (
        sorted({round(i * (len(values) - 1) / _MOST_POINTS) for i in range(_MOST_POINTS + 1)})
        if values
        else []
    )
    return [(values[rank], 100 * (rank + 1) / len(values)) for rank in ranks]


def _errors(results: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"<tr><td>{escape(r['name'])}</td><td>{escape(kind)}</td><td>{count}</td></tr>"
        for r in results
        for kind, count in r["summary"]["errors"].items()
    ]
    said = [f"<li>{escape(m)}</li>" for r in results for m in r["summary"]["messages"]]
    if not lines:
        return []
    head = "<h2>Errors</h2><table><thead><tr><th>load</th><th>kind</th><th>requests</th></tr></thead><tbody>"
    return [head, *lines, "</tbody></table><ul>", *said, "</ul>"]


def _counting(results: Sequence[dict[str, Any]]) -> list[str]:
    if all(r["summary"]["tokens_from"] == "usage" for r in results):
        return ["<li>Tokens are counted by the server's usage.</li>"]
    return [
        "<li>This server sends no usage (or not always): output tokens are the stream's events with text, and the "
        "prompts' tokens are not counted.</li>"
    ]

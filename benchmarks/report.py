"""What `make bench` writes: Markdown for people, JSON with every round, a chart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toque.bench.svg import bar_chart, standalone

_INTRO = """Medians of {rounds} interleaved rounds: in each, the machine's limits are measured, then every engine
once, in turns. A ratio is the median of the rounds' ratios. *Of the limit*: the share of what this machine, at the
best that was measured, allows for Toque's row, the lower of two limits: its DRAM bandwidth over the bytes that a token
reads (weights, and the KV cache while decoding), its int8 peak over the multiply-adds of a token. Floors are those of
a machine of two cores with AVX512-VNNI."""


def markdown(result: dict[str, Any]) -> str:
    limits, machine = result["limits"], result["machine"]
    bf16 = f"{limits['bf16_gmac_s']:.0f} GMAC/s" if limits["bf16_gmac_s"] else "no instruction for it"
    lines = [
        f"# Toque {result['versions'].get('toque', '')} beside its peers",
        "",
        f"{result['date']}, {machine['cpu']}, {result['threads']} threads, instruction set {machine['isa']}; load "
        f"average {machine['load_before']} before and {machine['load_after']} after.",
        "",
        _INTRO.format(rounds=result["rounds"]),
        "",
        f"| limit of this machine, {result['threads']} threads | measured |",
        "|---|---|",
        f"| DRAM read | {limits['dram_gb_s']:.1f} GB/s |",
        f"| int8 multiply-adds | {limits['int8_gmac_s']:.0f} GMAC/s |",
        f"| bfloat16 multiply-adds | {bf16} |",
        "",
        "Engines: "
        + ", ".join(f"{name} {version}" for name, version in sorted(result["versions"].items()))
        + ".",
        "",
        *_floors(result),
    ]
    for section in result["sections"]:
        lines += ["", f"## {section['title']}", ""]
        for model in section["models"]:
            lines += _model(model, heading=len(section["models"]) > 1)
    return "\n".join(lines) + "\n"


def _rows(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (model["title"], row)
        for section in result["sections"]
        for model in section["models"]
        for row in model["rows"]
    ]


def _floors(result: dict[str, Any]) -> list[str]:
    """Every row that aims at something, in one table."""
    rows = [(title, row) for title, row in _rows(result) if row.get("floor")]
    if not rows:
        return []
    reached = sum(row["verdict"] == "reached" for _, row in rows)
    lines = [
        f"## Floors: {reached} of {len(rows)} reached",
        "",
        "| row | floor | here | verdict |",
        "|---|---|---|---|",
    ]
    for title, row in rows:
        value = row["figures"].get("toque")
        here = "" if value is None else f"{_number(value)} {row['unit']}"
        lines.append(f"| {title}, {row['name']} | {row['floor']} | {here} | {row['verdict']} |")
    return lines


def _model(model: dict[str, Any], *, heading: bool) -> list[str]:
    engines = list(dict.fromkeys(e for row in model["rows"] for e in row["figures"]))
    peers = [e for e in engines if e != "toque"]
    lines = [f"### {model['title']}", ""] if heading else []
    if model.get("note"):
        lines += [model["note"], ""]
    for name, why in model.get("cannot_run", {}).items():
        lines += [f"{name} cannot run it: {why}", ""]
    if not model["rows"]:
        return lines
    limited = any("share" in row for row in model["rows"])
    head = ["", *engines, *(f"over {p}" for p in peers), *(["of the limit"] if limited else [])]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in model["rows"]:
        cells = [row["name"]]
        cells += [_number(row["figures"][e]) if e in row["figures"] else "–" for e in engines]
        cells += [f"{row['ratios'][p]:.2f}x" if p in row["ratios"] else "–" for p in peers]
        if limited:
            cells.append(f"{row['share']:.0%} ({row['limit']})" if "share" in row else "")
        lines.append("| " + " | ".join(cells) + " |")
    memory = model.get("resident_mb_after_load")
    if memory:
        lines.append(
            "| resident after load, MB | " + " | ".join(_number(memory.get(e, 0.0)) for e in engines) + " |"
        )
        lines[-1] += " |" * (len(peers) + 1)
    failed = {name: why for row in model["rows"] for name, why in row.get("failed", {}).items()}
    lines += [f"\n{name}: {why}" for name, why in failed.items()]
    return [*lines, ""]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def chart(result: dict[str, Any]) -> str:
    """Throughput of every row that a peer has as well; each row has a scale of its own."""
    groups = [
        (f"{title}, {row['name']}", list(row["figures"].items()))
        for title, row in _rows(result)
        if len(row["figures"]) > 1 and row["unit"] in ("tok/s", "output tok/s", "requests/s")
    ]
    return standalone(bar_chart("Tokens (or requests) a second", "", groups, own_scales=True))


def write(result: dict[str, Any], folder: Path) -> Sequence[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"bench.{suffix}" for suffix in ("json", "md", "svg")]
    texts = (json.dumps(result, indent=1) + "\n", markdown(result), chart(result))
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return paths

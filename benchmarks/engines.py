"""Rows of bare engines: interleaved rounds, each with the machine's limits measured beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import limits
from floors import DECODE_SHARE, PREFILL_SHARE, Floor, ModelRows, Row
from synthetic import model_path
from toque import _native
from toque.engine.options import EngineOptions
from toque.engine.plan import plan_memory
from toque.errors import ToqueError
from toque.formats import load_checkpoint
from toque.formats.quantize import quantize_checkpoint
from workers import CannotRun, Engine, Worker

_CHUNK = 512  # tokens of a prompt in a step


@dataclass(frozen=True)
class Cost:
    """What a token costs: bytes of weights that a step reads once, multiply-adds, and those of the output matrix (a
    prompt needs them for its last token only), bytes of KV cache per token of context."""

    weight_bytes: int
    products: int
    output_products: int
    kv_bytes: int


def compare(
    models: ModelRows, engines: Sequence[Engine], rounds: int, threads: int, machine: dict[str, float]
) -> dict[str, Any]:
    """All rows of one model: figures of every engine, ratios, shares of the limits, verdicts.

    ``machine`` has the highest limits measured so far and gets those that are seen here: what others on the machine
    took from a limit for a moment does not make it lower.
    """
    path = model_path(models)
    kind = "folder" if path.is_dir() else "gguf"
    try:
        price = cost(path, models.quantize)
    except ToqueError as error:
        cannot = {"toque": error.message}
        return {"title": models.title, "note": models.note, "versions": {}, "cannot_run": cannot, "rows": []}
    wanted = [e for e in engines if not models.engines or e.name in models.engines]
    wanted = [e for e in wanted if kind in e.formats]
    context = max(_room(row) for row in models.rows) + 64
    workers, missing = [], {}
    for engine in wanted:
        try:
            workers.append(Worker(engine, path, threads, context, 64, quantize=models.quantize))
        except CannotRun as error:
            missing[engine.name] = str(error)
    memory = {w.name: w.ask({"op": "memory"})["rss"] / 1e6 for w in workers}
    rows = [_row(row, workers, rounds, price, machine, threads) for row in models.rows]
    versions = {w.name: w.hello["version"] for w in workers}
    for worker in workers:
        worker.close()
    return {
        "title": models.title, "file": path.name, "note": models.note, "versions": versions, "cannot_run": missing,
        "resident_mb_after_load": memory, "rows": rows,
    }  # fmt: skip


def _room(row: Row) -> int:
    c = row.command
    if c["op"] != "decode":
        return int(c.get("tokens", 0))
    return int(c["batch"] * -(-(c["context"] + c["steps"]) // 32) * 32)


def cost(path: Path, quantize: str = "") -> Cost:
    checkpoint = load_checkpoint(path)
    if quantize:
        checkpoint = quantize_checkpoint(checkpoint, quantize)
    plan = plan_memory(checkpoint, EngineOptions(), _native.packed_size, _native.kv_bytes, None)
    output = checkpoint.config.vocab_size * checkpoint.config.hidden_size
    return Cost(plan.read_per_token, plan.multiplications, output, plan.kv_per_token)


def _row(
    row: Row, workers: list[Worker], rounds: int, price: Cost, machine: dict[str, float], threads: int
) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {w.name: [] for w in workers}
    failed: dict[str, str] = {}
    for worker in workers:
        try:
            worker.ask(dict(row.command))  # warm-up, not counted
        except CannotRun as error:
            failed[worker.name] = str(error)
    able = [w for w in workers if w.name not in failed]
    for turn in range(rounds):
        machine |= {k: max(machine.get(k, 0.0), v) for k, v in limits.measure(threads, 3).items()}
        for worker in able if turn % 2 == 0 else able[::-1]:
            speeds[worker.name].append(row.tokens / worker.ask(dict(row.command))["seconds"])
    figures = {name: statistics.median(values) for name, values in speeds.items() if values}
    # The ratio of each round, then the median: a slow minute hits both sides of its round.
    ratios = {
        name: statistics.median(a / b for a, b in zip(speeds["toque"], values, strict=True))
        for name, values in speeds.items()
        if name != "toque" and values and speeds.get("toque")
    }
    result: dict[str, Any] = {
        "name": row.name, "unit": "tok/s", "figures": figures, "ratios": ratios, "all": speeds, "failed": failed,
    }  # fmt: skip
    if speeds.get("toque"):
        result |= share(row, price, figures["toque"], machine)
        result["verdict"] = verdict(
            figures["toque"], row.floor, "tok/s", ratio=ratios.get("llama.cpp"), bound=result["bound"],
            limit=result["limit"], share=result["share"],
        )  # fmt: skip
        result["floor"] = row.floor.text("tok/s")
    return result


def share(row: Row, price: Cost, speed: float, machine: dict[str, float]) -> dict[str, Any]:
    """What the machine allows and which part of it was reached: the lower of two limits.

    A step reads its weights once and every sequence's KV cache; a token costs a multiply-add per weight. Attention's
    own products, norms and sampling are not counted, so a share is a lower bound.
    """
    c = row.command
    if c["op"] == "decode":
        per_token = price.weight_bytes / c["batch"] + c["context"] * price.kv_bytes
        products = float(price.products + price.output_products)
    elif c["op"] == "embed":  # no output matrix
        per_token = price.weight_bytes / row.tokens
        products = float(price.products)
    else:
        per_token = price.weight_bytes / min(c["tokens"], _CHUNK)
        products = price.products + price.output_products / c["tokens"]
    by_memory = machine["dram_gb_s"] * 1e9 / per_token
    by_products = machine["int8_gmac_s"] * 1e9 / products
    bound = min(by_memory, by_products)
    return {
        "share": speed / bound,
        "bound": bound,
        "limit": "DRAM read" if by_memory < by_products else "int8 peak",
        "bytes_read_per_token": round(per_token),
        "multiply_adds_per_token": round(products),
    }


def verdict(
    value: float, floor: Floor, unit: str, *, ratio: float | None = None, bound: float | None = None,
    limit: str = "", share: float | None = None,
) -> str:  # fmt: skip
    """Reached, or by how much it misses and why, as far as figures of this run can say."""
    if floor.ratio is not None:
        if ratio is None:
            return "no peer to compare with"
        return (
            "reached" if ratio >= floor.ratio else f"misses by {1 - ratio / floor.ratio:.0%} ({ratio:.2f}x)"
        )
    if floor.at_least is None and floor.at_most is None:
        return ""
    if floor.at_least is not None:
        if value >= floor.at_least:
            return "reached"
        missing = f"misses by {1 - value / floor.at_least:.0%}"
    else:
        assert floor.at_most is not None
        if value <= floor.at_most:
            return "reached"
        missing = f"misses by {value / floor.at_most - 1:.0%}"
    if bound is None:
        return missing
    if floor.at_least is None:
        allows = f"the {limit} alone takes {_round(bound)} {unit}"
        return f"{missing}; {allows}"
    if bound < floor.at_least:
        return f"{missing}: this machine's {limit} allows {_round(bound)} {unit} at most"
    if share is None:
        return f"{missing}: {value / bound:.0%} of what the {limit} allows"
    aim = DECODE_SHARE if limit == "DRAM read" else PREFILL_SHARE
    of = f"{share:.0%} of what the {limit} allows"
    if share >= aim:
        return f"{missing}: at {of}, which is the share aimed at ({aim:.0%})"
    return f"{missing}: only {of}"


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def only(rows: ModelRows, word: str) -> ModelRows:
    """The rows whose name has the word."""
    return replace(rows, rows=tuple(r for r in rows.rows if word in f"{rows.title}, {r.name}"))


def short(rows: ModelRows) -> ModelRows:
    """Without the rows whose preparation takes a minute."""
    return replace(rows, rows=tuple(r for r in rows.rows if r.command.get("context", 0) < 1000))

"""`make bench`: Toque beside its peers on this machine, with the machine's own limits; a report that anyone can repeat.

    python benchmarks/compare.py [--quick] [--rounds 5] [--peers llama.cpp,openvino,vllm] [--only WORD] [--out reports]

Peers are installed from PyPI into environments of their own (`.cache/peers`), once; `workers.py` names the variables
that point to environments which have them already. One engine computes at any moment. `--quick` takes a few minutes:
fewer rounds, formats and families, shorter loads. Writes bench.md, bench.json and bench.svg.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import engines
import limits
import report
import servers
import synthetic
from floors import MODELS, USUAL, ModelRows
from toque import _native
from workers import ENGINES, Engine

SECTIONS = ("models", "formats", "families", "servers", "start", "streams")
_SERVER_NOTE = (
    "99 tokens in, 64 out: 20 chats one after another, 100 at once, 50 over a common beginning of 1,000 tokens with 8 "
    "at a time (5, 24 and 12 with `--quick`). Client and server share the cores. llama.cpp's server gets as many slots "
    "as the load has requests in flight, 64 at most."
)
_START_NOTE = (
    "From the start of the process to the first token over HTTP, files in the page cache. Resident memory is the "
    "proportional set size of the server's processes after a first answer, with room for 8 streams of 8k tokens."
)
_STREAMS_NOTE = (
    "The clients run on the same cores. First: 16 divided by the median gap of 16 streams, over the bare engine's "
    "decode of 16 sequences at the same context, in turns. Second: 8 streams while a long prompt is prefilled."
)
_FORMATS_NOTE = (
    "One llama of 88 million weights (8 layers of 768, feed-forward 2,048, 49,152 words) with random weights in every "
    "format; tokens/s. Formats that llama.cpp has no file for are Toque's alone."
)
_FAMILIES_NOTE = (
    "transformers' architectures at one small size (6 layers of 512, feed-forward 1,536, 32,000 words), random "
    "bfloat16 weights quantized to int8 while loading: no real model of most families is at hand here. Such small "
    "weights stay partly in the caches, so a share of DRAM may pass 100 %. Tokens/s."
)
_QUICK_FORMATS, _QUICK_FAMILIES = ("Q4_0", "Q4_K", "int8 W8A8"), ("qwen3", "gemma3")


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")]
    return f"{names[0] if names else platform.processor()} x {len(os.sched_getaffinity(0))}"


def load_average() -> str:
    return f"{os.getloadavg()[0]:.1f}"


class Run:
    """What was asked for, and the report as far as it is done: it is written after every section."""

    def __init__(self, options: argparse.Namespace, peers: Sequence[Engine]) -> None:
        self.options = options
        self.engines = [ENGINES["toque"], *peers]
        self.rounds = options.rounds or (2 if options.quick else 5)
        self.result: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "machine": {"cpu": cpu(), "isa": _native.resolve_isa(""), "load_before": load_average()},
            "threads": options.threads,
            "rounds": self.rounds,
            "quick": options.quick,
            "limits": limits.measure(options.threads, 7),
            "versions": {},
            "sections": [],
        }

    def section(self, title: str, parts: Sequence[Callable[[], dict[str, Any]]]) -> None:
        models: list[dict[str, Any]] = []
        self.result["sections"].append({"title": title, "models": models})
        for part in parts:
            model = part()
            if not model["rows"] and not model.get("cannot_run"):
                continue
            models.append(model)
            self.result["versions"] |= model.get("versions", {})
            print(f"{title}: {model['title']} done", flush=True)
            self.write()

    def write(self) -> None:
        self.result["machine"]["load_after"] = load_average()
        again = limits.measure(self.options.threads, 3)
        self.result["limits"] = {k: max(v, again[k]) for k, v in self.result["limits"].items()}
        report.write(self.result, self.options.out)

    def bare(self, title: str, models: Sequence[ModelRows]) -> None:
        """A section of bare engines."""
        wanted = [engines.only(m, self.options.only) for m in models]
        parts = [functools.partial(self.compare, m) for m in wanted if m.rows]
        if parts:
            self.section(title, parts)

    def compare(self, models: ModelRows) -> dict[str, Any]:
        return engines.compare(models, self.engines, self.rounds, self.options.threads, self.result["limits"])

    def speeds(self, title: str) -> dict[str, float]:
        """Toque's figures for a model, as far as this run has them."""
        models = [m for section in self.result["sections"] for m in section["models"] if m["title"] == title]
        return {
            row["name"]: row["figures"]["toque"]
            for m in models
            for row in m["rows"]
            if "toque" in row["figures"]
        }

    def table(self, title: str, note: str, models: Sequence[ModelRows]) -> None:
        """Many models in one table."""

        def together() -> dict[str, Any]:
            whole: dict[str, Any] = {
                "title": title,
                "note": note,
                "rows": [],
                "versions": {},
                "cannot_run": {},
            }
            for model in models:
                wanted = engines.only(model, self.options.only)
                found = (
                    self.compare(wanted) if wanted.rows else {"versions": {}, "cannot_run": {}, "rows": []}
                )
                whole["versions"] |= found["versions"]
                whole["cannot_run"] |= {f"{e}, {model.title}": why for e, why in found["cannot_run"].items()}
                whole["rows"] += [row | {"name": f"{model.title}, {row['name']}"} for row in found["rows"]]
            return whole

        self.section(title, [together])


def serve_rows(run: Run, wanted: Sequence[str]) -> None:
    """Sections that start servers, on SmolLM2."""
    options = run.options
    threads, quick = options.threads, options.quick
    model = synthetic.MODELS / synthetic.SMOLLM2
    files = dict.fromkeys(servers.servers_asked([e.name for e in run.engines]), model)
    if "vllm" in files:
        files["vllm"] = synthetic.float_model(model)

    def server() -> dict[str, Any]:
        rows = servers.compare(files, threads, 1 if quick else 3, quick, run.speeds(MODELS[0].title))
        return {"title": "SmolLM2-135M Q4_1 served", "note": _SERVER_NOTE, "rows": rows}

    def start() -> dict[str, Any]:
        rows = [servers.cold_start(files, threads, 2 if quick else 5), servers.resident(files, threads)]
        return {"title": "SmolLM2-135M Q4_1, start", "note": _START_NOTE, "rows": rows}

    def streams() -> dict[str, Any]:
        rows = [
            servers.under_load(model, threads, run.rounds, quick),
            servers.prefilling(model, threads, quick),
        ]
        return {"title": "SmolLM2-135M Q4_1, running streams", "note": _STREAMS_NOTE, "rows": rows}

    for name, title, part in (
        ("servers", "Servers", server), ("start", "Start and memory", start), ("streams", "Running streams", streams),
    ):  # fmt: skip
        if name in wanted:
            run.section(title, [part])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=0, help="0: 5, or 2 with --quick")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peers", default="llama.cpp", help="of llama.cpp, openvino, vllm; empty for none")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of %(default)s")
    parser.add_argument("--only", default="", help="of bare engines, only the rows whose name contains this")
    parser.add_argument("--model", default="", help="only the usual rows of this file")
    parser.add_argument("--out", type=Path, default=synthetic.ROOT / "reports")
    options = parser.parse_args()
    names = [name for name in options.peers.split(",") if name]
    wanted = options.sections.split(",")
    for unknown in {*names} - {*ENGINES} | {*wanted} - {*SECTIONS}:
        parser.error(
            f"{unknown!r} is neither a peer ({', '.join(ENGINES)}) nor a section ({', '.join(SECTIONS)})"
        )
    run = Run(options, [ENGINES[name] for name in names if name != "toque"])
    if options.model:
        run.bare("Models", [ModelRows(Path(options.model).stem, options.model, USUAL)])
        wanted = []
    if "models" in wanted:
        run.bare("Models", [engines.short(MODELS[0])] if options.quick else MODELS)
    if "formats" in wanted:
        some = [m for m in synthetic.format_rows() if not options.quick or m.title in _QUICK_FORMATS]
        run.table("Formats", _FORMATS_NOTE, some)
    if "families" in wanted:
        some = [m for m in synthetic.family_rows() if not options.quick or m.title in _QUICK_FAMILIES]
        run.table("Families", _FAMILIES_NOTE, some)
    if not options.only:
        serve_rows(run, wanted)
    run.write()
    print((options.out / "bench.md").read_text())


if __name__ == "__main__":
    main()

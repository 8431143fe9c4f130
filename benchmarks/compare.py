"""Side by side with llama.cpp on the same file: interleaved rounds, medians and ratios.

    python benchmarks/compare.py [--rounds 7] [--model SmolLM2-135M-Instruct.Q4_1.gguf] [--out reports]

`llama-cpp-python` is installed from PyPI into an environment of its own (`.cache/peers/llama-cpp`), once; set
TOQUE_PEER_LLAMA_CPP to the python of an environment that already has it. Each engine is one process that loads the
model once and then answers one command at a time, so that only one engine computes at any moment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CASES: dict[str, dict[str, Any]] = {
    "prefill 512": {"op": "prefill", "tokens": 512},
    "prefill 2048": {"op": "prefill", "tokens": 2048},
    "decode batch 1, context 128": {"op": "decode", "batch": 1, "context": 128, "steps": 48},
    "decode batch 4, context 128": {"op": "decode", "batch": 4, "context": 128, "steps": 16},
    "decode batch 16, context 128": {"op": "decode", "batch": 16, "context": 128, "steps": 8},
    "decode batch 64, context 128": {"op": "decode", "batch": 64, "context": 128, "steps": 4},
}


class Worker:
    """One engine in a process of its own."""

    def __init__(self, name: str, python: str, script: str, arguments: list[str]) -> None:
        self.name = name
        environment = {
            k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
        }
        self.process = subprocess.Popen(
            [python, str(ROOT / "benchmarks" / "peers" / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.hello = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with exit code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def peer_python() -> str:
    """The python of the llama.cpp environment, which is made when it is not there (some minutes, once)."""
    given = os.environ.get("TOQUE_PEER_LLAMA_CPP")
    if given:
        return given
    folder = ROOT / ".cache" / "peers" / "llama-cpp"
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        print("installing llama-cpp-python (compiles for some minutes, once)", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", "llama-cpp-python", "numpy"], check=True
        )
        (folder / ".ready").touch()
    return str(python)


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")]
    return f"{names[0] if names else platform.processor()} x {len(os.sched_getaffinity(0))}"


def tokens_of(case: dict[str, Any]) -> int:
    return int(case["tokens"] if case["op"] == "prefill" else case["batch"] * case["steps"])


def compare(model: Path, rounds: int, threads: int, only: str) -> dict[str, Any]:
    arguments = [str(model), str(threads), "16384", "64"]
    workers = [
        Worker("toque", sys.executable, "toque_worker.py", arguments),
        Worker("llama.cpp", peer_python(), "llama_cpp_worker.py", arguments),
    ]
    cases = {name: case for name, case in CASES.items() if only in name}
    speeds: dict[str, dict[str, list[float]]] = {c: {w.name: [] for w in workers} for c in cases}
    for name, case in cases.items():
        for worker in workers:
            worker.ask(case)  # warm-up, not counted
        for turn in range(rounds):
            order = workers if turn % 2 == 0 else workers[::-1]
            for worker in order:
                seconds = worker.ask(case)["seconds"]
                speeds[name][worker.name].append(tokens_of(case) / seconds)
    memory = {w.name: w.ask({"op": "memory"})["rss"] for w in workers}
    versions = {w.name: w.hello["version"] for w in workers}
    for worker in workers:
        worker.close()
    rows = []
    for name, figures in speeds.items():
        medians = {peer: statistics.median(values) for peer, values in figures.items()}
        # The ratio of each round, then the median: a slow minute hits both sides of its round.
        ratio = statistics.median(a / b for a, b in zip(figures["toque"], figures["llama.cpp"], strict=True))
        rows.append({"case": name, "tokens_per_second": medians, "ratio": ratio, "all": figures})
    return {
        "model": model.name, "machine": cpu(), "threads": threads, "rounds": rounds,
        "versions": versions, "rss": memory, "rows": rows,
    }  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    lines = [
        f"# {result['model']} on {result['machine']}, {result['threads']} threads",
        "",
        f"Medians of {result['rounds']} interleaved rounds; toque {result['versions']['toque']}, "
        f"llama-cpp-python {result['versions']['llama.cpp']}.",
        "",
        "| tok/s | toque | llama.cpp | ratio |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        speed = row["tokens_per_second"]
        lines.append(
            f"| {row['case']} | {speed['toque']:.0f} | {speed['llama.cpp']:.0f} | {row['ratio']:.2f} |"
        )
    lines.append(
        f"| resident memory, MB | {result['rss']['toque'] / 1e6:.0f} | {result['rss']['llama.cpp'] / 1e6:.0f} | |"
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct.Q4_1.gguf", help="a file, or a name in .cache/models"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="", help="run only the cases whose name contains this")
    parser.add_argument("--out", type=Path, default=ROOT / "reports")
    options = parser.parse_args()
    model = Path(options.model)
    if not model.exists():
        model = ROOT / ".cache" / "models" / options.model
    result = compare(model, options.rounds, options.threads, options.only)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"compare-{model.stem}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    text = markdown(result)
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

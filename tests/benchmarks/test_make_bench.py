"""`make bench`: workers that answer or say why not, shares of limits, verdicts, and the report that holds them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from fixtures.parrot import make_parrot
from toque.formats.checkpoint import TensorData
from toque.formats.dequant import dequantize

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of the folder, which imports its neighbours by their plain names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    __import__(name)
    return sys.modules[name]


def test_shares_follow_from_bytes_and_products(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, floors = load("engines", monkeypatch), load("floors", monkeypatch)
    price = engines.Cost(
        weight_bytes=100_000_000, products=100_000_000, output_products=10_000_000, kv_bytes=20_000
    )
    machine = {"dram_gb_s": 20.0, "int8_gmac_s": 100.0}

    def share(row: Any, speed: float) -> dict[str, Any]:
        found: dict[str, Any] = engines.share(row, price, speed, machine)
        return found

    one = share(floors.decode(1, context=1000), 80.0)
    assert one["bound"] == pytest.approx(20e9 / (100e6 + 1000 * 20e3))
    assert (one["limit"], one["share"]) == ("DRAM read", pytest.approx(80 / one["bound"]))
    many = share(floors.decode(64), 500.0)
    assert (many["limit"], many["bound"]) == ("int8 peak", pytest.approx(100e9 / 110e6))
    prompt = share(floors.prefill(512), 800.0)
    assert (prompt["limit"], prompt["bound"]) == ("int8 peak", pytest.approx(100e9 / 100e6, rel=1e-3))
    assert prompt["share"] == pytest.approx(0.8, rel=1e-3)


@pytest.mark.model
def test_what_a_token_of_a_real_model_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, synthetic = load("engines", monkeypatch), load("synthetic", monkeypatch)
    price = engines.cost(synthetic.MODELS / synthetic.SMOLLM2)
    layer = 576 * (576 + 192 + 192 + 576 + 3 * 1536)
    assert price.products == pytest.approx(30 * layer, rel=0.03)  # of the last layer not all, in a prompt
    assert price.output_products == 49_152 * 576
    assert price.weight_bytes == pytest.approx(30 * layer * 0.625 + price.output_products * 34 / 32, rel=0.01)


def test_verdicts_say_by_how_much_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, floors = load("engines", monkeypatch), load("floors", monkeypatch)
    verdict, floor = engines.verdict, floors.Floor
    assert verdict(100, floor(), "tok/s") == ""
    assert verdict(100, floor(100), "tok/s") == "reached"
    assert verdict(60, floor(100), "tok/s") == "misses by 40%"
    assert verdict(4.9, floor(at_most=5), "s") == "reached"
    assert verdict(6, floor(at_most=5), "s") == "misses by 20%"
    assert verdict(6, floor(at_most=5), "s", bound=5.5, limit="bare engine") == (
        "misses by 20%; the bare engine alone takes 5.5 s"
    )
    impossible = verdict(60, floor(100), "tok/s", bound=80, limit="DRAM read", share=0.75)
    assert impossible == "misses by 40%: this machine's DRAM read allows 80 tok/s at most"
    assert verdict(60, floor(100), "tok/s", bound=200, limit="DRAM read", share=0.3).endswith(
        "only 30% of what the DRAM read allows"
    )
    assert "the share aimed at (50%)" in verdict(
        60, floor(100), "tok/s", bound=110, limit="int8 peak", share=0.55
    )
    assert verdict(60, floor(ratio=4), "tok/s", ratio=4.5) == "reached"
    assert verdict(60, floor(ratio=4), "tok/s", ratio=3.0) == "misses by 25% (3.00x)"
    assert verdict(60, floor(ratio=4), "tok/s") == "no peer to compare with"


def test_what_the_bare_engine_leaves_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = load("servers", monkeypatch)
    speeds = {
        "prefill 512": 990.0, "decode batch 1, context 128": 64.0, "decode batch 16, context 128": 320.0,
        "decode batch 64, context 128": 640.0,
    }  # fmt: skip
    sequential, concurrent, shared = servers.loads(quick=False)
    assert servers.bounds(sequential, speeds) == pytest.approx({"requests/s": 1 / 1.1, "TTFT p50, ms": 100})
    assert servers.bounds(concurrent, speeds) == pytest.approx({"output tok/s": 64 / 0.2, "TTFT p95, s": 9.5})
    assert servers.bounds(shared, speeds) == pytest.approx({"output tok/s": 64 / 0.3})
    assert servers.bounds(sequential, {}) == {}


def test_random_blocks_of_every_format_are_finite_and_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic = load("synthetic", monkeypatch)
    rng = np.random.default_rng(0)
    assert {
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_NL",
        "MXFP4",
        "BF16",
        "F16",
    } <= set(synthetic.GGUF_FORMATS)
    for dtype in synthetic.GGUF_FORMATS:
        raw = synthetic.random_blocks(dtype, 6, 512, rng)
        values = dequantize(TensorData("x", dtype, (6, 512), raw))
        assert values.shape == (6, 512), dtype
        assert np.isfinite(values).all(), dtype
        assert 0 < np.abs(values).max() < 10, dtype


def worker(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker of our own in place of an engine's."""
    workers = load("workers", monkeypatch)
    script = folder / "worker.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(BENCHMARKS / 'peers')!r})\n{text}")
    return workers, workers.Engine("engine", str(script))


def test_a_worker_answers_a_line_for_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, engine = worker(
        "from protocol import ids, serve\n"
        "class Peer:\n"
        "    def __init__(self, path, threads, context, sequences): self.sizes = threads, context, sequences\n"
        "    def prefill(self, tokens): return float(tokens) + self.sizes[1]\n"
        "    def generate(self, tokens, n): return ids(n, 1000)\n"
        "    def decode(self, batch, context, steps): raise ValueError('too many')\n"
        "print('a banner')\n"
        "serve(Peer, '1.2')\n",
        tmp_path, monkeypatch,
    )  # fmt: skip
    with workers.Worker(engine, Path("model"), 2, 640, 8) as running:
        assert running.hello["version"] == "1.2"
        assert running.ask({"op": "prefill", "tokens": 5}) == {"seconds": 645.0}
        assert running.ask({"op": "memory"})["rss"] > 1_000_000
        assert len(set(running.ask({"op": "generate", "tokens": [1], "n": 50})["tokens"])) > 40
        with pytest.raises(workers.CannotRun, match="ValueError: too many"):
            running.ask({"op": "decode", "batch": 1, "context": 1, "steps": 1})
        assert running.ask({"op": "prefill", "tokens": 6}) == {"seconds": 646.0}  # it goes on


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "from protocol import serve\ndef make(*_): raise OSError('no such format')\nserve(make, '1')\n",
            "no such format",
        ),
        ("raise SystemExit('not installed')\n", "not installed"),
        ("pass\n", "ended with exit code 0"),
    ],
)
def test_an_engine_that_cannot_run_says_why(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, engine = worker(text, tmp_path, monkeypatch)
    with pytest.raises(workers.CannotRun, match=why):
        workers.Worker(engine, Path("model"), 1, 64, 1)


def test_our_worker_runs_the_model_that_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parrot says x after x: what is timed is the model, not a stand-in."""
    workers = load("workers", monkeypatch)
    parrot = make_parrot(tmp_path / "parrot", {"x": "x"}, context_length=512)
    with workers.Worker(workers.TOQUE, parrot, 1, 512, 4) as running:
        (token,) = set(running.ask({"op": "generate", "tokens": [ord("x")] * 3, "n": 1})["tokens"])
        assert running.ask({"op": "generate", "tokens": [token], "n": 4})["tokens"] == [token] * 4
        assert running.ask({"op": "prefill", "tokens": 40})["seconds"] > 0
        assert running.ask({"op": "decode", "batch": 4, "context": 33, "steps": 2})["seconds"] > 0
        path = Path(running.ask({"op": "logits", "tokens": [token, token]})["path"])
        assert np.load(path).argmax(axis=1).tolist() == [token, token]
        path.unlink()


def result() -> dict[str, Any]:
    rows = [
        {
            "name": "prefill 512", "unit": "tok/s", "figures": {"toque": 900.0, "llama.cpp": 300.0},
            "ratios": {"llama.cpp": 3.1}, "all": {}, "failed": {}, "share": 0.55, "limit": "int8 peak", "bound": 1600.0,
            "floor": "2,000 tok/s", "verdict": "misses by 55%",
        },
        {
            "name": "decode", "unit": "tok/s", "figures": {"toque": 12.34}, "ratios": {}, "all": {},
            "failed": {"llama.cpp": "too long"}, "share": 0.4, "limit": "DRAM read", "bound": 30.0, "floor": "10 tok/s",
            "verdict": "reached",
        },
    ]  # fmt: skip
    model = {"title": "M & N", "note": "made up", "cannot_run": {"vllm": "no"}, "rows": rows,
             "resident_mb_after_load": {"toque": 200.0, "llama.cpp": 400.0}}  # fmt: skip
    return {
        "date": "2026-01-01", "machine": {"cpu": "C", "isa": "avx2", "load_before": "0.1", "load_after": "0.2"},
        "threads": 2, "rounds": 5, "versions": {"toque": "1"}, "sections": [{"title": "Models", "models": [model]}],
        "limits": {"dram_gb_s": 20.0, "int8_gmac_s": 100.0, "bf16_gmac_s": 0.0},
    }  # fmt: skip


def test_the_report_has_every_figure_and_an_honest_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = load("report", monkeypatch)
    paths = report.write(result(), tmp_path)
    assert [p.name for p in paths] == ["bench.json", "bench.md", "bench.svg"]
    text = paths[1].read_text()
    for line in (
        "## Floors: 1 of 2 reached",
        "| M & N, prefill 512 | 2,000 tok/s | 900 tok/s | misses by 55% |",
        "| prefill 512 | 900 | 300 | 3.10x | 55% (int8 peak) |",
        "| decode | 12.3 | – | – | 40% (DRAM read) |",
        "| resident after load, MB | 200 | 400 | | |",
        "| bfloat16 multiply-adds | no instruction for it |",
        "vllm cannot run it: no",
        "llama.cpp: too long",
    ):
        assert line in text.splitlines(), line
    assert json.loads(paths[0].read_text()) == result()
    chart = ElementTree.fromstring(paths[2].read_text())
    hints = [t.text for t in chart.iter("{http://www.w3.org/2000/svg}title")]
    assert hints == ["M & N, prefill 512, toque: 900 ", "M & N, prefill 512, llama.cpp: 300 "]


def test_limits_are_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = load("limits", monkeypatch)
    monkeypatch.setattr(limits, "BUFFER", 1 << 20)
    monkeypatch.setattr(limits, "ROUNDS", 1000)
    limits.memory.cache_clear()
    found = limits.measure(2, 1)
    limits.memory.cache_clear()
    assert found["dram_gb_s"] > 0
    assert found["int8_gmac_s"] > 0
    assert found["bf16_gmac_s"] >= 0

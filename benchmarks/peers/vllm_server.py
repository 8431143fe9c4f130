"""vLLM's server on a folder with safetensors.

python vllm_server.py MODEL PORT THREADS STREAMS TOKENS
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    model, port, threads, streams, tokens = sys.argv[1], *map(int, sys.argv[2:6])
    os.environ |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    command = [
        "serve",
        model,
        "--port",
        str(port),
        "--max-model-len",
        str(tokens),
        "--max-num-seqs",
        str(streams),
    ]
    script = Path(sys.executable).with_name("vllm")
    os.execv(script, [str(script), *command])


if __name__ == "__main__":
    main()

"""llama.cpp's own server (continuous batching, OpenAI API), from the `xllamacpp` package: its binary as a library.

python llama_cpp_server.py MODEL.gguf PORT THREADS SLOTS TOKENS_PER_SLOT
"""

from __future__ import annotations

import signal
import sys

import xllamacpp


def main() -> None:
    model, port, threads, slots, tokens = sys.argv[1], *map(int, sys.argv[2:6])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_parallel = slots
    params.n_ctx = slots * tokens
    params.kv_unified = False  # a cache of its own for each slot: faster here than one that all search
    params.n_batch, params.n_ubatch = 2048, 512
    params.n_threads_http = max(slots + 2, 4)
    params.warmup = False
    params.verbosity = 1  # errors
    server = xllamacpp.Server(params)  # answers as long as it lives
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    main()

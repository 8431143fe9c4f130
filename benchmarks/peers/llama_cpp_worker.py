"""llama.cpp as a benchmark worker (see `protocol`), through the C API of `llama-cpp-python`."""

from __future__ import annotations

import ctypes
import tempfile
import time

import llama_cpp
import numpy as np
from protocol import ids, serve


class Peer:
    def __init__(self, path: str, threads: int, context: int, sequences: int) -> None:
        llama_cpp.llama_backend_init()
        silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        self._silent = silent  # keep the callback alive
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = 2048
        params.n_ubatch = 512
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(4096, 0, 1)
        self.held = (0, 0)  # sequences and tokens of each that the cache holds for decoding

    def clear(self) -> None:
        self.held = (0, 0)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Run one batch of (token, position, sequence, wants logits)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        status = llama_cpp.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def prefill(self, tokens: int) -> float:
        self.clear()
        prompt = ids(tokens, self.vocab)
        start = time.perf_counter()
        for first in range(0, tokens, 2048):
            chunk = prompt[first : first + 2048]
            self.run([(t, first + i, 0, first + i == tokens - 1) for i, t in enumerate(chunk)])
        llama_cpp.llama_get_logits_ith(self.context, -1)
        return time.perf_counter() - start

    def decode(self, batch: int, context: int, steps: int) -> float:
        if self.held != (batch, context):
            self.clear()
            for s in range(batch):
                prompt = ids(context, self.vocab, s)
                for first in range(0, context, 2048):
                    part = prompt[first : first + 2048]
                    self.run([(t, first + i, s, first + i == context - 1) for i, t in enumerate(part)])
            self.held = (batch, context)
        start = time.perf_counter()
        for step in range(steps):
            self.run([(t, context + step, s, True) for s, t in enumerate(ids(batch, self.vocab, step))])
            for s in range(batch):
                row = llama_cpp.llama_get_logits_ith(self.context, s)
                np.argmax(np.ctypeslib.as_array(row, (self.vocab,)))
        seconds = time.perf_counter() - start
        for s in range(batch):  # back to the prompt, so that the next round starts from the same place
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), s, context, -1)
        return seconds

    def logits(self, tokens: list[int]) -> str:
        self.clear()
        self.run([(t, i, 0, True) for i, t in enumerate(tokens)])
        out = np.stack(
            [
                np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, i), (self.vocab,)).copy()
                for i in range(len(tokens))
            ]
        )
        with tempfile.NamedTemporaryFile(suffix=".npy", delete=False) as file:
            np.save(file, out)
        return file.name

    def generate(self, tokens: list[int], n: int) -> list[int]:
        self.clear()
        out: list[int] = []
        rows = [(t, i, 0, i == len(tokens) - 1) for i, t in enumerate(tokens)]
        while len(out) < n:
            self.run(rows)
            row = llama_cpp.llama_get_logits_ith(self.context, -1)
            out.append(int(np.argmax(np.ctypeslib.as_array(row, (self.vocab,)))))
            rows = [(out[-1], len(tokens) + len(out) - 1, 0, True)]
        return out


if __name__ == "__main__":
    serve(Peer, llama_cpp.__version__)

"""vLLM's CPU build as a benchmark worker (see `protocol`), on a folder with safetensors, in one process."""

from __future__ import annotations

import os
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm
from protocol import ids, serve


class Peer:
    def __init__(self, path: str, threads: int, context: int, sequences: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        self.llm = vllm.LLM(
            path, max_model_len=8192, max_num_seqs=sequences, enable_prefix_caching=False, seed=0
        )
        self.vocab = self.llm.llm_engine.model_config.get_vocab_size()

    def run(self, prompts: list[list[int]], n: int) -> float:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - start

    def prefill(self, tokens: int) -> float:
        return self.run([ids(tokens, self.vocab)], 1)

    def decode(self, batch: int, context: int, steps: int) -> float:
        """The difference of two runs: one that ends with the first tokens, one that goes on for ``steps`` more."""
        prompts = [ids(context, self.vocab, s) for s in range(batch)]
        return max(self.run(prompts, steps + 1) - self.run(prompts, 1), 1e-9)


if __name__ == "__main__":
    serve(Peer, vllm.__version__)

"""OpenVINO GenAI as a benchmark worker (see `protocol`): continuous batching over the GGUF file it converts itself."""

from __future__ import annotations

import time

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import ids, serve


class Peer:
    def __init__(self, path: str, threads: int, context: int, sequences: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 16_384  # all prompts of a batch in one step
        scheduler.max_num_seqs = sequences
        scheduler.cache_size = 1  # GB
        self.pipe = genai.LLMPipeline(path, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads)
        self.vocab = len(self.pipe.get_tokenizer().get_vocab())

    def run(self, prompts: list[list[int]], n: int) -> list[float]:
        """Seconds at which each step's tokens came, from the first on; every prompt gets ``n`` tokens."""
        config = genai.GenerationConfig(max_new_tokens=n, ignore_eos=True, do_sample=False)
        tokens = np.array(prompts, np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(tokens), ov.Tensor(np.ones_like(tokens)))
        result = self.pipe.generate(inputs, config)
        times = list(result.perf_metrics.raw_metrics.m_new_token_times)
        return [(t - times[0]) / 1e3 for t in times]

    def prefill(self, tokens: int) -> float:
        start = time.perf_counter()
        self.run([ids(tokens, self.vocab)], 1)
        return time.perf_counter() - start

    def decode(self, batch: int, context: int, steps: int) -> float:
        times = self.run([ids(context, self.vocab, s) for s in range(batch)], steps + 2)
        return times[-1] - times[1]  # the first step may still be part of the prompts'


if __name__ == "__main__":
    serve(Peer, genai.__version__)

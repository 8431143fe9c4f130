"""The threads behind a step: asleep between steps, and harmless when there are more of them than cores."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np

from fixtures.checkpoints import batch_of, prefill_logits
from fixtures.tiny import tiny_llama
from toque.backends.base import BackendOptions
from toque.backends.cpu import CpuBackend
from toque.graph.fuse import fuse
from toque.models import build_graph


def executable(threads):
    checkpoint = tiny_llama()
    graph = fuse(build_graph(checkpoint.config, checkpoint.tensors))
    lowered = CpuBackend().lower(graph, checkpoint, BackendOptions(threads, max_batch_tokens=256))
    lowered.allocate_kv(8)
    return lowered


def test_an_idle_pool_uses_no_cpu():
    lowered = executable(4)
    lowered.logits(batch_of([([1, 2, 3], 0, [0])]))
    time.sleep(0.05)  # workers spin for 50 us before they sleep
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_more_threads_than_cores_still_finish_and_agree():
    """A waiter that never gave up its core would keep the threads it waits for from running."""
    tokens = np.random.default_rng(0).integers(0, 160, 60).tolist()
    expected = prefill_logits(executable(1), tokens)
    crowded = executable(12)
    for _ in range(10):
        np.testing.assert_array_equal(prefill_logits(crowded, tokens, chunk=20), expected)


def test_several_models_step_at_once():
    """Each has threads, buffers and a cache of its own, and the interpreter is not held during a step."""
    tokens = np.random.default_rng(1).integers(0, 160, 100).tolist()
    models = [executable(2) for _ in range(3)]
    expected = prefill_logits(models[0], tokens)
    results = [None] * len(models)

    def run(i):
        for _ in range(5):
            results[i] = prefill_logits(models[i], tokens, chunk=33)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        np.testing.assert_array_equal(result, expected)


def test_models_come_and_go_without_leaking_threads():
    before = threading.active_count(), len(_native_threads())
    for _ in range(5):
        lowered = executable(3)
        lowered.logits(batch_of([([1], 0, [0])]))
        lowered.close()
        del lowered
    assert (threading.active_count(), len(_native_threads())) == before


def _native_threads():
    return list(Path("/proc/self/task").iterdir())

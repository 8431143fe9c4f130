"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy  # noqa: F401  its BLAS must be loaded to be limited
import pytest
from threadpoolctl import threadpool_limits

# BLAS threads that spin cost far more than they bring on small matrices and shared cores.
threadpool_limits(1)

# A shell without job control ignores SIGINT in what it starts in the background, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "gemma-3-270m-q4_k_m.gguf"
MINILM = "all-MiniLM-L6-v2"
QWEN = "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"


def model_file(name: str) -> Path:
    """A real model, from `make models`; a missing one fails the test that needs it rather than skipping it."""
    folder = Path(os.environ.get("TOQUE_TEST_MODELS", ROOT / ".cache" / "models"))
    path = folder / name
    if not path.exists():
        pytest.fail(
            f"{path} is missing: run `make models` (or set TOQUE_TEST_MODELS to a folder that has it)"
        )
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return model_file(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3() -> Path:
    return model_file(GEMMA3)


@pytest.fixture(scope="session")
def qwen() -> Path:
    return model_file(QWEN)


@pytest.fixture(scope="session")
def minilm() -> Path:
    return model_file(MINILM)

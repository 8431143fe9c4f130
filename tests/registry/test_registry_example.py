"""examples/finetune_and_register.py: a real run of Hugging Face's Trainer becomes two versions that Toque runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import toque
from toque.registry.registry import Registry
from toque.registry.store import Store

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "finetune_and_register.py"


@pytest.mark.slow
def test_a_trainer_s_output_is_registered_with_its_lineage_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOQUE_HOME", str(tmp_path / "home"))
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--epochs", "2", "--out", tmp_path / "out"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(toque.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    assert (tmp_path / "out" / "first" / "training_args.bin").exists()  # the pickle that is never opened
    with Registry(Store(tmp_path / "home")) as registry:
        first, second = registry.database.versions("parrot")
        assert (first.aliases, second.aliases) == (("production",), ("canary",))
        assert second.base_model == "parrot/1"
        run, inputs, results = registry.database.origin("parrot", 2)
        assert registry.database.children("parrot", 1) == ["parrot/2"]
    assert run is not None
    assert run.system == "transformers"
    assert run.params["num_train_epochs"] == 2
    assert run.params["global_step"] == 12
    assert run.metrics["train_loss"] > 0
    assert {(given.kind, given.context) for given in inputs} == {("model", "parent"), ("dataset", "training")}
    assert [result.metric for result in results] == ["loss"]
    llm = toque.LLM("parrot@canary")
    try:
        answer = llm.generate("user: What", toque.SamplingParams(max_tokens=4, temperature=0))
    finally:
        llm.close()
    assert answer.prompt_tokens > 0

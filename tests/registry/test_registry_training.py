"""What a training run leaves behind becomes lineage; what is damaged or hostile is left out, and nothing is run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from formats.gguf_builder import STRING, tiny_llama
from toque.registry.card import card_origin, front_matter
from toque.registry.registry import Registry
from toque.registry.store import Store
from toque.registry.training import dataset_input, git_commit, model_folder, read_origin
from toque.registry.version import VersionInput, plain_json

STATE = {
    "best_metric": 0.7,
    "best_model_checkpoint": "./out/checkpoint-2",
    "epoch": 2.0,
    "global_step": 4,
    "max_steps": 4,
    "num_train_epochs": 2,
    "train_batch_size": 8,
    "log_history": [
        {"epoch": 1.0, "loss": 2.5, "learning_rate": 1e-4, "grad_norm": float("nan"), "step": 2},
        {"epoch": 1.0, "eval_loss": 2.0, "eval_runtime": 0.1, "step": 2},
        {"epoch": 2.0, "loss": 1.5, "learning_rate": 0.0, "step": 4},
        {"epoch": 2.0, "eval_loss": 1.25, "eval_accuracy": 0.75, "eval_runtime": 0.1, "step": 4},
        {"epoch": 2.0, "train_loss": 2.0, "train_runtime": 3.0, "step": 4},
    ],
}
README = """---
license: mit
base_model: org/base
datasets:
- org/chats
tags: [trl, sft]
library_name: transformers
model-index:
- name: bot
  results:
  - task: {type: text-generation}
    dataset: {type: org/bench, split: test, revision: abc}
    metrics:
    - {type: accuracy, value: 0.5}
    - {type: note, value: n/a}
    - {type: broken, value: .nan}
    source: {url: "https://example.org/results"}
---
# bot
[<img src="badge" alt="wandb"/>](https://wandb.ai/team/project/runs/abc123)
"""


class Boom:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('a pickle was loaded')",))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An output folder with a GGUF model, because that is the smallest model there is."""
    out = tmp_path / "out"
    out.mkdir()
    tiny_llama().write(out / "m.gguf")
    (out / "trainer_state.json").write_text(json.dumps(STATE))
    (out / "README.md").write_text(README)
    (out / "training_args.bin").write_bytes(pickle.dumps(Boom()))
    return out


def test_the_state_the_card_and_the_run(folder: Path) -> None:
    origin = read_origin(folder)
    assert origin.lineage is not None
    assert (origin.lineage.system, origin.lineage.run_id) == ("trl", "abc123")
    assert origin.lineage.run_url == "https://wandb.ai/team/project/runs/abc123"
    assert origin.lineage.params["global_step"] == 4
    assert origin.lineage.params["num_train_epochs"] == 2
    assert origin.lineage.metrics["loss"] == 1.5
    assert origin.lineage.metrics["train_loss"] == 2.0
    assert origin.lineage.metrics["best_metric"] == 0.7
    assert "grad_norm" not in origin.lineage.metrics
    assert {(e.metric, e.value, e.dataset, e.split) for e in origin.evaluations} == {
        ("accuracy", 0.5, "org/bench", "test"),
        ("loss", 1.25, "org/chats", "eval"),
        ("accuracy", 0.75, "org/chats", "eval"),
    }
    assert [(given.kind, given.name) for given in origin.inputs] == [
        ("model", "org/base"),
        ("dataset", "org/chats"),
    ]
    assert (origin.license, origin.base_model, origin.base_relation) == ("mit", "org/base", "finetune")


def test_registered_with_all_of_it_and_without_the_pickle(folder: Path, home: Path) -> None:
    store = Store(home)
    with Registry(store) as registry:
        registry.register(str(folder), "bot")
        version = registry.find("bot/1")
        run, inputs, results = registry.database.origin("bot", 1)
    assert run is not None
    assert run.metrics["train_loss"] == 2.0
    assert len(results) == 3
    assert {given.context for given in inputs} == {"base", "training"}
    assert version.license == "mit"
    assert version.card["tags"] == ["trl", "sft"]
    assert [file.name for file in version.files] == ["m.gguf"]


def test_the_last_checkpoint_stands_for_a_folder_without_a_model(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for step in (2, 10, 9):
        checkpoint = out / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text(
            json.dumps({"dtype": "bfloat16", "transformers_version": "5.1"})
        )
        (checkpoint / "trainer_state.json").write_text(json.dumps(STATE | {"global_step": step}))
    (out / "README.md").write_text(README)
    (out / "checkpoint-99").write_text("no folder")
    assert model_folder(out) == out / "checkpoint-10"
    origin = read_origin(out)
    assert origin.lineage is not None
    assert origin.lineage.params["global_step"] == 10
    assert origin.lineage.params["transformers_version"] == "5.1"
    assert (origin.dtype, origin.license) == ("bfloat16", "mit")
    assert model_folder(folder) == folder


def test_a_saved_model_s_state_lies_beside_its_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text(json.dumps(STATE))
    origin = read_origin(tmp_path)
    assert origin.lineage is not None
    assert origin.lineage.system == "transformers"


def test_an_adapter_names_its_base(home: Path, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "org/base",
        "r": 8,
        "lora_alpha": 16,
        "revision": "abc",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "README.md").write_text("no card")
    with Registry(Store(home)) as registry:
        version = registry.register(str(tmp_path), "bot").version
        run, inputs, _ = registry.database.origin("bot", 1)
    assert (version.format, version.base_model, version.base_relation) == ("adapter", "org/base", "adapter")
    assert "merge" in version.problem
    assert run is not None
    assert (run.system, run.params["r"]) == ("peft", 8)
    assert [(given.name, given.digest) for given in inputs] == [("org/base", "abc")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trainer_state.json", b"{"),
        ("trainer_state.json", b"[]"),
        ("trainer_state.json", b'{"log_history": {"loss": 1}}'),
        ("trainer_state.json", b'{"log_history": [3, null, {"loss": "x", "eval_a": true, "b": 1e999}]}'),
        ("trainer_state.json", b'{"global_step": ' + b"9" * 4_000 + b"}"),
        ("README.md", b"---\n- a list\n---\n"),
        ("README.md", b"---\n{\n---\n"),
        ("README.md", b"---\n!!python/object/apply:os.system ['exit 1']\n---\n"),
        (
            "README.md",
            b"---\nbase_model: {a: 1}\ndatasets: 7\nmodel-index: [[], {results: 3}]\ntags: null\n---\n",
        ),
        ("README.md", b"\xff\xfe---\nlicense: \xff\n---\n"),
        ("adapter_config.json", b'{"base_model_name_or_path": ["x"], "r": null}'),
        ("all_results.json", b"nonsense"),
    ],
)
def test_what_is_damaged_is_left_out(folder: Path, home: Path, name: str, content: bytes) -> None:
    (folder / "trainer_state.json").unlink()
    (folder / "README.md").unlink()
    (folder / name).write_bytes(content)
    if name == "adapter_config.json":
        read_origin(folder)
        return
    with Registry(Store(home)) as registry:
        assert registry.register(str(folder), "bot").created


def test_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.md"
    secret.write_text("---\nlicense: secret\n---\n")
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(secret)
    assert read_origin(folder).license == ""


def test_a_card_that_unfolds_without_end_is_bounded() -> None:
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    card = front_matter(f"---\n{laughs}---\n")
    assert len(json.dumps(card)) < 1_000_000


def test_values_that_databases_refuse_are_made_plain() -> None:
    value = {"a": float("nan"), 3: "x\0y", "deep": [[[[[[[[[[1]]]]]]]]]], "big": 10**5_000, "half": "\ud800"}
    plain = plain_json(value)
    text = json.dumps(plain, allow_nan=False)
    assert "\\u0000" not in text
    text.encode()
    assert set(plain) == {"a", "3", "deep", "big", "half"}


def test_a_card_without_a_run_is_no_lineage() -> None:
    assert card_origin({"license": "mit"}).lineage is None


def test_a_gguf_file_says_where_it_comes_from(home: Path, tmp_path: Path) -> None:
    file = tiny_llama()
    for key, value in {
        "license": "apache-2.0",
        "base_model.0.name": "Base",
        "base_model.0.organization": "Org",
        "base_model.0.repo_url": "https://huggingface.co/org/base",
        "dataset.0.name": "chats",
    }.items():
        file.set(f"general.{key}", STRING, value)
    with Registry(Store(home)) as registry:
        version = registry.register(str(file.write(tmp_path / "m.gguf")), "bot").version
        _, inputs, _ = registry.database.origin("bot", 1)
    assert (version.license, version.base_model, version.base_relation) == (
        "apache-2.0",
        "org/base",
        "quantized",
    )
    assert [(given.kind, given.name) for given in inputs] == [("model", "org/base"), ("dataset", "chats")]


def test_data_sets_have_the_digest_of_their_content(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.txt").write_text("a")
    one = dataset_input(str(tmp_path / "d"))
    (tmp_path / "d" / "b.txt").write_text("b")
    two = dataset_input(str(tmp_path / "d"))
    file = dataset_input(str(tmp_path / "d" / "a.txt"))
    assert len({one.digest, two.digest, file.digest}) == 3
    assert file.digest == "sha256:ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    named = VersionInput("dataset", "org/x", source_type="name", source="org/x", context="training")
    assert dataset_input("org/x") == named


def test_the_code_s_revision_is_read_from_git_s_files(tmp_path: Path) -> None:
    inner = tmp_path / "work" / "runs" / "out"
    inner.mkdir(parents=True)
    git = tmp_path / "work" / ".git"
    commit = "0123456789abcdef0123456789abcdef01234567"
    for head, files in (
        (commit, {}),
        ("ref: refs/heads/main", {"refs/heads/main": commit}),
        ("ref: refs/heads/main", {"packed-refs": f"# pack-refs\n{commit} refs/heads/main\n"}),
    ):
        for name, content in {"HEAD": head, **files}.items():
            (git / name).parent.mkdir(parents=True, exist_ok=True)
            (git / name).write_text(content + "\n")
        assert git_commit(inner) == commit
    for head in ("ref: ../../secret", "ref: refs/heads/gone", "ref: refs/../x", "rubbish", ""):
        (git / "HEAD").write_text(head)
        (git / "packed-refs").write_text("")
        assert git_commit(inner) == ""
    assert git_commit(tmp_path) == ""

"""Models of a real MLflow registry on this machine: files, run, data sets and address come along."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from formats.gguf_builder import tiny_llama
from toque.errors import DownloadError
from toque.registry.registry import Registry
from toque.registry.store import Store

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    patch = pytest.MonkeyPatch()
    patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = tmp_path_factory.mktemp("mlflow")
    patch.setenv("MLFLOW_TRACKING_URI", (folder / "store").as_uri())
    import mlflow

    mlflow.set_tracking_uri((folder / "store").as_uri())
    yield mlflow, folder
    patch.undo()


@pytest.fixture(scope="module")
def run_id(tracking: tuple[Any, Path]) -> str:
    mlflow, folder = tracking
    from mlflow.data.code_dataset_source import CodeDatasetSource
    from mlflow.data.meta_dataset import MetaDataset

    model = tiny_llama(n_layers=1).write(folder / "m.gguf")
    client = mlflow.MlflowClient()
    with mlflow.start_run() as run:
        mlflow.log_params({"lr": 0.1, "epochs": 3})
        mlflow.log_metrics({"loss": 0.5, "eval_loss": 0.75, "bad": float("nan")})
        mlflow.set_tag("mlflow.source.git.commit", COMMIT)
        mlflow.log_input(
            MetaDataset(CodeDatasetSource({"a": "b"}), name="chats", digest="abc123"), context="training"
        )
        mlflow.log_artifact(str(model), "model")
        mlflow.log_text("not a model", "notes/readme.txt")
        source = f"{run.info.artifact_uri}/model"
    client.create_registered_model("bot")
    version = client.create_model_version("bot", source, run.info.run_id)
    client.set_registered_model_alias("bot", "champion", version.version)
    return str(run.info.run_id)


def test_an_alias_of_mlflow_becomes_a_version_with_its_run(
    run_id: str, home: Path, tracking: tuple[Any, Path]
) -> None:
    store = Store(home)
    with Registry(store) as registry:
        version = registry.register("mlflow:models:/bot@champion", "bot").version
        run, inputs, results = registry.database.origin("bot", 1)
    assert run is not None
    assert (run.system, run.run_id, run.external_model_id) == ("mlflow", run_id, "models:/bot/1")
    assert run.git_commit == COMMIT
    assert run.params == {"lr": "0.1", "epochs": "3"}
    assert run.metrics == {"loss": 0.5}
    assert [(result.metric, result.value) for result in results] == [("loss", 0.75)]
    assert [(g.kind, g.name, g.digest, g.source_type, g.context) for g in inputs] == [
        ("dataset", "chats", "abc123", "code", "training")
    ]
    assert json.loads(inputs[0].source)["tags"] == {"a": "b"}
    assert version.source_uri == "mlflow:models:/bot@champion"
    assert version.resolved_uri == "mlflow:models:/bot/1"
    assert store.resolve("bot/1").read_bytes() == (tracking[1] / "m.gguf").read_bytes()


@pytest.mark.parametrize("reference", ["mlflow:models:/bot/1", "mlflow:runs:/RUN/model"])
def test_versions_and_runs_are_pulled_too(
    run_id: str, home: Path, tracking: tuple[Any, Path], reference: str
) -> None:
    path = Store(home).pull(reference.replace("RUN", run_id))
    assert path.read_bytes() == (tracking[1] / "m.gguf").read_bytes()


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("mlflow:models:/bot@nobody", "nobody"),
        ("mlflow:models:/nothing/7", "nothing"),
        ("mlflow:runs:/RUN/notes", "neither a config.json nor a GGUF file"),
        ("mlflow:runs:/RUN/absent", "absent"),
    ],
)
def test_what_mlflow_does_not_have_is_a_clear_error(
    run_id: str, home: Path, reference: str, says: str
) -> None:
    with pytest.raises(DownloadError, match=says):
        Store(home).pull(reference.replace("RUN", run_id))
    assert Store(home).list() == []

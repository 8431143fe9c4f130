"""Models of an MLflow registry, with their runs as lineage. The only file that imports its client.

Where the server is comes from MLFLOW_TRACKING_URI and MLFLOW_REGISTRY_URI, credentials from MLflow's own variables.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from toque.errors import ConfigError, DownloadError
from toque.registry.card import number
from toque.registry.download import disk
from toque.registry.names import FileRef, MlflowRef
from toque.registry.progress import Progress, Report
from toque.registry.sources.base import Fetch
from toque.registry.sources.file import fetch_file
from toque.registry.version import EvalResult, Lineage, Origin, VersionInput, plain_json

_GIT = "mlflow.source.git.commit"
_CONTEXT = "mlflow.data.context"


def fetch_mlflow(reference: MlflowRef, work: Path, report: Report) -> Fetch:
    """The model's artifacts, the run that logged them, and its data sets. DownloadError says what MLflow said."""
    with _client(reference) as mlflow:
        client = mlflow.MlflowClient()
        resolved, run_id, model_id = _located(client, reference)
        download = work / "download"
        shutil.rmtree(download, ignore_errors=True)  # its client does not continue what was cut off
        report(Progress("download", str(reference)))
        with disk(str(reference)):
            download.mkdir(parents=True)
            mlflow.artifacts.download_artifacts(artifact_uri=resolved, dst_path=str(download))
        run = client.get_run(run_id) if run_id else None
        origin = _origin(run, model_id, str(mlflow.get_tracking_uri()))
    files = fetch_file(FileRef(str(_model(download, reference))), work, report)
    shutil.rmtree(download, ignore_errors=True)
    return Fetch(files.files, revision=resolved, origin=origin, resolved=f"mlflow:{resolved}")


@contextmanager
def _client(reference: MlflowRef) -> Iterator[Any]:
    """The client, its errors turned into ours."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nobody asked for it
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    try:
        import mlflow
        from mlflow.exceptions import MlflowException
    except ModuleNotFoundError:
        raise ConfigError("mlflow: needs its client: pip install 'toque[mlflow]'", param="model") from None
    try:
        yield mlflow
    except MlflowException as error:
        reason = " ".join(str(error).split())[:300]
        raise DownloadError(f"{reference}: MLflow says: {reason}") from error
    except (OSError, ConnectionError) as error:
        raise DownloadError(f"{reference}: cannot be brought: {error}") from error


def _located(client: Any, reference: MlflowRef) -> tuple[str, str, str]:
    """(the URI without an alias, run id, the model's URI in MLflow's registry)."""
    kind, _, rest = reference.uri.partition(":/")
    if kind == "runs":
        return reference.uri, rest.partition("/")[0], ""
    name, at, alias = rest.partition("@")
    if at:
        found = client.get_model_version_by_alias(name, alias)
    else:
        name, _, version = rest.rpartition("/")
        found = client.get_model_version(name, version)
    uri = f"models:/{found.name}/{found.version}"
    return uri, str(found.run_id or ""), uri


def _origin(run: Any, model_id: str, tracking_uri: str) -> Origin:
    if run is None:
        return Origin(lineage=Lineage("mlflow", external_model_id=model_id))
    metrics = {str(key): value for key, raw in run.data.metrics.items() if (value := number(raw)) is not None}
    inputs = []
    for given in getattr(run.inputs, "dataset_inputs", None) or ():
        context = next((tag.value for tag in given.tags if tag.key == _CONTEXT), "training")
        dataset = given.dataset
        inputs.append(
            VersionInput(
                "dataset", dataset.name, dataset.digest, dataset.source_type, dataset.source, context
            )
        )
    lineage = Lineage(
        system="mlflow",
        run_id=run.info.run_id,
        run_url=_run_url(tracking_uri, run.info),
        external_model_id=model_id,
        git_commit=str(run.data.tags.get(_GIT, "")),
        params=plain_json(dict(run.data.params)),
        metrics={key: value for key, value in metrics.items() if not key.startswith("eval")},
    )
    results = tuple(
        EvalResult(key.removeprefix("eval_").removeprefix("eval/"), value, split="eval", source="mlflow")
        for key, value in metrics.items()
        if key.startswith("eval")
    )
    return Origin(lineage=lineage, inputs=tuple(inputs), evaluations=results)


def _run_url(tracking_uri: str, info: Any) -> str:
    """The run's page, where the tracking server has one; without a password that its address may hold."""
    parts = urlsplit(tracking_uri)
    if parts.scheme not in ("http", "https"):
        return ""
    place = parts.hostname or ""
    if parts.port:
        place = f"{place}:{parts.port}"
    return f"{parts.scheme}://{place}{parts.path.rstrip('/')}/#/experiments/{info.experiment_id}/runs/{info.run_id}"


def _model(download: Path, reference: MlflowRef) -> Path:
    """The folder of the model among the artifacts. MLflow's transformers flavor keeps the tokenizer apart from it."""
    folders = sorted(
        (path for path in (download, *download.rglob("*")) if path.is_dir()), key=lambda p: len(p.parts)
    )
    for folder in folders:
        names = {path.name for path in folder.iterdir()}
        if "config.json" in names or any(name.endswith(".gguf") for name in names):
            for apart in (folder.parent / "components" / "tokenizer", folder.parent / "tokenizer"):
                if apart.is_dir() and "config.json" in names:
                    for path in apart.iterdir():
                        if path.is_file() and path.name not in names:
                            shutil.move(path, folder / path.name)
            return folder
    raise DownloadError(f"{reference}: its artifacts hold neither a config.json nor a GGUF file")

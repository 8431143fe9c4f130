"""What a training run leaves in its output folder, as lineage: HF Trainer, TRL and PEFT write these files themselves.

=========================  ====================================================================================
``trainer_state.json``     steps, epochs, batch size, the last losses, the last evaluation
``*_results.json``         what `Trainer.save_metrics` kept, where the state does not say it
``adapter_config.json``    PEFT: the base model and the adapter's shape
``README.md``              the card: license, base model, data sets, evaluations, a link to the run
``config.json``            the dtype, the version of transformers
``training_args.bin``      is a pickle, which can run code: never opened
=========================  ====================================================================================

None of them has to be there, and one that is damaged is left out with a line in the log: a model is worth registering
without its history.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toque.errors import FormatError
from toque.formats.folder import exists, read_bytes, read_json
from toque.registry.card import MAX_CARD, card_origin, front_matter, number, texts
from toque.registry.download import file_sha256
from toque.registry.progress import silent
from toque.registry.version import EvalResult, Lineage, Origin, VersionInput, plain_json

log = logging.getLogger("toque.registry")

_CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,12})")
_MAX_STATE = 64 << 20  # a line a logged step: a long run's is large
_STATE_PARAMS = ("num_train_epochs", "max_steps", "global_step", "train_batch_size", "total_flos", "epoch")
_ADAPTER_PARAMS = ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "task_type", "revision")
_SPEEDS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def model_folder(folder: Path) -> Path:
    """Where the model of an output folder lies: the folder itself, or its last checkpoint."""
    if any(exists(folder, name) for name in ("config.json", "adapter_config.json")):
        return folder
    numbered = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := _CHECKPOINT.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    ]
    return max(numbered)[1] if numbered else folder


def read_origin(folder: Path) -> Origin:
    """What the files of an output folder (or of any model folder) say of the model's making."""
    model = model_folder(folder)
    places = [model] if model == folder else [model, folder]
    readme = _text(places, "README.md")
    origin = card_origin(front_matter(readme), readme)
    state = _json(places if model != folder else [folder, *_last_checkpoint(folder)], "trainer_state.json")
    adapter = _json(places, "adapter_config.json")
    config = _json(places, "config.json")
    results = {name: _json(places, f"{name}_results.json") for name in ("all", "train", "eval")}

    dataset = next((given.name for given in origin.inputs if given.kind == "dataset"), "")
    known, params, measured = origin.lineage or Lineage(), dict[str, Any](), dict[str, float]()
    evaluations = list(origin.evaluations)
    if state:
        params |= {key: state[key] for key in _STATE_PARAMS if state.get(key) is not None}
        measured |= _last_values(state)
    for found in results.values():
        measured = {key: value for key in found if (value := number(found[key])) is not None} | measured
    evaluations += _evaluations(measured, dataset, "trainer_state.json" if state else "eval_results.json")
    if adapter:
        params |= {key: adapter[key] for key in _ADAPTER_PARAMS if adapter.get(key) is not None}
    if config.get("transformers_version"):
        params["transformers_version"] = config["transformers_version"]
    system = known.system or ("peft" if adapter else "transformers" if state else "")
    if not (system or known.run_id or params.keys() - {"transformers_version"}):
        return replace(origin, dtype=_dtype(config))
    base = origin.base_model or str(adapter.get("base_model_name_or_path") or "")
    relation = origin.base_relation or ("adapter" if adapter else "finetune" if base else "")
    lineage = replace(
        known,
        system=system,
        git_commit=git_commit(folder),
        params=plain_json(params),
        metrics={key: value for key, value in measured.items() if not key.startswith("eval_")},
    )
    inputs = origin.inputs
    if base:
        digest = str(adapter.get("revision") or "")
        inputs = (VersionInput("model", base, digest, "huggingface", base, "base"), *inputs)
    return replace(
        origin,
        lineage=lineage,
        inputs=inputs,
        evaluations=tuple(evaluations),
        base_model=base,
        base_relation=relation,
        dtype=_dtype(config),
    )


def gguf_origin(metadata: Mapping[str, Any]) -> Origin:
    """What a GGUF file's ``general.*`` keys say."""

    def text(key: str) -> str:
        value = metadata.get(f"general.{key}")
        return value if isinstance(value, str) else ""

    base = text("base_model.0.repo_url").removeprefix("https://huggingface.co/") or "/".join(
        filter(None, (text("base_model.0.organization"), text("base_model.0.name")))
    )
    inputs = [VersionInput("model", base, text("base_model.0.version"), "gguf", base, "base")] if base else []
    for position in range(16):
        name = text(f"dataset.{position}.repo_url") or text(f"dataset.{position}.name")
        if name:
            inputs.append(VersionInput("dataset", name, "", "gguf", name, "training"))
    keys = (
        "name",
        "author",
        "version",
        "organization",
        "finetune",
        "basename",
        "size_label",
        "description",
        "url",
    )
    return Origin(
        inputs=tuple(inputs),
        card=plain_json({key: text(key) for key in keys if text(key)}),
        license=text("license"),
        base_model=base,
        base_relation="quantized" if base else "",
    )


def dataset_input(text: str) -> VersionInput:
    """A data set that somebody names: a path of this machine, whose content is hashed, or a name as it is."""
    path = Path(text).expanduser()
    if not path.exists():
        return VersionInput("dataset", text, source_type="name", source=text, context="training")
    if path.is_file():
        digest = file_sha256(path, path.name, silent)
    else:
        files = sorted(file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
        lines = (f"{file_sha256(file, file.name, silent)}  {file.relative_to(path)}\n" for file in files)
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    return VersionInput("dataset", path.name, f"sha256:{digest}", "file", str(path.absolute()), "training")


def git_commit(path: Path) -> str:
    """The commit of the work tree that a folder lies in, read from git's own files; "" without one."""
    for parent in (path.absolute(), *path.absolute().parents):
        git = parent / ".git"
        try:
            if git.is_file():  # a linked work tree
                git = parent / git.read_text("utf-8").removeprefix("gitdir:").strip()
            if not git.is_dir():
                continue
            head = (git / "HEAD").read_text("utf-8").strip()
            name = head.removeprefix("ref:").strip()
            if name == head:
                return head if _COMMIT.fullmatch(head) else ""
            return _ref(git, name)
        except (OSError, ValueError):
            return ""
    return ""


def _ref(git: Path, name: str) -> str:
    if ".." in name or not name.startswith("refs/"):
        return ""
    common = git
    if (git / "commondir").is_file():
        common = git / (git / "commondir").read_text("utf-8").strip()
    for folder in (git, common):
        if (folder / name).is_file():
            commit = (folder / name).read_text("utf-8").strip()
            return commit if _COMMIT.fullmatch(commit) else ""
    for line in (common / "packed-refs").read_text("utf-8").splitlines():
        commit, _, ref = line.partition(" ")
        if ref == name and _COMMIT.fullmatch(commit):
            return commit
    return ""


def _last_checkpoint(folder: Path) -> list[Path]:
    """A finished run keeps its state beside its last checkpoint, unless `Trainer.save_state` was called."""
    numbered = [
        (int(match[1]), path) for path in folder.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))
    ]
    return [max(numbered)[1]] if numbered else []


def _last_values(state: Mapping[str, Any]) -> dict[str, float]:
    """The last value of everything that was logged, and the best of what was watched."""
    found: dict[str, float] = {}
    history = state.get("log_history")
    for entry in history if isinstance(history, list) else ():
        if isinstance(entry, dict):
            for key, value in entry.items():
                measured = number(value)
                if measured is not None and key not in ("step", "epoch"):
                    found[key] = measured
    best = number(state.get("best_metric"))
    return found if best is None else found | {"best_metric": best}


def _evaluations(measured: Mapping[str, float], dataset: str, source: str) -> list[EvalResult]:
    return [
        EvalResult(key.removeprefix("eval_"), value, dataset=dataset, split="eval", source=source)
        for key, value in measured.items()
        if key.startswith("eval_") and key.removeprefix("eval_") not in _SPEEDS
    ]


def _dtype(config: Mapping[str, Any]) -> str:
    return "".join(texts(config.get("dtype") or config.get("torch_dtype"))[:1]).removeprefix("torch.")


def _json(places: list[Path], name: str) -> dict[str, Any]:
    for place in places:
        if exists(place, name):
            try:
                return read_json(place, name, _MAX_STATE)
            except FormatError as error:
                log.warning("%s is left out: %s", place / name, error.message)
    return {}


def _text(places: list[Path], name: str) -> str:
    for place in places:
        if exists(place, name):
            try:
                return read_bytes(place, name, 8 * MAX_CARD).decode("utf-8", "replace")
            except FormatError as error:
                log.warning("%s is left out: %s", place / name, error.message)
    return ""

"""The one door: a path becomes a Checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from toque.errors import FormatError, UnsupportedModelError
from toque.formats.checkpoint import Checkpoint

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def load_checkpoint(path: Path, architectures: Collection[str] | None = None) -> Checkpoint:
    """Open and check a model: a GGUF file (any part of a split one), or a folder with config.json and safetensors.

    Only descriptions are read; the tensors are views of the mapped files. ``architectures`` narrows what is accepted.
    Raises FormatError naming the damaged field, or UnsupportedModelError naming what is supported.
    """
    path = Path(path)
    if path.is_dir():
        if (path / "config.json").is_symlink() or (path / "config.json").exists():
            from toque.formats.hf_model import load_folder

            return load_folder(path, architectures)
        return load_checkpoint(_only_gguf(path), architectures)
    if path.name.lower().endswith(_PICKLES):
        raise UnsupportedModelError(
            f"{path.name}: PyTorch pickle files can run code and are never loaded; convert to safetensors or GGUF"
        )
    if path.suffix == ".safetensors":
        raise UnsupportedModelError(
            f"{path.name}: give the folder, which also holds config.json and the tokenizer"
        )
    from toque.formats.gguf_model import load_gguf

    return load_gguf(path, architectures)


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    whole = [file for file in files if "-of-" not in file.name or "-00001-of-" in file.name]
    if len(whole) == 1:
        return whole[0]
    if whole:
        raise FormatError(f"holds {len(whole)} GGUF models: name one of them", field=folder.name)
    raise FormatError("holds neither config.json nor a GGUF file", field=folder.name)

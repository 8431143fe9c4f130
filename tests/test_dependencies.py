"""What an installation brings along: declared, explained, used, and small."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RUNTIME = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = {
    Requirement(text).name
    for extra, texts in PROJECT["optional-dependencies"].items()
    if extra != "dev"
    for text in texts
}
MAX_BYTES = 300_000_000


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported() -> set[str]:
    """The distributions that the package imports anywhere."""
    owners = metadata.packages_distributions()
    modules: set[str] = set()
    for path in (ROOT / "src" / "toque").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.split(".")[0])
    modules -= {"toque", *sys.stdlib_module_names}
    declared = {plain(requirement.name) for requirement in RUNTIME} | set(map(plain, EXTRAS))
    # Several distributions may share a name such as `google`: the one that is meant is the one that is declared.
    return {plain(min(owners[module], key=lambda name: plain(name) not in declared)) for module in modules}


def test_what_is_imported_is_declared_and_the_other_way_round() -> None:
    # SQLAlchemy imports its driver itself, uvicorn its parser.
    assert imported() - set(map(plain, EXTRAS)) == {plain(requirement.name) for requirement in RUNTIME}


def test_every_dependency_has_its_reasons() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = {
        plain(name)
        for line in page.splitlines()
        if line.startswith("| ") and not line.startswith("| package")
        for name in line.split("|")[1].split(",")
        for name in [name.strip()]
    }
    assert rows == {plain(requirement.name) for requirement in RUNTIME}
    assert all(name.split("[")[0] in page for name in EXTRAS)


def test_an_installation_is_small() -> None:
    """Everything that `pip install .` brings, as it lies on this disk."""
    sizes: dict[str, int] = {}
    todo = list(RUNTIME)
    while todo:
        requirement = todo.pop()
        name = plain(requirement.name)
        if name in sizes or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found = metadata.distribution(name)
        sizes[name] = sum(file.size or 0 for file in found.files or [])
        todo += [Requirement(text) for text in found.requires or []]
    own = sum(path.stat().st_size for path in (ROOT / "src" / "toque").rglob("*") if path.is_file())
    assert sizes["numpy"] > 10_000_000  # the sizes are really there
    assert sum(sizes.values()) + own < MAX_BYTES, sorted(sizes.items(), key=lambda item: -item[1])[:10]
    assert not {"torch", "transformers", "triton", "pydantic"} & set(sizes)

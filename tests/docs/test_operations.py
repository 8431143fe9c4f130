"""docs/operations.md: the tests that it names exist, and its fields and examples are those of the code."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import click
import msgspec
import pytest
import yaml

from toque.cli.main import VERBS
from toque.engine.options import EngineOptions
from toque.fleet.parse import parse_spec
from toque.fleet.spec import DeploymentSpec, KeepWarm, Resources, RolloutPolicy, ScalingPolicy

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
MATRIX = DOC[DOC.index("## What dies") :]
ROWS = [line for line in MATRIX.splitlines() if line.startswith("| ") and "::" in line]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", DOC)))
CHECKED = (
    "scaling.target_queue_s",
    "scaling.target_ongoing_requests",
    "scaling.max_kv_usage",
    "scaling.downscale_to_zero_delay_s",
    "rollout.ready_timeout_s",
    "rollout.max_surge",
    "grace_s",
)
PARTS: dict[str, type[msgspec.Struct]] = {
    "scaling": ScalingPolicy,
    "rollout": RolloutPolicy,
    "resources": Resources,
}


def test_every_row_of_the_failure_matrix_names_a_test() -> None:
    table = [line for line in MATRIX.splitlines() if line.startswith("| ")][1:]  # without its head
    assert len(ROWS) == len(table) >= 12


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_every_test_that_is_named_exists(file: str, name: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE)


def test_every_field_of_a_deployment_is_explained_with_its_default() -> None:
    rows = {}
    for line in DOC.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 3 or not cells[0].startswith("`"):
            continue
        owner = ""
        for name in re.findall(r"`([\w.]+)`", cells[0]):
            owner = name.partition(".")[0] if not name.startswith(".") else owner
            rows[f"{owner}{name}" if name.startswith(".") else name] = cells[1]
    expected = {field.encode_name for field in msgspec.structs.fields(DeploymentSpec)} - set(PARTS)
    for part, kind in PARTS.items():
        expected |= {f"{part}.{field.encode_name}" for field in msgspec.structs.fields(kind)}
    assert expected <= set(rows)
    defaults = DeploymentSpec("a", "b")
    for name in CHECKED:
        value: object = defaults
        for part in name.split("."):
            value = getattr(value, part)
        assert rows[name] == f"{value:g}", name
    assert {field.encode_name for field in msgspec.structs.fields(KeepWarm)} <= set(re.findall(r"\w+", DOC))


def test_the_yaml_is_a_configuration() -> None:
    for text in re.findall(r"^```yaml\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL):
        for document in yaml.safe_load(text)["deployments"]:
            parse_spec(document)


def test_the_commands_are_understood() -> None:
    """Parsed, not run: a verb, a subcommand, an option or an argument that does not exist is an error."""
    lines = [
        command.partition("  #")[0].strip()
        for text in re.findall(r"^```sh\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL)
        for line in text.splitlines()
        for command in line.partition("  #")[0].split(";")
    ]
    assert len(lines) >= 8
    known = {field.name for field in fields(EngineOptions)}
    for line in lines:
        toque, verb, *words = shlex.split(line)
        assert toque == "toque"
        module, attribute, _ = VERBS[verb]
        command = getattr(import_module(module), attribute)
        if isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        context = command.make_context(verb, words)
        for given in context.params.get("engine", ()):
            assert given.partition("=")[0] in known

"""The verbs pull, list, show and rm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from registry.loopback import Web
from toque.cli import list_, pull, rm, show
from toque.errors import ModelNotFoundError

REF = "pypi:tiny-model==1.0"


@pytest.fixture
def world(index: Web, home: Path, model_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> Web:
    monkeypatch.setenv("TOQUE_HOME", str(home))
    index.add_wheel("tiny-model", "1.0", {"m.gguf": model_bytes})
    return index


def call(command: object, *args: str) -> Result:
    result = CliRunner().invoke(command, list(args), catch_exceptions=False)  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output
    return result


def test_pull_list_show_rm(world: Web) -> None:
    assert "m.gguf" in call(pull.command, REF, "--name", "tiny").output
    assert "tiny" in call(list_.command).output
    listed = json.loads(call(list_.command, "--json").output)
    assert [(model["name"], model["architecture"]) for model in listed] == [("tiny", "llama")]
    shown = json.loads(call(show.command, "tiny", "--json").output)
    assert shown["source"] == REF + ""
    assert Path(shown["path"]).exists()
    assert shown["files"][0]["sha256"] in call(show.command, "tiny").output
    assert "removed tiny" in call(rm.command, "tiny").output
    assert "empty" in call(list_.command).output


def test_pull_to_a_folder(world: Web, tmp_path: Path, model_bytes: bytes) -> None:
    out = tmp_path / "out"
    answer = json.loads(call(pull.command, REF, "--to", str(out), "--json").output)
    assert answer["path"] == str(out / "m.gguf")
    assert (out / "m.gguf").read_bytes() == model_bytes


def test_the_catalog_is_listed_on_request(world: Web) -> None:
    assert "smollm2" in call(list_.command, "--catalog").output
    entries = json.loads(call(list_.command, "--catalog", "--json").output)
    assert {"name": "smollm2", "pulled": False}.items() <= next(
        e for e in entries if e["name"] == "smollm2"
    ).items()


def test_an_unknown_model_is_an_error(world: Web) -> None:
    with pytest.raises(ModelNotFoundError):
        call(show.command, "nothing")

"""Settings: which source wins, and how the others fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from toque.config import Settings, engine_flags, load_settings
from toque.engine.options import EngineOptions
from toque.errors import ConfigError


def test_flags_win_over_the_environment_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "toque.yaml"
    file.write_text("models: [smollm2]\nserver:\n  port: 1\n  host: ::1\nengine:\n  threads: 3\nlimits: {}\n")
    environ = {
        "TOQUE_SERVER_PORT": "2",
        "TOQUE_ENGINE_PREFIX_CACHE": "false",
        "TOQUE_ISA": "avx2",
        "PATH": "x",
    }
    settings = load_settings({"server.port": 3, "server.host": None}, file=file, environ=environ)
    assert settings.server.port == 3
    assert settings.server.host == "::1"
    assert settings.engine.threads == 3
    assert settings.engine.prefix_cache is False
    assert settings.models == ("smollm2",)
    assert settings.limits == Settings().limits
    assert load_settings(file=file, environ=environ).server.port == 2
    assert load_settings(file=file, environ={}).server.port == 1
    assert load_settings(environ={}) == Settings()


def test_keys_come_from_the_environment_as_a_list() -> None:
    assert load_settings(environ={"TOQUE_API_KEY": "a"}).auth.api_keys == ("a",)
    assert load_settings(environ={"TOQUE_API_KEYS": "a, b,"}).auth.api_keys == ("a", "b")
    assert load_settings({"auth.api_keys": ("c",)}, environ={"TOQUE_API_KEY": "a"}).auth.api_keys == ("c",)


@pytest.mark.parametrize(
    ("environ", "key", "words"),
    [
        ({"TOQUE_SERVER_PORT": "abc"}, "server.port", ["'abc'", "TOQUE_SERVER_PORT"]),
        ({"TOQUE_SERVER_PORT": "65536"}, "server.port", ["65535", "'65536'"]),
        ({"TOQUE_SERVER_PROT": "1"}, "server.prot", ["unknown", "server.port"]),
        ({"TOQUE_LIMITS_MAX_BODY_BYTES": "0"}, "limits.max_body_bytes", ["'0'"]),
        ({"TOQUE_LIMITS_LOAD_WAIT_S": "nan"}, "limits.load_wait_s", ["nan"]),
        ({"TOQUE_ENGINE_MAX_SEQUENCES": "5000"}, "engine.max_sequences", ["1024", "5000"]),
        ({"TOQUE_SERVER_LOG_LEVEL": "loud"}, "server.log_level", ["'loud'", "warning"]),
        ({"TOQUE_SERVER_INSECURE": "perhaps"}, "server.insecure", ["'perhaps'"]),
    ],
)
def test_a_bad_variable_is_named_with_its_value(environ: dict[str, str], key: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(environ=environ)
    assert caught.value.param == key
    for word in (key, *words):
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("server:\n  prot: 1\n", "server.prot"),
        ("sever:\n  port: 1\n", "sever"),
        ("server: 7\n", "server"),
        ("server:\n  port: [1]\n", "server.port"),
        ("server:\n  port: true\n", "server.port"),
        ("- a\n", "config"),
        ("a: [\n", "config"),
        ("models: 7\n", "models"),
    ],
)
def test_a_bad_file_is_named_with_the_key(tmp_path: Path, text: str, key: str) -> None:
    file = tmp_path / "toque.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file=file, environ={})
    assert caught.value.param == key
    assert str(file) in caught.value.message


def test_an_empty_file_is_the_defaults_and_a_missing_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "toque.yaml"
    file.write_text("")
    assert load_settings(file=file, environ={}) == Settings()
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings(file=tmp_path / "none.yaml", environ={})


def test_a_key_is_never_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"auth.api_keys": {"s3cret": 1}}, environ={})
    assert "s3cret" not in caught.value.message


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        load_settings(environ={}).server.port = 1  # type: ignore[misc]


def test_only_what_differs_goes_to_a_replica() -> None:
    assert engine_flags(EngineOptions()) == {}
    assert engine_flags(EngineOptions(threads=2, prefix_cache=False)) == {"threads": 2, "prefix_cache": False}


def test_reading_settings_imports_nothing_heavy() -> None:
    code = (
        "import sys, toque.config, toque.gateway.serve; toque.config.load_settings(environ={});"
        "heavy = {'pydantic', 'yaml', 'starlette', 'uvicorn', 'prometheus_client', 'numpy', 'grpc', 'jinja2'};"
        "sys.exit(','.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


DEPLOYMENTS = """\
server:
  port: 0
deployments:
  - name: chat
    model: smollm2@production
    scaling:
      min_replicas: 0
      keep_warm:
        - {start: 08:30, end: 18:00}
  - name: small
    model: /models/a.gguf
    engine:
      threads: 1
"""


def test_a_file_gives_deployments(tmp_path: Path) -> None:
    file = tmp_path / "toque.yaml"
    file.write_text(DEPLOYMENTS)
    settings = load_settings(file=file, environ={"TOQUE_ENGINE_THREADS": "2"})
    chat, small = settings.deployments
    assert (chat.name, chat.model, chat.scaling.min_replicas) == ("chat", "smollm2@production", 0)
    assert (chat.scaling.keep_warm[0].start, chat.scaling.keep_warm[0].end) == ("08:30", "18:00")
    assert small.engine == {"threads": 1}
    assert settings.engine.threads == 2
    file.write_text("deployments: []\n")
    assert load_settings(file=file, environ={}).deployments == ()


def test_a_file_gives_twenty_models(tmp_path: Path) -> None:
    file = tmp_path / "toque.yaml"
    file.write_text("models:\n" + "".join(f"  - m{n}=/models/{n}.gguf\n" for n in range(20)))
    assert len(load_settings(file=file, environ={}).models) == 20


@pytest.mark.parametrize(
    ("old", "new", "param", "line", "words"),
    [
        ("min_replicas: 0", "min_replica: 0", "deployments[0].scaling.min_replica", 7, ["min_replicas?"]),
        ("threads: 1", "threads: many", "deployments[1].engine.threads", 13, ["'many'"]),
        ("threads: 1", "thread: 1", "deployments[1].engine.thread", 13, ["did you mean threads?"]),
        ("end: 18:00", "end: 25:00", "deployments[0].scaling.keep_warm[0].end", 9, ["25:00"]),
        ("  - name: small\n    model", "  - model", "deployments[1].name", 10, ["is required"]),
        ("name: small", "name: chat", "deployments[1].name", 10, ["chat", "deployments[0]"]),
        ("name: small", "name: a/b", "deployments[1].name", 10, ["'a/b'"]),
    ],
)
def test_a_bad_deployment_is_named_with_its_place_and_line(
    tmp_path: Path, old: str, new: str, param: str, line: int, words: list[str]
) -> None:
    file = tmp_path / "toque.yaml"
    assert old in DEPLOYMENTS
    file.write_text(DEPLOYMENTS.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_settings(file=file, environ={})
    assert caught.value.param == param
    for word in (param, f"(from {file}, line {line})", *words):
        assert word in caught.value.message


def test_deployments_that_are_no_list_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "toque.yaml"
    for text in ("deployments: {a: 1}\n", "deployments: 7\n", "deployments: [7]\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="deployments"):
            load_settings(file=file, environ={})
    file.write_text("deployment: []\n")
    with pytest.raises(ConfigError, match="did you mean deployments"):
        load_settings(file=file, environ={})


def test_the_example_file_loads() -> None:
    settings = load_settings(file=Path(__file__).resolve().parents[2] / "deploy" / "toque.yaml", environ={})
    assert len(settings.deployments) >= 3
    assert settings.ledger.price_list()
    assert settings.ledger.tenant_budgets()["support"].limit_nano == 200 * 10**9


def test_a_budget_below_zero_is_named(tmp_path: Path) -> None:
    file = tmp_path / "toque.yaml"
    file.write_text("ledger:\n  budgets: {acme: {monthly: -1}}\n")
    with pytest.raises(ConfigError, match=r"ledger.budgets: monthly must be 0 or more, got -1"):
        load_settings(file=file, environ={})

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

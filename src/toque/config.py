"""Settings: frozen, nested by owner, from flags > environment (``TOQUE_*``) > YAML > defaults.

Built on msgspec rather than pydantic because reading the settings stands before the first replica's start: pydantic
and pydantic-settings import in about 0.35 s here, msgspec in 0.05 s, and a cold start has 1.5 s in all.

Every key has one name, ``section.field``; the environment spells it ``TOQUE_SECTION_FIELD``. A key that does not
exist and a value that does not fit are :class:`ConfigError`, naming the key, the value and where it came from.
Other ``TOQUE_*`` variables (``TOQUE_ISA``, ``TOQUE_HOME`` …) belong to their own readers and are left alone.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta, Struct

from toque.engine.options import EngineOptions
from toque.errors import ConfigError, RequestError
from toque.fleet.spec import DeploymentSpec
from toque.monitor.settings import LedgerSettings, TracingSettings
from toque.registry.settings import RegistrySettings

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Bound = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # 0: none


class ServerSettings(Struct, frozen=True):
    """Where and how the gateway listens."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8000  # 0: any free port
    insecure: bool = False  # allow an address other than loopback without any API key
    cors_origins: tuple[str, ...] = ()  # browser origins that may call; "*" for all
    allowed_hosts: tuple[str, ...] = ()  # names besides localhost that a server without keys answers to
    grace_s: Seconds = 30.0  # open streams may finish within this after SIGTERM
    keep_alive_s: Seconds = 75.0
    header_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 30.0
    metrics_compat: str = ""  # vllm: measurements under vLLM's names, too
    log_level: str = "info"
    log_format: str = "text"  # or json: an object a line
    log_prompts: bool = False  # bodies of requests too, as they came: people's texts, in the json format only


class LimitSettings(Struct, frozen=True):
    """What one request, and all waiting requests of a deployment together, may ask for."""

    max_body_bytes: Count = 8 * 2**20
    max_body_items: Count = 300_000  # commas + 3 x colons in a body: its parsing's cost, while streams wait
    max_header_bytes: Count = 64 * 2**10
    max_queued_requests: Count = 512  # sequences without a first token yet
    max_queued_tokens: Count = 2**20  # prompt tokens of those sequences
    max_choices: Count = 128  # prompts x n of one request
    requests_per_minute: Bound = 0  # of each key, unless the key has its own
    tokens_per_minute: Bound = 0
    concurrent_requests: Bound = 0
    request_timeout_s: Seconds = 600.0
    load_wait_s: Seconds = 60.0  # how long a request waits for a model that is loading


class AuthSettings(Struct, frozen=True):
    """Without keys every caller is let in, which is why only loopback may be served then."""

    api_keys: tuple[str, ...] = ()
    keys_file: str = (
        ""  # digests of more keys, read again when it changes; `toque serve`: TOQUE_HOME/keys.json
    )


class IdempotencySettings(Struct, frozen=True):
    """Answers to requests with an ``Idempotency-Key`` are kept, text and all, beside the ledger."""

    enabled: bool = True
    hours: Annotated[float, Meta(gt=0, le=24 * 366)] = 24.0
    max_mb: Count = 256  # all of them; the oldest go first
    max_answer_mb: Count = 4  # a longer one is not kept


class FleetSettings(Struct, frozen=True):
    replicas: Annotated[int, Meta(ge=1, le=64)] = 1
    memory_mb: Bound = 0  # what all replicas together may take; 0: nine tenths of the machine or container
    tool_parser: str = ""  # the dialect of the models' tool calls; "": read off the chat template
    # A request without a first token after so long goes to a second replica besides; 0: never.
    hedge_after_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class Settings(Struct, frozen=True):
    """Everything a server needs to be told, besides the models."""

    server: ServerSettings = ServerSettings()
    limits: LimitSettings = LimitSettings()
    auth: AuthSettings = AuthSettings()
    fleet: FleetSettings = FleetSettings()
    engine: EngineOptions = EngineOptions()
    ledger: LedgerSettings = LedgerSettings()
    registry: RegistrySettings = RegistrySettings()
    idempotency: IdempotencySettings = IdempotencySettings()
    tracing: TracingSettings = TracingSettings()
    models: tuple[str, ...] = ()
    deployments: tuple[DeploymentSpec, ...] = ()  # only a file can give them


_SECTIONS: dict[str, type[Any]] = {
    "server": ServerSettings,
    "limits": LimitSettings,
    "auth": AuthSettings,
    "fleet": FleetSettings,
    "engine": EngineOptions,
    "ledger": LedgerSettings,
    "registry": RegistrySettings,
    "idempotency": IdempotencySettings,
    "tracing": TracingSettings,
}
_ENV_ALIASES = {"TOQUE_API_KEY": "auth.api_keys", "TOQUE_API_KEYS": "auth.api_keys"}
_SECRET = {"auth.api_keys", "ledger.url", "registry.url"}
_LOG_LEVELS = ("debug", "info", "warning", "error")
_COMPATIBLE = ("", "vllm")
_LOG_FORMATS = ("text", "json")


def load_settings(
    flags: Mapping[str, object] | None = None,
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge the four sources. ``flags`` maps ``section.field`` to a value; None stands for "not given"."""
    given: dict[str, tuple[object, str]] = {}
    deployments: tuple[DeploymentSpec, ...] = ()
    if file is not None:
        document = _read_yaml(file)
        if "deployments" in document:
            deployments = _deployments(document.pop("deployments"), file)
        given |= _from_yaml(document, file)
    given |= _from_environment(os.environ if environ is None else environ)
    for key, value in (flags or {}).items():
        if value is not None:
            given[key] = (value, "the command line")
    return _build(given, deployments)


def _build(given: Mapping[str, tuple[object, str]], deployments: tuple[DeploymentSpec, ...] = ()) -> Settings:
    types = _field_types()
    sections: dict[str, dict[str, object]] = {name: {} for name in _SECTIONS}
    models: object = ()
    for key, (value, origin) in given.items():
        if key not in types:
            raise ConfigError(
                f"unknown setting {_brief(key)} (from {origin}){_nearest(key, [*types, 'deployments'])}",
                param=key,
            )
        converted = _convert(key, value, types[key], origin)
        if key == "models":
            models = converted
        else:
            section, field = key.split(".")
            sections[section][field] = converted
    built: dict[str, Any] = {}
    for name, fields in sections.items():
        try:
            built[name] = _SECTIONS[name](**fields)
        except ConfigError as error:
            raise ConfigError(f"{name}.{error.message}", param=f"{name}.{error.param}") from None
    settings = Settings(
        **built,
        models=models,  # type: ignore[arg-type]  # converted to the field's type above
        deployments=deployments,
    )
    if settings.server.log_level not in _LOG_LEVELS:
        raise ConfigError(
            f"server.log_level must be one of {', '.join(_LOG_LEVELS)}, got {_brief(settings.server.log_level)}",
            param="server.log_level",
        )
    if settings.server.metrics_compat not in _COMPATIBLE:
        raise ConfigError(
            f"server.metrics_compat must be vllm or empty, got {_brief(settings.server.metrics_compat)}",
            param="server.metrics_compat",
        )
    if settings.server.log_format not in _LOG_FORMATS:
        raise ConfigError(
            f"server.log_format must be one of {', '.join(_LOG_FORMATS)}, got {_brief(settings.server.log_format)}",
            param="server.log_format",
        )
    return settings


def _field_types() -> dict[str, Any]:
    types: dict[str, Any] = {"models": tuple[str, ...]}  # and deployments, which are read apart
    for section, owner in _SECTIONS.items():
        for field, hint in get_type_hints(owner, include_extras=True).items():
            types[f"{section}.{field}"] = hint
    return types


def _convert(key: str, value: object, kind: Any, origin: str) -> object:
    if kind == tuple[str, ...] and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        # A variable's value is always text; a YAML number in quotes is meant as a number all the same.
        return msgspec.convert(value, kind, strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        shown = "a value that is not shown" if key in _SECRET else _brief(value)
        reason = str(error).split(" - at ")[0]
        raise ConfigError(
            f"{key}: {reason[:1].lower()}{reason[1:]}, got {shown} (from {origin})", param=key
        ) from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    given: dict[str, tuple[object, str]] = {}
    for name, value in environ.items():
        if name in _ENV_ALIASES:
            given[_ENV_ALIASES[name]] = (value, name)
        elif name.startswith("TOQUE_"):
            section, _, field = name.removeprefix("TOQUE_").lower().partition("_")
            if section in _SECTIONS and field:
                given[f"{section}.{field}"] = (value, name)
    return given


def _read_yaml(file: Path) -> dict[object, object]:
    import yaml  # only a server with a file pays for it

    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", param="config") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        problem = str(error).replace("\n", " ")
        raise ConfigError(f"{file} is not valid YAML: {problem[:200]}", param="config") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"{file} must hold a mapping of settings, got {type(document).__name__}", param="config"
        )
    return document


def _from_yaml(document: Mapping[object, object], file: Path) -> dict[str, tuple[object, str]]:
    given: dict[str, tuple[object, str]] = {}
    for section, content in document.items():
        if section in _SECTIONS and isinstance(content, dict):
            for field, value in content.items():
                given[f"{section}.{field}"] = (value, str(file))
        elif section in _SECTIONS:
            raise ConfigError(
                f"{section} must be a mapping, got {_brief(content)} (from {file})", param=str(section)
            )
        else:
            given[str(section)] = (content, str(file))
    return given


def _deployments(listed: object, file: Path) -> tuple[DeploymentSpec, ...]:
    from toque.fleet.parse import parse_spec

    if not isinstance(listed, list):
        raise ConfigError(
            f"deployments must be a list, got {_brief(listed)} (from {file})", param="deployments"
        )
    specs: list[DeploymentSpec] = []
    for number, document in enumerate(listed):
        place = f"deployments[{number}]"
        try:
            spec = parse_spec(_clock_times(document))
        except RequestError as error:
            where = f"{place}.{error.param}" if error.param else place
            said = f"{place}.{error.message}" if error.param else f"{place}: {error.message}"
            raise ConfigError(f"{said} (from {file}, line {_line(file, where)})", param=where) from None
        for other, earlier in enumerate(specs):
            if earlier.name == spec.name:
                raise ConfigError(
                    f"{place}.name is {spec.name}, as is that of deployments[{other}] "
                    f"(from {file}, line {_line(file, f'{place}.name')})",
                    param=f"{place}.name",
                )
        specs.append(spec)
    return tuple(specs)


def _clock_times(document: object) -> object:
    """YAML 1.1 reads 18:00 without quotes as a number in base 60: here it is a time of day again."""
    scaling = document.get("scaling") if isinstance(document, dict) else None
    windows = scaling.get("keep_warm") if isinstance(scaling, dict) else None
    for window in windows if isinstance(windows, list) else ():
        for name in ("start", "end"):
            value = window.get(name) if isinstance(window, dict) else None
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                window[name] = f"{value // 60:02}:{value % 60:02}"
    return document


def _line(file: Path, place: str) -> int:
    """The line of a YAML file at which "a[0].b" stands, or what of it there is."""
    import yaml

    node = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    line = 0
    for part in place.replace("[", ".[").split("."):
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == part), None)
            if found is None:
                break
            line, node = found[0].start_mark.line, found[1]
        elif (
            isinstance(node, yaml.SequenceNode) and part[1:-1].isdigit() and int(part[1:-1]) < len(node.value)
        ):
            node = node.value[int(part[1:-1])]
            line = node.start_mark.line
        else:
            break
    return line + 1


def _nearest(key: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def engine_flags(options: EngineOptions) -> dict[str, object]:
    """The options that differ from the defaults, as a replica's command line takes them."""
    plain = EngineOptions()
    return {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(EngineOptions)
        if getattr(options, field.name) != getattr(plain, field.name)
    }

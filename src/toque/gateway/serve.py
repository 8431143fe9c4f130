"""``toque serve``: models in, a running server out.

The order is what makes a cold start fast: the port is taken, the replica processes are started, and only then does
this process import its web stack and read the tokenizers, while the replicas load their weights.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from msgspec.structs import replace

from toque.config import Settings, engine_flags
from toque.errors import ConfigError, UnavailableError
from toque.file_state import file_state
from toque.fleet.spec import DeploymentSpec, ScalingPolicy
from toque.gateway.listen import bind
from toque.monitor.log_format import configure_logs
from toque.registry.settings import from_environment

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from toque.fleet.admin import FleetAdmin
    from toque.fleet.link import FleetLink
    from toque.gateway.fleet_port import FleetPort
    from toque.gateway.gateway import Gateway
    from toque.registry.progress import Report
    from toque.registry.settings import RegistrySettings

LOAD_S = 600.0
DEVICES_S = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    path: Path
    digest: str = ""  # of the version, where the store knows it
    label: str = ""  # of the version, as people say it
    reference: str = ""  # what names it, if not its path: a rollout looks there again
    state: str = ""  # of a plain path, as `file_state` has it


def serve(
    models: Sequence[str],
    settings: Settings,
    progress: Callable[[], AbstractContextManager[Report]] | None = None,
    *,
    control: bool = True,
) -> int:
    """Serve until told to stop; the exit code. A ToqueError says what keeps it from serving at all.

    With ``models`` and no deployments in the settings the fleet is this server's own: it lives in memory and ends
    with it. Otherwise it is the fleet of the registry's database, which other servers may share; ``control``: this
    one may lead it. ``progress`` opens what is told of downloads while models are found; without it, the log is.
    """
    configure_logs(settings.server.log_level, settings.server.log_format)
    started = time.perf_counter()
    settings = with_keys_file(settings)
    with nullcontext() if progress is None else progress() as report:
        served = [resolve(reference, report, settings.registry) for reference in models or settings.models]
    check_names(served)
    import uvloop

    durable = bool(settings.deployments) or not served
    own = None if durable else own_fleet(served, settings)
    fleet = own or registered_fleet(served, settings, control)
    names = {safe_name(model.name): model.name for model in served}
    wanted = len(names) + len(settings.deployments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(fleet, names, wanted, settings, started, strict=not durable))


class Fleet(Protocol):
    """A fleet that this process takes part in."""

    @property
    def link(self) -> FleetLink: ...

    @property
    def admin(self) -> FleetAdmin: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


def own_fleet(models: Sequence[ServedModel], settings: Settings) -> Fleet:
    """The fleet of `toque serve MODEL…`: in memory, on this machine, gone with this process."""
    from toque.fleet.embedded import LocalFleet
    from toque.fleet.resolve import resolver
    from toque.fleet.store import Revision

    deployments = [
        (
            spec_of(model, settings),
            Revision(
                "",
                model.reference or str(model.path),
                str(model.path),
                model.digest,
                model.label,
                state=model.state,
            ),
        )
        for model in models
    ]
    # The server has drained by the time the replicas are told to stop.
    return LocalFleet(
        deployments,
        memory_mb=settings.fleet.memory_mb,
        grace_s=1.0,
        resolve=resolver(settings.registry),
    )


def registered_fleet(models: Sequence[ServedModel], settings: Settings, control: bool) -> Fleet:
    """The fleet of the registry's database, with what the settings and the command line deploy in it."""
    from toque.fleet.durable import DurableFleet
    from toque.fleet.resolve import resolver
    from toque.registry.home import default_home

    return DurableFleet(
        settings.registry.database_url(default_home()),
        control=control,
        deployments=[*settings.deployments, *(spec_of(model, settings) for model in models)],
        memory_mb=settings.fleet.memory_mb,
        resolve=resolver(settings.registry),
    )


def spec_of(model: ServedModel, settings: Settings) -> DeploymentSpec:
    """What `toque serve MODEL` deploys, with the server's engine options."""
    replicas = settings.fleet.replicas
    engine = cast("dict[str, bool | int | float | str | None]", engine_flags(settings.engine))
    return DeploymentSpec(
        safe_name(model.name),
        model.reference or str(model.path),
        engine=engine,
        scaling=ScalingPolicy(min_replicas=replicas, max_replicas=replicas),
        tool_parser=settings.fleet.tool_parser,
        grace_s=settings.server.grace_s,
    )


def safe_name(name: str) -> str:
    """What the fleet calls a model that clients may call by a path or a source: names of replicas and files."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:128] or "model"


async def _serve(
    fleet: Fleet, names: Mapping[str, str], wanted: int, settings: Settings, started: float, *, strict: bool
) -> int:
    """``names``: the public names of the models given on the command line, by those in the fleet. ``wanted``: so many
    deployments were asked for. ``strict``: one that cannot be served ends the server."""
    listener = bind(settings.server, has_keys(settings))
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        stack.push_async_callback(fleet.close)
        await fleet.start()
        # In a thread, so that this loop goes on starting replicas and talking to them meanwhile.
        app = await asyncio.to_thread(_build, settings)
        from toque.gateway.fleet_port import FleetPort
        from toque.gateway.monitoring import set_up
        from toque.gateway.server import GatewayServer
        from toque.registry.reader import RegistryReader

        gateway: Gateway = app.state.gateway
        gateway.fleet = fleet.admin
        gateway.registry = RegistryReader(settings.registry)
        port = FleetPort(
            gateway.deployments,
            fleet.link,
            settings.limits,
            gateway.latencies,
            public_names=names,
            hedge_after_s=settings.fleet.hedge_after_s,
        )
        port.start()
        stack.push_async_callback(port.close)
        monitoring = set_up(gateway, settings)
        stack.callback(monitoring.close)
        server = GatewayServer(app, settings.server, settings.limits.max_header_bytes)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            await _until_settled(port, serving, wanted, strict)
            if not serving.done():
                address = listener.getsockname()[1]
                print(greeting(_shown(gateway), settings, address, time.perf_counter() - started), flush=True)
                monitoring.start()  # only now: the database's packages take half a second to import
                # Whoever waited for the model comes first.
                later = asyncio.get_running_loop().call_later(DEVICES_S, monitoring.start_devices)
                stack.callback(later.cancel)
            await serving
        finally:
            if not serving.done():
                server.stop()
                server.stop()
                await serving
            gateway.close()
    return 0


async def _until_settled(port: FleetPort, serving: asyncio.Task[None], wanted: int, strict: bool) -> None:
    """Until every model answers, or the server was stopped before. UnavailableError says which one cannot."""
    waiting = asyncio.create_task(port.until_settled(wanted))
    try:
        async with asyncio.timeout(LOAD_S):
            await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            await waiting
    except UnavailableError as error:
        if strict:
            raise
        logging.getLogger("toque.gateway").error("not everything can be served: %s", error.message)
    finally:
        waiting.cancel()


def _build(settings: Settings) -> Starlette:
    """The application; importing what it takes is most of the work."""
    import toque.gateway.face
    import toque.text.template
    import toque.text.tokenizer  # noqa: F401  # imported now, beside the loop, and not with the first face
    from toque.gateway.app import create_app

    return create_app({}, settings)


def _shown(gateway: Gateway) -> list[tuple[str, bool]]:
    """The deployments' names, and whether each makes embeddings."""
    return [
        (name, (profile := deployment.profile) is not None and profile.card.embedding_size > 0)
        for name, deployment in gateway.deployments.items()
    ]


def resolve(
    reference: str, report: Report | None = None, registry: RegistrySettings | None = None
) -> ServedModel:
    """A model as people name it: a path, or a name that the registry knows; ``name=...`` says what clients call it.

    Only a plain name stands before the "=": in ``pypi:package==1.0#file`` and ``/a=b/c.gguf`` there is none.
    """
    name, separator, rest = reference.partition("=")
    if not name or any(mark in name for mark in ":/\\#"):
        name, separator, rest = reference, "", ""
    target = (rest if separator else reference).removeprefix("file:")
    path = Path(target).expanduser()
    settings = registry or from_environment()
    if path.exists():
        from toque.fleet.resolve import file_label
        from toque.registry.signing import check_path

        check_path(settings, path)
        plain = path.name.removesuffix(".gguf")
        state = file_state(path)
        return ServedModel(
            name if separator else plain, path.absolute(), label=file_label(path, state), state=state
        )
    from toque.registry.progress import LogProgress
    from toque.registry.store import Store
    from toque.registry.versions import resolve_version

    store = Store(registry=registry)
    # One look: what is checked, named and opened is the same version, though its alias move meanwhile.
    told = LogProgress(logging.getLogger("toque.registry")) if report is None else report
    version = resolve_version(target, store=store, report=told)
    if settings.require_signature:
        from toque.registry.signing import check_signed

        check_signed(store, version.reference)
    return ServedModel(name if separator else target, version.path, version.digest, version.reference, target)


def with_keys_file(settings: Settings) -> Settings:
    """The settings with the file that `toque keys` writes, where they name no other."""
    if settings.auth.keys_file:
        return settings
    from toque.gateway.key_file import NAME
    from toque.registry.home import default_home

    file = default_home() / NAME
    return replace(settings, auth=replace(settings.auth, keys_file=str(file)))


def has_keys(settings: Settings) -> bool:
    """Whether callers will need a key: as `KeyRing` sees it, before there is one."""
    return bool(settings.auth.api_keys) or Path(settings.auth.keys_file).is_file()


def check_names(models: Sequence[ServedModel]) -> None:
    """ConfigError for two models that nobody could tell apart."""
    names = [safe_name(model.name) for model in models]
    for name, model in zip(names, models, strict=True):
        if names.count(name) > 1:
            raise ConfigError(
                f"two models are called {model.name!r}: tell them apart with name=path", param="models"
            )


def greeting(served: Sequence[tuple[str, bool]], settings: Settings, port: int, seconds: float) -> str:
    """What is served where, and a call of the first model that works as it is; each with whether it embeds."""
    host = f"[{settings.server.host}]" if ":" in settings.server.host else settings.server.host
    url = f"http://{host}:{port}"
    if not served:
        return f"Toque serves nothing yet at {url}/v1; add a model with: toque deploy MODEL --url {url}"
    key = ' \\\n    -H "Authorization: Bearer $TOQUE_API_KEY"' if has_keys(settings) else ""
    first, embeds = served[0]
    path, content = "chat/completions", '"messages": [{"role": "user", "content": "Say hello"}]'
    if embeds:
        path, content = "embeddings", '"input": "Say hello"'
    body = f'{{"model": "{first}", {content}}}'
    return (
        f"Toque serves {', '.join(name for name, _ in served)} at {url}/v1 (ready in {seconds:.1f} s)\n"
        f"  curl {url}/v1/{path} -H 'Content-Type: application/json'{key} \\\n    -d '{body}'"
    )

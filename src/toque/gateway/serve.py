"""``toque serve``: models in, a running server out.

The order is what makes a cold start fast: the port is taken, the replica processes are started, and only then does
this process import its web stack and read the tokenizers, while the replicas load their weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from toque.config import Settings, engine_flags
from toque.errors import ConfigError, ModelError
from toque.gateway.listen import bind
from toque.monitor.log_format import configure_logs

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from toque.fleet.local import LocalDeployment
    from toque.registry.progress import Report

LOAD_S = 600.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    path: Path
    digest: str = ""  # of the version, where the store knows it


def serve(
    models: Sequence[str],
    settings: Settings,
    progress: Callable[[], AbstractContextManager[Report]] | None = None,
) -> int:
    """Serve until told to stop; the exit code. A ToqueError says what keeps it from serving at all.

    ``progress`` opens what is told of downloads while models are found; without it, the log is.
    """
    configure_logs(settings.server.log_level, settings.server.log_format)
    started = time.perf_counter()
    settings = with_keys_file(settings)
    with nullcontext() if progress is None else progress() as report:
        served = [resolve(reference, report) for reference in models or settings.models]
    _check_names(served)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(served, settings, started))


async def _serve(models: Sequence[ServedModel], settings: Settings, started: float) -> int:
    from toque.fleet.local import LocalDeployment, replica_command

    listener = bind(settings.server, has_keys(settings))
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        replicas: dict[str, LocalDeployment] = {}
        for model in models:
            command = [*replica_command(model.path, engine_flags(settings.engine)), "--digest", model.digest]
            replicas[model.name] = local = LocalDeployment(
                model.name,
                command,
                replicas=settings.fleet.replicas,
                grace_s=1.0,  # the server has drained by the time the replicas are told
                wait_s=settings.limits.load_wait_s,
                max_waiting=settings.limits.max_queued_requests,
            )
            await stack.enter_async_context(local)
        # In a thread, so that this loop goes on starting replicas and talking to them meanwhile.
        app = await asyncio.to_thread(_build, models, replicas, settings)
        from toque.gateway.monitoring import set_up
        from toque.gateway.server import GatewayServer

        monitoring = set_up(app.state.gateway, settings)
        stack.callback(monitoring.close)
        server = GatewayServer(app, settings.server, settings.limits.max_header_bytes)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            await _until_ready(replicas, serving)
            if not serving.done():
                port = listener.getsockname()[1]
                face = app.state.gateway.deployments[models[0].name].current
                embeds = face.card.embedding_size > 0
                print(greeting(models, settings, port, time.perf_counter() - started, embeds), flush=True)
                monitoring.start()  # only now: the database's packages take half a second to import
            await serving
        finally:
            if not serving.done():
                server.stop()
                server.stop()
                await serving
            app.state.gateway.close()
    return 0


async def _until_ready(replicas: Mapping[str, LocalDeployment], serving: asyncio.Task[None]) -> None:
    """Until every model answers, or the server was stopped before. UnavailableError says which one cannot."""

    async def every() -> None:
        await asyncio.gather(*(local.wait_ready(LOAD_S) for local in replicas.values()))

    waiting = asyncio.create_task(every())
    try:
        await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            await waiting
    finally:
        waiting.cancel()


def _build(
    models: Sequence[ServedModel], replicas: Mapping[str, LocalDeployment], settings: Settings
) -> Starlette:
    """The application; reads the parts of the model files that the gateway needs."""
    from toque.formats import load_checkpoint
    from toque.gateway.app import create_app
    from toque.gateway.deployment import Deployment, FixedDeployment
    from toque.text.template import load_template
    from toque.text.tokenizer import load_tokenizer
    from toque.types import ModelCard

    deployments: dict[str, Deployment] = {}
    for model in models:
        try:
            checkpoint = load_checkpoint(model.path)
            tokenizer = load_tokenizer(checkpoint)
            template = load_template(checkpoint, tokenizer)
        except ModelError as error:
            raise ModelError(f"cannot serve {model.path}: {error.message}", param=error.param) from error
        if tokenizer.degraded:
            logging.getLogger("toque.gateway").warning("model %s: %s", model.name, tokenizer.degraded)
        context = settings.engine.context_length or checkpoint.config.context_length
        card = ModelCard(
            name=model.name,
            architecture=checkpoint.config.architecture,
            parameters=checkpoint.parameters,
            quantization=settings.engine.quantize or checkpoint.quantization,
            context_length=min(context, checkpoint.config.context_length),
            vocab_size=checkpoint.config.vocab_size,
            digest=model.digest,
            created=int(model.path.stat().st_mtime),
            embedding_size=checkpoint.config.hidden_size if checkpoint.config.pooling else 0,
        )
        deployments[model.name] = FixedDeployment(
            model.name,
            replicas[model.name].pool,
            tokenizer,
            template,
            card,
            settings.limits,
            settings.fleet.tool_parser,
        )
    return create_app(deployments, settings)


def resolve(reference: str, report: Report | None = None) -> ServedModel:
    """A model as people name it: a path, or a name that the registry knows; ``name=...`` says what clients call it.

    Only a plain name stands before the "=": in ``pypi:package==1.0#file`` and ``/a=b/c.gguf`` there is none.
    """
    name, separator, rest = reference.partition("=")
    if not name or any(mark in name for mark in ":/\\#"):
        name, separator, rest = reference, "", ""
    target = (rest if separator else reference).removeprefix("file:")
    path = Path(target).expanduser()
    if path.exists():
        return ServedModel(name if separator else path.name.removesuffix(".gguf"), path.absolute())
    from toque.registry.store import Store

    store = Store()
    path = store.resolve(target, report)
    return ServedModel(name if separator else target, path, store.show(target).digest)


def with_keys_file(settings: Settings) -> Settings:
    """The settings with the file that `toque keys` writes, where they name no other."""
    if settings.auth.keys_file:
        return settings
    from toque.gateway.key_file import NAME
    from toque.registry.store import default_home

    file = default_home() / NAME
    return replace(settings, auth=replace(settings.auth, keys_file=str(file)))


def has_keys(settings: Settings) -> bool:
    """Whether callers will need a key: as `KeyRing` sees it, before there is one."""
    return bool(settings.auth.api_keys) or Path(settings.auth.keys_file).is_file()


def _check_names(models: Sequence[ServedModel]) -> None:
    if not models:
        raise ConfigError("no model to serve: name one, as in `toque serve smollm2`", param="models")
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two models are called {name!r}: tell them apart with name=path", param="models"
            )


def greeting(
    models: Sequence[ServedModel], settings: Settings, port: int, seconds: float, embeds: bool = False
) -> str:
    """What is served where, and a call of the first model that works as it is; ``embeds``: it makes embeddings."""
    host = f"[{settings.server.host}]" if ":" in settings.server.host else settings.server.host
    url = f"http://{host}:{port}"
    key = ' \\\n    -H "Authorization: Bearer $TOQUE_API_KEY"' if has_keys(settings) else ""
    path, content = "chat/completions", '"messages": [{"role": "user", "content": "Say hello"}]'
    if embeds:
        path, content = "embeddings", '"input": "Say hello"'
    body = f'{{"model": "{models[0].name}", {content}}}'
    return (
        f"Toque serves {', '.join(model.name for model in models)} at {url}/v1 (ready in {seconds:.1f} s)\n"
        f"  curl {url}/v1/{path} -H 'Content-Type: application/json'{key} \\\n    -d '{body}'"
    )

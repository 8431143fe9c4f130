"""What orchestrators and monitoring ask: is it alive, may it get traffic, what does it measure."""

from __future__ import annotations

import msgspec

from toque import __version__
from toque.gateway.condition import degradations
from toque.gateway.gateway import Gateway
from toque.gateway.http.exchange import Exchange


async def live(exchange: Exchange, gateway: Gateway) -> None:
    """The process answers. Nothing else: a model that loads or fails is no reason to kill it."""
    await exchange.answer(200, b'{"status":"alive"}')


async def ready(exchange: Exchange, gateway: Gateway) -> None:
    """Whether new requests should come here."""
    status = "ready" if gateway.ready else "draining" if gateway.draining else "not ready"
    await exchange.answer(200 if gateway.ready else 503, msgspec.json.encode({"status": status}))


async def health(exchange: Exchange, gateway: Gateway) -> None:
    """As `/ready`, with each model's state and the reason in words, and what is amiss although it is ready."""
    degraded = [{"part": part, "reason": reason} for part, reason in degradations(gateway)]
    good = "degraded" if degraded else "ok"
    answer = {
        "status": good if gateway.ready else "draining" if gateway.draining else "unhealthy",
        "version": __version__,
        "models": [
            {"name": name, "state": deployment.state, "reason": deployment.reason}
            for name, deployment in gateway.deployments.items()
        ],
        "degraded": degraded,
    }
    await exchange.answer(200 if gateway.ready else 503, msgspec.json.encode(answer))


async def metrics(exchange: Exchange, gateway: Gateway) -> None:
    text, content_type = gateway.metrics.negotiated(exchange.header(b"accept") or "")
    await exchange.answer(200, text, [(b"content-type", content_type.encode())])

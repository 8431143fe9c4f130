"""``/v1/models``: exactly the names that requests may use."""

from __future__ import annotations

from typing import Any

import msgspec

from toque.errors import UnavailableError
from toque.gateway.deployment import Deployment, find_deployment
from toque.gateway.gateway import Gateway
from toque.gateway.http.exchange import Exchange


async def list_models(exchange: Exchange, gateway: Gateway) -> None:
    """Models that can answer; one that is loading or dead is not listed as if it could."""
    data = [_model(d, gateway) for d in gateway.deployments.values() if d.serving]
    await exchange.answer(200, msgspec.json.encode({"object": "list", "data": data}))


async def show_model(exchange: Exchange, gateway: Gateway) -> None:
    deployment = find_deployment(gateway.deployments, exchange.scope["path_params"]["id"])
    if not deployment.serving:
        why = deployment.client.reason or f"it is {deployment.client.state}"
        raise UnavailableError(f"model {deployment.name} cannot answer now: {why}")
    await exchange.answer(200, msgspec.json.encode(_model(deployment, gateway)))


def _model(deployment: Deployment, gateway: Gateway) -> dict[str, Any]:
    card = deployment.card
    return {
        "id": deployment.name,
        "object": "model",
        "created": card.created or int(gateway.started),
        "owned_by": "toque",
        "context_length": card.context_length,
        "architecture": card.architecture,
        "quantization": card.quantization,
        "parameters": card.parameters,
        "version": deployment.version,
    }

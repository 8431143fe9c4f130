"""``/v1/models``: exactly the names that requests may use."""

from __future__ import annotations

from typing import Any

import msgspec

from toque.gateway.deployment import find_deployment, unavailable
from toque.gateway.face import Profile
from toque.gateway.gateway import Gateway
from toque.gateway.http.exchange import Exchange


async def list_models(exchange: Exchange, gateway: Gateway) -> None:
    """Models that can answer, those that wake for it included; one that is loading or dead is not listed as if it
    could."""
    data = [
        _model(profile, gateway)
        for deployment in gateway.deployments.values()
        if deployment.listed and (profile := deployment.profile) is not None
    ]
    await exchange.answer(200, msgspec.json.encode({"object": "list", "data": data}))


async def show_model(exchange: Exchange, gateway: Gateway) -> None:
    deployment = find_deployment(gateway.deployments, exchange.scope["path_params"]["id"])
    profile = deployment.profile
    if profile is None or not deployment.listed:
        raise unavailable(deployment)
    await exchange.answer(200, msgspec.json.encode(_model(profile, gateway)))


def _model(profile: Profile, gateway: Gateway) -> dict[str, Any]:
    card = profile.card
    return {
        "id": profile.name,
        "object": "model",
        "created": card.created or int(gateway.started),
        "owned_by": "toque",
        "context_length": card.context_length,
        "architecture": card.architecture,
        "quantization": card.quantization,
        "parameters": card.parameters,
        "version": profile.version,
    }

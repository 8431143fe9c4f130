"""Which version of a model a new request goes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b


def point_of(request_id: str) -> float:
    """A number from 0 to 1 that is the same for the same request everywhere: which part of the traffic it is."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "big") / 2**64


def choose_version(
    shares: Mapping[str, float], point: float, able: Callable[[str], bool] = lambda version: True
) -> str | None:
    """The version at ``point`` of the shares of those that are able to take requests; None where none is.

    As long as every version is able, the same request goes to the same version in every gateway.
    """
    weights = {version: share for version, share in sorted(shares.items()) if share > 0 and able(version)}
    left = point * sum(weights.values())
    chosen = None
    for version, share in weights.items():
        chosen = version
        left -= share
        if left < 0:
            break
    return chosen

"""Which replica a request goes to: one policy per file, without I/O and clocks."""

from __future__ import annotations

from toque.errors import ConfigError
from toque.routing.policies.base import Policy
from toque.routing.policies.least_load import LeastLoad
from toque.routing.policies.prefix import PrefixAffinity
from toque.routing.policies.round_robin import RoundRobin

POLICIES: dict[str, type[Policy]] = {
    "least_load": LeastLoad,
    "prefix": PrefixAffinity,
    "round_robin": RoundRobin,
}


def policy_named(name: str) -> Policy:
    """Raises ConfigError for a name that is none."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise ConfigError(
            f"routing must be one of {', '.join(POLICIES)}, got {name!r}", param="routing"
        ) from None

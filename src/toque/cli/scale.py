"""`toque scale`: how many replicas a deployment may have."""

from __future__ import annotations

import re
from typing import Any

import click

from toque.cli.admin_api import (
    AdminApi,
    brief,
    path_of,
    server_options,
    settled,
    show,
    wait_options,
    wait_until,
)


@click.command()
@click.argument("name")
@click.argument("replicas")
@click.option(
    "--idle", type=click.FloatRange(0), help="Seconds without a request until it sleeps, with 0 allowed."
)
@wait_options
@server_options
def command(
    name: str,
    replicas: str,
    idle: float | None,
    wait: bool,
    timeout: float,
    url: str,
    key: str,
    as_json: bool,
) -> None:
    """Let NAME have REPLICAS: exactly 3, or 1..3 as the load asks, or 0..3 so that it sleeps while nobody asks.

    A request for a sleeping model wakes it and waits. `toque stop` is for good.
    """
    low, high = _bounds(replicas)
    api = AdminApi(url, key)
    if idle is None:
        view = api.post(path_of("deployments", name, "scale"), {"min_replicas": low, "max_replicas": high})
    else:
        spec = api.get(path_of("deployments", name))["spec"]
        spec["scaling"] |= {
            "min_replicas": low,
            "max_replicas": high or max(low, spec["scaling"]["max_replicas"]),
            "downscale_to_zero_delay_s": idle,
        }
        view = api.post("deployments", spec)
    if wait:

        def done(seen: Any) -> bool:
            return settled(seen) and (idle is None or low > 0 or seen["status"] == "asleep")

        view = wait_until(lambda: api.get(path_of("deployments", name)), done, brief, timeout)
    show(view, as_json, brief(view))
    if wait and view["status"] == "failed":
        raise click.exceptions.Exit(1)


def _bounds(text: str) -> tuple[int, int | None]:
    found = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", text)
    if found is None:
        raise click.UsageError(
            f"REPLICAS is a number, such as 2, or a range, such as 0..3, got {text[:40]!r}"
        )
    low = int(found[1])
    high = int(found[2]) if found[2] else low
    return low, high or None  # 0: it may sleep, and wake to as many as before

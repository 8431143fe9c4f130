"""What a deployment shall be: the desired state, as the configuration file, the CLI and the admin API all write it.

Names follow Ray Serve's where they mean the same, so that people and policies port.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(ge=0, le=31 * 86_400)]
Replicas = Annotated[int, Meta(ge=0, le=1000)]
Share = Annotated[float, Meta(gt=0, le=1)]


class KeepWarm(Struct, frozen=True, forbid_unknown_fields=True):
    """A weekly window, in the machine's local time, in which at least ``min_replicas`` are up."""

    start: Annotated[str, Meta(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]
    end: Annotated[str, Meta(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]  # before ``start``: on the next day
    days: tuple[Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"], ...] = ()  # none: every day
    min_replicas: Annotated[int, Meta(ge=1, le=1000)] = 1


class ScalingPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """How many replicas: between min and max, by what is measured. Without a span there is nothing to scale."""

    min_replicas: Replicas = 1
    max_replicas: Annotated[int, Meta(ge=1, le=1000)] = 1
    target_queue_s: Annotated[float, Meta(gt=0, le=3600)] = 0.5  # queued tokens over measured tokens/s
    target_ongoing_requests: Annotated[float, Meta(gt=0)] = 16.0  # running, on each replica
    target_ttft_s: Seconds = 0.0  # p95 to stay under; 0: not looked at
    max_kv_usage: Share = 0.9
    upscale_delay_s: Seconds = 1.0
    downscale_delay_s: Seconds = 60.0
    downscale_to_zero_delay_s: Seconds = 300.0  # idle for so long, with min_replicas 0
    keep_warm: tuple[KeepWarm, ...] = ()


class RolloutPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """How a new version takes over. The strategy ``auto`` is surge where there is memory for two, else swap.
    ``follow``: when the alias that is deployed moves, the rollout is proposed (``manual``), or begins (``auto``)."""

    strategy: Literal["auto", "surge", "canary", "swap"] = "auto"
    follow: Literal["manual", "auto"] = "manual"
    max_surge: Annotated[int, Meta(ge=1, le=1000)] = 1
    steps: tuple[Share, ...] = (0.05, 0.25, 0.5)  # of a canary's share, before all of it
    step_s: Seconds = 60.0  # at least so long at each step
    min_requests: Annotated[int, Meta(ge=1)] = 20  # of the new version at each step, before it is judged
    max_error_rate: Annotated[float, Meta(ge=0, le=1)] = 0.02  # above the old version's
    max_latency_ratio: Annotated[float, Meta(ge=1)] = 1.5  # of the p95 TTFT and TPOT to the old version's
    ready_timeout_s: Seconds = 600.0  # a version that is not ready by then is rolled back


class Resources(Struct, frozen=True, forbid_unknown_fields=True):
    """What one replica is given. 0: measured from the model (memory), or as the machine has it."""

    memory_mb: Annotated[int, Meta(ge=0)] = 0
    cpus: Annotated[float, Meta(ge=0)] = 0.0
    gpus: Annotated[float, Meta(ge=0)] = 0.0


class DeploymentSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One deployment. ``model`` is a reference that is resolved to a pinned version when it is applied; ``engine``
    holds EngineOptions by field name."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    model: str
    engine: dict[str, bool | int | float | str | None] = {}
    scaling: ScalingPolicy = ScalingPolicy()
    rollout: RolloutPolicy = RolloutPolicy()
    resources: Resources = Resources()
    routing: Literal["least_load", "prefix", "round_robin"] = "least_load"
    tool_parser: str = ""
    grace_s: Seconds = 30.0  # what running requests get when a replica is stopped
    evictable: bool = True  # may be put to sleep to make room for another model, when it is idle

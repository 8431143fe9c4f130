"""One measurement from start to document: what `toque bench` and `make bench` run."""

from __future__ import annotations

import asyncio
import datetime
import platform
from collections.abc import Callable
from typing import Any

import toque
from toque.bench.client import Record, Target
from toque.bench.dataset import WordRate
from toque.bench.document import document
from toque.bench.plan import Plan
from toque.bench.run import calibrate
from toque.bench.session import Result, Session
from toque.bench.slo import Slo


def benchmark(
    target: Target,
    plan: Plan,
    *,
    slo: Slo | None = None,
    repeats: int = 1,
    warm_up: int = 1,
    timeout_s: float = 600.0,
    progress: Callable[[str, Record], None] | None = None,
) -> dict[str, Any]:
    """Measure, and return the document of `document.document`. Raises ConfigError for a plan that is wrong.

    Failed requests are part of the figures, never raised.
    """
    chat = target.endpoint == "chat"
    plan.validate(chat=chat)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    session = Session(target, repeats, warm_up, plan.seed, timeout_s, progress)

    async def everything() -> tuple[WordRate, list[Result]]:
        rate = await calibrate(target, timeout_s=timeout_s)
        loads, sweep = plan.build(rate, chat=chat)
        return rate, await session.run(loads, sweep)

    with asyncio.Runner(loop_factory=_event_loop) as runner:
        rate, results = runner.run(everything())
    settings = {
        "seed": plan.seed,
        "warm_up": warm_up,
        "repeats": repeats,
        "ignore_eos": target.ignore_eos,
        "timeout_s": timeout_s,
        "slo": str(slo) if slo else "",
        "lengths_in": "tokens" if rate.measured else "words",
        "tokens_per_word": round(rate.per_word, 3),
        "tokens_of_template": round(rate.overhead, 1),
    }
    client = {"toque": toque.__version__, "python": platform.python_version(), "machine": platform.platform()}
    facts = {
        "model": target.model,
        "url": target.url,
        "endpoint": target.endpoint,
        "started": started,
        "client": client,
        "settings": settings,
    }
    return document(results, facts, slo)


def _event_loop() -> asyncio.AbstractEventLoop:
    """uvloop where there is one: it leaves more of the shared cores to the server."""
    try:
        import uvloop
    except ImportError:  # on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()

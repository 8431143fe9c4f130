"""What /admin/v1/requests tells of one request: its row, its events, its attempts; to whom it belongs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from toque.monitor.event_log import EventLog
from toque.monitor.ledger.ledger import Ledger
from toque.routing.base import OnRoute, RouteEvent, RouteKind
from toque.routing.fake import FakeEngineClient, Script
from toque.types import EngineRequest, SequenceOutput, StepEvent, StepEventKind

from .test_ledger import kept, rows
from .world import Plan, World, soon, spoken


class Moved(FakeEngineClient):
    """An answer whose replica dies after two tokens, and which another one finishes: as a pool tells of it."""

    async def generate(
        self, request: EngineRequest, on_route: OnRoute | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        assert on_route is not None
        on_route(RouteEvent(RouteKind.ROUTED, 0.0, "parrot-0", 1))
        count = 0
        async for output in super().generate(request):
            output.device_us = 10
            if count == 0:
                output.events = [
                    StepEvent(StepEventKind.SCHEDULED, 5, 0, 1),
                    StepEvent(StepEventKind.PREFILL, 9, len(request.prompt), 1),
                ]
            if count == 2:
                on_route(RouteEvent(RouteKind.MIGRATED, 0.0, "parrot-1", 1, tokens=2, reason="it died"))
            count += 1
            yield output


@asynccontextmanager
async def told(folder: Path, plan: Plan, *, sockets: bool = False) -> AsyncIterator[tuple[World, Ledger]]:
    async with kept(folder, plan, sockets=sockets) as (w, ledger):
        w.gateway.event_log = EventLog(folder)
        yield w, ledger


async def ask(w: World, name: str) -> list[dict[str, Any]]:
    answer = await w.client.get(f"/admin/v1/requests/{name}")
    return answer.json()["data"] if answer.status_code == 200 else []


async def test_a_moved_answer_is_told_with_both_attempts_and_billed_once(tmp_path: Path) -> None:
    async with told(tmp_path, Plan(script=spoken("words"))) as (w, ledger):
        w.deployment.current.client = Moved(w.engine.script)
        answer = (await w.complete()).json()
        (row,) = await asyncio.to_thread(rows, ledger)
        (found,) = await ask(w, answer["id"])
        assert (
            found["completion_tokens"]
            == row["completion_tokens"]
            == answer["usage"]["completion_tokens"]
            == 6
        )
        assert found["list_nano"] == 3 * 500 + 6 * 2_000
        assert [(a["replica"], a["outcome"], a["completion_tokens"]) for a in found["attempts"]] == [
            ("parrot-0.1", "moved", 2),
            ("parrot-1.1", "ok", 4),
        ]
        assert sum(attempt["device_ns"] for attempt in found["attempts"]) == found["device_ns"] == 60_000
        events = [(event["event"], event.get("note", "")) for event in found["events"]]
        assert events == [
            ("admitted", ""),
            ("prepared", ""),
            ("routed", "parrot-0.1"),
            ("scheduled", ""),
            ("prefill", ""),
            ("first_token", ""),
            ("migrated", "parrot-1.1: it died"),
            ("finished", "stop"),
            ("closed", "ok 200 (stop)"),
        ]


async def test_a_request_that_runs_is_told_as_far_as_it_is(tmp_path: Path) -> None:
    plan = Plan(script=Script(b"x" * 500, delay_s=0.01, hold=True))
    async with told(tmp_path, plan, sockets=True) as (w, ledger):
        running = asyncio.create_task(w.complete(max_tokens=100))
        await soon(lambda: w.engine.running == 1)
        await soon(lambda: ledger.status().open == 1)
        await asyncio.to_thread(ledger.flush)
        name = next(iter(w.gateway.event_log.open_trails))
        (found,) = await ask(w, name)
        assert "admitted" in [event["event"] for event in found["events"]]
        assert "closed" not in [event["event"] for event in found["events"]]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await soon(lambda: not w.gateway.event_log.open_trails)
        assert (await ask(w, name))[0]["events"][-1]["note"].startswith("cancelled 499")


async def test_a_key_sees_its_own_requests_only(tmp_path: Path) -> None:
    async with told(tmp_path, Plan(flags={"auth.api_keys": ("one", "two")})) as (w, ledger):
        w.client.headers["authorization"] = "Bearer one"
        name = (await w.complete()).json()["id"]
        assert await asyncio.to_thread(ledger.flush)
        assert len(await ask(w, name)) == 1
        w.client.headers["authorization"] = "Bearer two"
        assert await ask(w, name) == []

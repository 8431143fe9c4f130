"""Sends a load: closed loops keep so many requests in flight, open loops keep their times whatever the server does."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from toque.bench.arrivals import Process, arrivals
from toque.bench.client import Record, Target, send
from toque.bench.dataset import Conversation, Dataset, WordRate, prompt, user
from toque.bench.report import Run

_HEAD_START = 0.05  # seconds from planning an open loop to its first send


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """``streams`` conversations at once, each followed by the next as soon as it ends."""

    streams: int = 1

    def __str__(self) -> str:
        return "synchronous" if self.streams == 1 else f"concurrent {self.streams}"


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Conversations start at times fixed in advance, ``rate`` a second on average."""

    process: Process
    rate: float

    def __str__(self) -> str:
        return f"{self.process} {self.rate:g}/s"


Profile = ClosedLoop | OpenLoop


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent and how. At most ``requests`` conversations, none begun after ``duration_s`` seconds."""

    name: str
    dataset: Dataset
    profile: Profile
    requests: int
    duration_s: float = float("inf")


async def measure(
    target: Target,
    load: Load,
    *,
    seed: str = "0",
    warm_up: int = 1,
    timeout_s: float = 600.0,
    progress: Callable[[Record], None] | None = None,
) -> Run:
    """Send ``warm_up`` conversations that are not counted, then the load; wait until every answer has ended."""
    records: list[Record] = []
    dataset = load.dataset.reseeded(f"{seed}/{load.name}")

    async def converse(conversation: Conversation, planned: float | None, told: bool = True) -> None:
        messages: list[dict[str, Any]] = []
        for number, turn in enumerate(conversation.turns, 1):
            messages += turn.messages
            record = await send(
                target, messages, turn.output_tokens,
                planned=planned, timeout_s=timeout_s, keep_text=number < len(conversation.turns),
            )  # fmt: skip
            if told:
                records.append(record)
                if progress is not None:
                    progress(record)
            if not record.ok:
                return
            messages.append({"role": "assistant", "content": record.text})
            planned = None  # the next question is due when this answer has been read

    for index in range(warm_up):
        await converse(dataset.warm_up(index), None, told=False)
    if isinstance(load.profile, ClosedLoop):
        began = time.perf_counter()
        left = iter(range(load.requests))

        async def stream(indices: Iterator[int]) -> None:
            for index in indices:
                if time.perf_counter() - began >= load.duration_s:
                    return
                await converse(dataset.conversation(index), None)

        await asyncio.gather(*(stream(left) for _ in range(min(load.profile.streams, load.requests))))
        return Run(sorted(records, key=lambda r: r.planned))
    due = arrivals(
        load.profile.process, load.profile.rate, f"{seed}/{load.name}",
        requests=load.requests, duration_s=load.duration_s,
    )  # fmt: skip
    # Made before the first is sent: nothing but sending happens between two planned times.
    conversations = [dataset.conversation(index) for index in range(len(due))]
    start = time.perf_counter() + _HEAD_START
    async with asyncio.TaskGroup() as tasks:
        for at, conversation in zip(due, conversations, strict=True):
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            tasks.create_task(converse(conversation, start + at))
    return Run(sorted(records, key=lambda r: r.planned), load.profile.rate)


async def calibrate(target: Target, *, timeout_s: float = 600.0) -> WordRate:
    """Learn how the server counts our words from the usage of two short requests.

    Where it sends none (or refuses), a word counts as a token; the report then says so by ``measured``.
    """
    sizes, counts = (32, 160), []
    for size in sizes:
        text = prompt(random.Random(f"calibrate/{size}"), size)
        record = await send(target, [user(text)], 1, timeout_s=timeout_s)
        if not record.ok or not record.from_usage:
            return WordRate()
        counts.append(record.prompt_tokens)
    per_word = (counts[1] - counts[0]) / (sizes[1] - sizes[0])
    if per_word <= 0:
        return WordRate()
    return WordRate(counts[0] - sizes[0] * per_word, per_word, measured=True)

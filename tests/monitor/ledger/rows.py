"""Made-up usage, for tests of what adds it up."""

from __future__ import annotations

import random
from dataclasses import dataclass

from toque.monitor.ledger.record import Attempt, Outcome, UsageRecord

ENDED = [outcome.value for outcome in Outcome if outcome is not Outcome.OPEN]
START = 1_790_000_000  # a moment in September 2026


@dataclass
class Maker:
    """Records with few different names, so that they share groups, over ``days`` from START on."""

    seed: int = 0
    days: float = 3.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.count = 0

    def closed(self, **fields: object) -> UsageRecord:
        r = self.random
        self.count += 1
        prompt = r.randrange(0, 2_000)
        completion = r.randrange(0, 500)
        opened = int((START + r.random() * self.days * 86_400) * 1e6)
        total = r.randrange(1, 90_000_000)
        record = UsageRecord(
            f"req-{self.seed}-{self.count}",
            opened,
            closed_at=opened + total,
            outcome=r.choice(ENDED),
            status=200,
            gateway="gw.1",
            tenant=r.choice(["", "acme", "bolt"]),
            key_id=r.choice(["k1", "k2"]),
            endpoint=r.choice(["/v1/chat/completions", "/v1/completions"]),
            model=r.choice(["parrot", "smollm2"]),
            version=r.choice(["v1", "v2"]),
            replica="r1",
            stream=r.random() < 0.5,
            choices=r.randrange(1, 4),
            prompt_tokens=prompt,
            cached_tokens=r.randrange(0, prompt + 1),
            completion_tokens=completion,
            reasoning_tokens=r.randrange(0, completion + 1),
            finish_reason="stop",
            queue_us=r.randrange(0, 10**6),
            ttft_us=r.randrange(0, 10**6),
            total_us=total,
            device_ns=r.randrange(0, 10**10),
            list_nano=r.randrange(0, 10**9),
            cost_nano=r.randrange(0, 10**9),
        )
        for number in range(r.choice([0, 0, 0, 2])):
            record.attempts.append(Attempt(number + 1, f"r{number}", opened, "failed", prompt_tokens=prompt))
        for name, value in fields.items():
            setattr(record, name, value)
        return record

"""What several tests of replicas write again and again."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from toque.proto import replica_pb2 as pb
from toque.proto.messages import decode_step, parse_server_message
from toque.routing.base import EngineClient
from toque.types import EngineRequest, SamplingParams, SequenceOutput


@dataclass
class Inbox:
    """A link that keeps what it is given, parsed."""

    messages: list[pb.ServerMessage] = field(default_factory=list)

    def send(self, payload: bytes) -> None:
        self.messages.append(parse_server_message(payload))

    def tokens(self, handle: int) -> list[int]:
        steps = (decode_step(message.step, {}) for message in self.messages)
        rows = (row for handles, outputs in steps for row in zip(handles, outputs, strict=True))
        return [token for h, output in rows if h == handle for token in output.tokens]

    @property
    def errors(self) -> list[pb.RequestError]:
        return [m.error for m in self.messages if m.WhichOneof("body") == "error"]


Start = Callable[..., "subprocess.Popen[bytes]"]


def request(*prompt: int, **sampling: object) -> EngineRequest:
    return EngineRequest(f"r{prompt[0]}", prompt, SamplingParams(**sampling))  # type: ignore[arg-type]


async def collect(client: EngineClient, asked: EngineRequest) -> list[SequenceOutput]:
    return [output async for output in client.generate(asked)]


def flat(outputs: Iterable[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


async def until(condition: Callable[[], object], within_s: float) -> None:
    """Returns once it holds; fails when that takes longer. The last look is at the very end."""
    for _ in range(int(within_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    assert condition(), f"not within {within_s} s"

"""In what order one step's outputs reach their readers."""

from __future__ import annotations

import asyncio

from toque.proto.messages import encode_step
from toque.routing.core import ClientCore
from toque.routing.session import _Stream
from toque.types import EngineRequest, FinishReason, SamplingParams, SequenceOutput


async def test_a_first_token_is_read_before_the_next_ones_of_the_others() -> None:
    core, order = ClientCore(), list[tuple[str, int]]()

    async def read(name: str, stream: _Stream) -> None:
        while True:
            while stream.outputs:
                output = stream.outputs.popleft()
                order.append((name, output.tokens[0]))
                if output.finish_reason is not None:
                    return
            await stream.wait()

    handles, tasks = {}, []
    for name in ("old", "older", "new", "newest"):
        stream = _Stream()
        handles[name], _ = core.submit(EngineRequest(name, (1, 2), SamplingParams()), stream)
        tasks.append(asyncio.create_task(read(name, stream)))

    async def step(**tokens: int) -> None:
        """Tokens come in this order; a 9 is the last."""
        rows = [
            SequenceOutput("", [token], finish_reason=FinishReason.STOP if token == 9 else None)
            for token in tokens.values()
        ]
        core.receive(encode_step([handles[name] for name in tokens], rows))
        for _ in range(3):
            await asyncio.sleep(0)

    await asyncio.sleep(0)
    await step(old=1, older=1)
    await step(old=2, older=2, new=1, newest=9)
    await step(old=9, older=9, new=9)
    await asyncio.gather(*tasks)
    assert order == [
        *(("old", 1), ("older", 1)),
        *(("new", 1), ("newest", 9), ("old", 2), ("older", 2)),
        *(("old", 9), ("older", 9), ("new", 9)),
    ]
    assert core.open_answers == 0

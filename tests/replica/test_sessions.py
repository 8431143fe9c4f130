"""A replica process around the fake engine, over both carriers: what a client sees."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest

from replica.clients import Start, collect, flat, request, until
from toque.errors import ContextLengthError, EngineError, PayloadTooLargeError, RequestError, UnavailableError
from toque.replica.fake import BREAKS_STEP, FAILS, REFUSED
from toque.routing.base import ReplicaState
from toque.routing.session import ReplicaSession
from toque.types import FinishReason


async def test_many_requests_at_once_each_get_their_own_tokens(session: ReplicaSession) -> None:
    async def one(i: int) -> None:
        outputs = await collect(session, request(i, i + 1, max_tokens=7))
        assert flat(outputs) == [i, i + 1, i, i + 1, i, i + 1, i]
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert {o.request_id for o in outputs} == {f"r{i}"}

    await asyncio.gather(*(one(i) for i in range(100)))
    assert session.in_flight == 0


async def test_describes_the_model_and_reports_stats(session: ReplicaSession) -> None:
    assert session.card is not None
    assert (session.card.architecture, session.card.context_length) == ("fake", 4096)
    before = session.stats()
    await collect(session, request(1, 2, 3, max_tokens=4))
    await until(lambda: session.stats().generated_tokens >= before.generated_tokens + 4, 5)
    assert session.stats().prompt_tokens >= before.prompt_tokens + 3
    assert session.stats().steps >= before.steps + 4


async def test_logprobs_and_stop_ids_pass(session: ReplicaSession) -> None:
    outputs = await collect(session, request(5, 6, logprobs=1, prompt_logprobs=0, stop_token_ids=(6,)))
    assert flat(outputs) == [5, 6]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token) == (FinishReason.STOP, 6)
    assert outputs[0].prompt_logprobs is not None
    assert outputs[0].prompt_logprobs[0] is None
    assert [entry.token for o in outputs for entry in o.logprobs or ()] == [5, 6]


async def test_an_abandoned_answer_frees_the_engine_within_a_second(session: ReplicaSession) -> None:
    """Field case BR-048."""
    streams = [session.generate(request(i, max_tokens=2000)) for i in range(8)]
    for stream in streams:
        await anext(stream)
    for stream in streams:
        await stream.aclose()
    await until(lambda: not session.stats().running and not session.stats().kv_blocks_used, 1)
    await asyncio.gather(*(collect(session, request(i, max_tokens=1)) for i in range(200)))
    assert session.in_flight == 0


async def test_a_cancelled_reader_aborts_too(session: ReplicaSession) -> None:
    reading = asyncio.create_task(collect(session, request(1, max_tokens=100_000)))
    await until(lambda: session.stats().running, 5)
    reading.cancel()
    await until(lambda: not session.stats().running, 1)
    assert session.in_flight == 0


async def test_a_lost_session_ends_its_requests_within_a_second(
    session: ReplicaSession, shared_address: str
) -> None:
    other = ReplicaSession("other", shared_address)
    other.start()
    await other.wait_ready(20)
    stream = other.generate(request(1, max_tokens=100_000))
    await anext(stream)
    await other.close()
    with pytest.raises(EngineError, match="went away in the middle"):
        async for _ in stream:
            pass
    await until(lambda: not session.stats().running, 1)


async def test_what_the_engine_refuses_keeps_its_class(session: ReplicaSession) -> None:
    with pytest.raises(RequestError, match="does not like") as refused:
        await collect(session, request(REFUSED))
    assert refused.value.param == "prompt"
    with pytest.raises(ContextLengthError, match="5000 tokens, the context takes 4096"):
        await collect(session, request(*range(5000)))
    assert flat(await collect(session, request(3, max_tokens=1))) == [3]


async def test_one_requests_failure_is_that_requests_alone(session: ReplicaSession) -> None:
    other = asyncio.create_task(collect(session, request(1, max_tokens=50)))
    failed = await collect(session, request(FAILS))
    assert (failed[-1].finish_reason, failed[-1].error) == (FinishReason.ERROR, "this request failed")
    assert flat(await other) == [1] * 50


async def test_a_step_that_breaks_is_an_engine_error_and_the_next_request_works(
    session: ReplicaSession,
) -> None:
    with pytest.raises(EngineError, match="the engine failed: ZeroDivisionError"):
        await collect(session, request(BREAKS_STEP))
    assert flat(await collect(session, request(3, max_tokens=2))) == [3, 3]


async def test_a_request_too_big_for_a_message_is_refused_before_it_is_sent(session: ReplicaSession) -> None:
    with pytest.raises(PayloadTooLargeError, match="at most 16777216 are allowed"):
        await collect(session, request(*([1] * 4_200_000)))
    assert flat(await collect(session, request(3, max_tokens=1))) == [3]


async def test_drain_finishes_what_runs_refuses_what_is_new_and_exits(
    start_replica: Start, address: str
) -> None:
    process = start_replica("--step-s", "0.02", grpc=address.startswith("grpc"))
    session = ReplicaSession("r", address)
    session.start()
    await session.wait_ready(20)
    running = asyncio.create_task(collect(session, request(1, max_tokens=75)))
    await asyncio.sleep(0.1)
    session.drain(30)
    await until(lambda: session.state is not ReplicaState.READY, 20)
    assert session.state is ReplicaState.DRAINING
    with pytest.raises(UnavailableError, match="draining"):
        await collect(session, request(2, max_tokens=1))
    outputs = await running
    assert flat(outputs) == [1] * 75
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert await exit_status(process) == 0
    await session.close()


async def test_sigterm_drains_and_ends_what_outlives_the_grace(start_replica: Start, address: str) -> None:
    process = start_replica("--step-s", "0.01", "--drain-s", "0.3", grpc=address.startswith("grpc"))
    session = ReplicaSession("r", address)
    session.start()
    await session.wait_ready(20)
    stream = session.generate(request(1, max_tokens=100_000))
    await anext(stream)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(UnavailableError, match="the grace period is over"):
        async for _ in stream:
            pass
    assert await exit_status(process) == 0
    await session.close()


async def test_sigterm_again_changes_nothing_and_sigint_ends_what_is_left(
    start_replica: Start, run_folder: Path
) -> None:
    process = start_replica("--step-s", "0.01", "--drain-s", "60")
    session = ReplicaSession("r", str(run_folder / "r.sock"))
    session.start()
    await session.wait_ready(20)
    stream = session.generate(request(1, max_tokens=100_000))
    await anext(stream)
    process.send_signal(signal.SIGTERM)
    await until(lambda: session.state is ReplicaState.DRAINING, 20)
    assert flat([await anext(stream)]) == [1]
    for _ in range(50):  # also while it is busy with the ones before
        process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    assert len(flat([await anext(stream) for _ in range(30)])) >= 30
    process.send_signal(signal.SIGINT)
    with pytest.raises(UnavailableError, match="the grace period is over"):
        async for _ in stream:
            pass
    assert await exit_status(process, within_s=20) == 0
    await session.close()


async def test_says_that_it_is_loading_and_refuses_meanwhile(start_replica: Start, address: str) -> None:
    start_replica("--load-s", "1.5", grpc=address.startswith("grpc"))
    session = ReplicaSession("r", address)
    session.start()
    await until(lambda: "loading" in session.reason, 5)
    assert session.state is ReplicaState.STARTING
    with pytest.raises(UnavailableError, match="loading"):
        await collect(session, request(1))
    await session.wait_ready(20)
    assert flat(await collect(session, request(1, max_tokens=1))) == [1]
    await session.close()


async def test_a_model_that_does_not_load_is_said_with_its_reason(start_replica: Start, address: str) -> None:
    process = start_replica(
        "--load-s", "2.5", "--refuse", "tensor 7 is cut off", grpc=address.startswith("grpc")
    )
    session = ReplicaSession("r", address)
    session.start()
    with pytest.raises(UnavailableError, match="tensor 7 is cut off"):
        await session.wait_ready(20)
    assert await exit_status(process) == 2
    await session.close()


async def exit_status(process: subprocess.Popen[bytes], within_s: float = 5) -> int | None:
    await until(lambda: process.poll() is not None, within_s)
    return process.returncode

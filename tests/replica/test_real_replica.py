"""A replica process around the real engine, with a toy model on the reference backend."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fixtures.fleet import PooledFleet
from fixtures.parrot import END, make_parrot, parrot_vocab, script
from replica.clients import collect, flat, until
from toque.engine.engine import Engine
from toque.engine.loader import load_engine
from toque.engine.options import EngineOptions
from toque.errors import ContextLengthError, ModelError, RequestError, UnavailableError
from toque.file_state import file_state
from toque.fleet.launch import replica_command
from toque.routing.session import ReplicaSession
from toque.types import EngineRequest, FinishReason, SamplingParams

ENGINE = {"backend": "reference", "kv_blocks": 64, "max_sequences": 8}
LOOP = {"a": "b", "b": "c", "c": "a", **script("?", ["yes", "!"])}
VOCAB = parrot_vocab(LOOP)


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parrot(tmp_path_factory.mktemp("parrot"), LOOP, context_length=512)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(parrot: Path) -> AsyncIterator[PooledFleet]:
    async with PooledFleet(replica_command(parrot, ENGINE)) as deployment:
        await deployment.wait_ready(60)
        yield deployment


def request(name: str, *pieces: str, **sampling: object) -> EngineRequest:
    sampling = {
        "temperature": 0.0,
        "max_tokens": 6,
        "stop_token_ids": (VOCAB.id(END),),
        **sampling,
    }
    return EngineRequest(name, tuple(VOCAB.id(p) for p in pieces), SamplingParams(**sampling))  # type: ignore[arg-type]


@pytest.mark.asyncio(loop_scope="module")
async def test_answers_what_the_engine_answers_in_process(running: PooledFleet, parrot: Path) -> None:
    asked = [
        request("1", "a"),
        request("2", "b", max_tokens=9, logprobs=2),
        request("3", "?", prompt_logprobs=0),
    ]
    asked += [request("4", "c", temperature=1.5, seed=7, logprobs=0), request("5", "a", "b", min_tokens=2)]
    engine = load_engine(parrot, EngineOptions(**ENGINE))  # type: ignore[arg-type]
    expected: dict[str, list[object]] = {r.request_id: [] for r in asked}
    for one in asked:
        engine.add(one)
    while engine.has_work:
        for output in engine.step():
            output.queue_seconds, output.device_us, output.events = 0, 0, None
            expected[output.request_id].append(output)
    engine.close()
    answers = await asyncio.gather(*(collect(running.pool, one) for one in asked))
    for one, answer in zip(asked, answers, strict=True):
        for output in answer:
            output.queue_seconds, output.device_us, output.events = 0, 0, None
        assert answer == expected[one.request_id]


@pytest.mark.asyncio(loop_scope="module")
async def test_ends_at_the_end_of_text(running: PooledFleet) -> None:
    outputs = await collect(running.pool, request("r", "?"))
    assert flat(outputs) == [VOCAB.id("yes"), VOCAB.id("!"), VOCAB.id(END)]
    assert outputs[-1].finish_reason is FinishReason.STOP


@pytest.mark.asyncio(loop_scope="module")
async def test_describes_what_the_engine_really_accepts(running: PooledFleet) -> None:
    card = running.pool.card
    assert card is not None
    assert (card.architecture, card.context_length) == ("llama", 512)
    with pytest.raises(ContextLengthError, match="512"):
        await collect(running.pool, request("long", *("a" for _ in range(512))))
    with pytest.raises(RequestError, match="token id 9999"):
        await collect(running.pool, EngineRequest("r", (9999,), SamplingParams()))


@pytest.mark.asyncio(loop_scope="module")
async def test_abandoned_requests_free_their_blocks_within_a_second(running: PooledFleet) -> None:
    """Field case BR-048, at the level of the wire."""
    streams = [running.pool.generate(request(str(i), "a", max_tokens=500)) for i in range(8)]
    for stream in streams:
        await anext(stream)
    for stream in streams:
        await stream.aclose()
    await until(lambda: not running.pool.stats().running, 1)
    for i in range(40):
        await collect(running.pool, request(str(i), "a", max_tokens=1))
    stats = running.pool.stats()
    assert (stats.running, stats.waiting) == (0, 0)


@pytest.mark.parametrize("damage", ["cut", "missing", "garbage"])
async def test_a_damaged_model_is_named_to_the_user(parrot: Path, tmp_path: Path, damage: str) -> None:
    model = shutil.copytree(parrot, tmp_path / "model")
    weights = model / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "garbage":
        weights.write_bytes(b"\xff" * 1000)
    else:
        weights.unlink()
    async with PooledFleet(replica_command(model, ENGINE)) as deployment:
        with pytest.raises(UnavailableError, match=r"m is dead: .*safetensors.*\(exit status 2\)"):
            await deployment.wait_ready(60)


async def test_a_bad_setting_is_named_to_the_user(parrot: Path) -> None:
    command = replica_command(parrot, {**ENGINE, "context_length": 4096})
    async with PooledFleet(command) as deployment:
        with pytest.raises(UnavailableError, match=r"context_length is 4096.*at most 512 tokens"):
            await deployment.wait_ready(60)


async def test_sigterm_finishes_what_runs(parrot: Path, run_folder: Path) -> None:
    argv = [*replica_command(parrot, ENGINE)[1:], "--socket", str(run_folder / "s" / "r")]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stderr=asyncio.subprocess.DEVNULL)
    session = ReplicaSession("r", str(run_folder / "s" / "r"))
    session.start()
    try:
        await session.wait_ready(60)
        answer = asyncio.create_task(collect(session, request("r", "a", max_tokens=100)))
        await until(lambda: session.stats().running, 5)
        process.send_signal(signal.SIGTERM)
        assert len(flat(await answer)) == 100
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await session.close()


def test_engine_options_become_flags_that_the_replica_understands(parrot: Path) -> None:
    from dataclasses import asdict

    from toque.replica.__main__ import _parser

    options = EngineOptions(backend="reference", threads=1, step_target_ms=20.0, prefix_cache=False)
    argv = [*replica_command(parrot, asdict(options))[3:], "--socket", "/x"]
    parsed = vars(_parser().parse_args(argv))
    assert {name: parsed[name] for name in asdict(options)} == asdict(options)


def test_only_the_files_that_were_deployed_are_loaded(
    parrot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when they change while they are read."""
    from toque.engine import loader
    from toque.replica.__main__ import load

    folder = tmp_path / "model"
    shutil.copytree(parrot, folder)
    options = EngineOptions(**ENGINE)  # type: ignore[arg-type]
    state = file_state(folder)
    load(folder, options, "", state).engine.close()

    def meanwhile(*args: Any, **options: Any) -> Engine:
        engine = load_engine(*args, **options)
        (folder / "config.json").write_bytes((folder / "config.json").read_bytes() + b" ")
        return engine

    with monkeypatch.context() as patch:
        patch.setattr(loader, "load_engine", meanwhile)
        with pytest.raises(ModelError, match="has changed since it was deployed"):
            load(folder, options, "", state)
    with pytest.raises(ModelError, match="has changed since it was deployed"):
        load(folder, options, "", state)
    load(folder, options, "", file_state(folder)).engine.close()


async def test_a_replica_of_an_encoder_answers_with_vectors(tmp_path: Path) -> None:
    import numpy as np

    from fixtures.encoders import tiny_bert, write_folder
    from toque.engine.embedding import load_embedding_engine

    folder = write_folder(tiny_bert(), tmp_path / "bert")
    options = {"backend": "reference", "max_batch_tokens": 100, "max_sequences": 4}
    texts = [(3, 4, 5), (7,), tuple(range(80)), (1, 2)]
    expected = load_embedding_engine(folder, EngineOptions(**options)).embed(texts)  # type: ignore[arg-type]
    deployment = PooledFleet(replica_command(folder, options))
    async with deployment:
        await deployment.wait_ready(60)
        asked = [EngineRequest(str(i), ids, SamplingParams(max_tokens=0)) for i, ids in enumerate(texts)]
        answers = await asyncio.gather(*(collect(deployment.pool, r) for r in asked))
        for vector, outputs in zip(expected, answers, strict=True):
            assert outputs[-1].finish_reason is FinishReason.STOP
            assert np.array_equal(np.frombuffer(outputs[-1].embedding, "<f4"), vector)
        with pytest.raises(ContextLengthError):
            await collect(deployment.pool, EngineRequest("x", (1,) * 81, SamplingParams(max_tokens=0)))

"""The registry on a real PostgreSQL: as on SQLite, with several machines at once, and while it does not answer."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from fixtures.postgres import Server, binaries, server
from formats.gguf_builder import tiny_llama
from toque.errors import StoreError
from toque.registry.database import RegistryDatabase
from toque.registry.gc import collect
from toque.registry.record import StoredFile
from toque.registry.registry import Registry
from toque.registry.settings import RegistrySettings
from toque.registry.store import Store
from toque.registry.version import EvalResult, Lineage, ModelVersion, Origin, Status, VersionInput
from toque.registry.versions import pin_version

FORK = multiprocessing.get_context("fork")
_names = (f"registry{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    if binaries() is None:
        pytest.skip("PostgreSQL's programs are not installed")
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:  # its path bounds a socket's name
        os.chmod(folder, 0o755)
        with server(Path(folder)) as running:
            yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/registry.db"
    return str(request.getfixturevalue("postgres").database(next(_names)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(n_layers=1).write(tmp_path / "m.gguf")


def draft(model: str = "bot", digest: str = "a" * 64) -> ModelVersion:
    files = (StoredFile("m.gguf", 7, digest),)
    return ModelVersion(model, 0, Status.PENDING, digest, 7, 1_700_000_000_000_000, files=files)


def test_rows_come_back_as_they_went(url: str) -> None:
    database = RegistryDatabase(url)
    origin = Origin(
        lineage=Lineage(
            "trl", "run\0one", "https://x/y", "ext", "c" * 40, {"r": [1, None]}, {"loss": 0.1 + 0.2}
        ),
        inputs=(
            VersionInput("dataset", "d" * 600, "sha256:1"),
            VersionInput("model", "base/1", context="parent"),
        ),
        evaluations=(EvalResult("accuracy", 1 / 3, "t", "d"),),
    )
    full = structs.replace(
        draft(),
        card={"tags": ["ä", {"x": 1}]},
        tags={"a": "b"},
        license="l" * 500,
        created_by="ann",
        params=2**40,
    )
    assert database.add(full, origin) == 1
    database.ready("bot", 1, alias="live", actor="ann")
    found = database.find("bot", 1)
    expected = structs.replace(full, version=1, status=Status.READY, license="l" * 128, aliases=("live",))
    assert found == expected
    assert (
        database.aliased("bot", "live")
        == database.newest("bot")
        == database.find_digest("bot", "a" * 64)
        == found
    )
    run, inputs, results = database.origin("bot", 1)
    assert run == replace(origin.lineage or Lineage(), run_id="runone")
    assert [given.name for given in inputs] == ["d" * 512, "base/1"]
    assert results == list(origin.evaluations)
    assert database.children("base", 1) == ["bot/1"]
    assert [(m.name, m.versions, m.newest, m.aliases) for m in database.models()] == [
        ("bot", 1, 1, {"live": 1})
    ]
    assert database.files_in_use() == {"a" * 64}
    database.describe("bot", description="a bot", tags={"team": "x"})
    assert [(m.description, m.tags) for m in database.models()] == [("a bot", {"team": "x"})]
    database.close()


def test_everything_that_opens_at_once_finds_the_tables_and_numbers_of_its_own(url: str) -> None:
    numbers: list[int] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            database = RegistryDatabase(url)
            for _ in range(10):
                number = database.add(draft())
                database.ready("bot", number)
                numbers.append(number)
            database.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(numbers) == list(range(1, 41))


def test_processes_that_move_an_alias_leave_one_chain(url: str) -> None:
    database = RegistryDatabase(url)
    for number in (1, 2):
        database.add(draft(digest=str(number) * 64))
        database.ready("bot", number)
    database.close()  # nothing of it may be shared with a child

    def move(who: int) -> None:
        mine = RegistryDatabase(url)
        for n in range(40):
            mine.move_alias("bot", "live", 1 + (n + who) % 2, actor=str(who))

    running = [FORK.Process(target=move, args=(who,)) for who in range(2)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0, 0]
    events = database.alias_events("bot", "live")
    assert {event.actor for event in events} == {"0", "1"}
    assert [event.previous for event in events] == [None, *(event.version for event in events[:-1])]
    assert [alias.version for alias in database.aliases("bot")] == [events[-1].version]
    database.close()


def test_ten_thousand_versions_are_one_query(url: str) -> None:
    from sqlalchemy import event, insert

    from toque.registry.tables import model_version

    database = RegistryDatabase(url)
    database.add(draft())
    database.ready("bot", 1, alias="live")
    with database.write() as connection:
        row = dict(connection.execute(model_version.select()).mappings().one())
        connection.execute(insert(model_version), [row | {"version": n} for n in range(2, 10_001)])
    database.move_alias("bot", "also", 1)
    statements: list[str] = []
    event.listen(database._engine, "before_cursor_execute", lambda *call: statements.append(call[2]))
    found = database.versions("bot")
    assert [version.version for version in found] == list(range(1, 10_001))
    assert [(v.version, v.aliases) for v in found if v.aliases] == [(1, ("also", "live"))]
    statements = [text for text in statements if text != "BEGIN"]
    assert len(statements) == 1
    assert "files" not in statements[0]
    assert "card" not in statements[0]
    assert database.models()[0].newest == 10_000
    database.close()


def test_a_sweep_keeps_new_rows_out_while_it_deletes(url: str) -> None:
    database, other = RegistryDatabase(url), RegistryDatabase(url)
    database.add(draft())
    added = threading.Event()
    thread = threading.Thread(target=lambda: (other.add(draft()), added.set()))
    with database.without_new_rows():
        thread.start()
        assert not added.wait(0.3)
    assert added.wait(10)
    thread.join()
    database.close()
    other.close()


def test_two_machines_share_what_is_known(postgres: Server, model: Path, tmp_path: Path) -> None:
    settings = RegistrySettings(postgres.database(next(_names)))
    one, two = (Store(tmp_path / name, registry=settings) for name in ("one", "two"))
    with Registry(one) as registry:
        registry.register(str(model), "bot", alias="live")
    assert pin_version("bot@live", store=two).reference == "bot/1"
    with pytest.raises(StoreError, match=r"set registry\.blobs"):
        two.resolve("bot@live")
    assert collect(one, grace_s=-5).local_files == 0
    with Registry(two) as registry:  # it brings the same files itself
        registry.register(str(model), "bot2")
    assert two.resolve("bot@live").read_bytes() == model.read_bytes()


def test_while_the_database_does_not_answer_what_was_resolved_serves(
    postgres: Server, model: Path, tmp_path: Path
) -> None:
    url = postgres.database(next(_names))
    patient = Store(tmp_path / "home", registry=RegistrySettings(url))
    store = Store(tmp_path / "home", registry=RegistrySettings(f"{url}&connect_timeout=2"))
    with Registry(patient) as registry:
        registry.register(str(model), "bot", alias="live")
    patient.resolve("bot@live")
    pids = postgres.pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert store.resolve("bot/1").read_bytes() == model.read_bytes()
        assert pin_version("bot@live", store=store).version == 1  # once the connection is given up
        with Registry(store) as registry, pytest.raises(StoreError):
            registry.remove("bot/1")
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # whose client gave up meanwhile
                os.kill(pid, signal.SIGCONT)
    with Registry(patient) as registry:
        assert registry.find("bot@live").status is Status.READY

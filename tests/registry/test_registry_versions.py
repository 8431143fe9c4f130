"""Versions and aliases: immutable, atomic, resolvable without the database once they were here."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from formats.gguf_builder import STRING, tiny_llama
from toque.errors import ModelNotFoundError, RequestError, StoreError
from toque.registry.database import RegistryDatabase
from toque.registry.registry import Registry
from toque.registry.store import Store
from toque.registry.version import EvalResult, Status
from toque.registry.versions import pin_version, resolve_version

Make = Callable[[int], Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Small models that differ: a path for each number."""

    def made(number: int) -> Path:
        path = tmp_path / f"m{number}" / "m.gguf"
        path.parent.mkdir(exist_ok=True)
        return tiny_llama(seed=number).set("general.license", STRING, "mit").write(path)

    return made


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home)


def test_a_file_becomes_version_1_and_another_version_2(store: Store, make: Make) -> None:
    with Registry(store) as registry:
        first = registry.register(str(make(1)), "bot", actor="ann")
        second = registry.register(str(make(2)), "bot", alias="production", tags={"team": "x"})
        assert (first.version.reference, second.version.reference) == ("bot/1", "bot/2")
        assert first.created
        version = registry.find("bot/1")
        assert (version.status, version.arch, version.format) == (Status.READY, "llama", "gguf")
        assert (version.created_by, version.license) == ("ann", "mit")
        assert version.context_length == 256
        assert version.size == make(1).stat().st_size
        assert registry.find("bot@production").aliases == ("production",)
        assert registry.find("bot@production").tags == {"team": "x"}
        assert registry.find("bot").version == 2
        assert registry.find("bot@latest").version == 2
        assert registry.find("models:/bot@v1").version == 1
    assert first.path.read_bytes() == make(1).read_bytes()
    assert store.resolve("bot/1") == first.path
    assert store.resolve("bot@production") == store.resolve("bot") == second.path
    assert store.show("bot@production").name == "bot/2"


def test_the_same_files_are_no_new_version_but_the_alias_moves(store: Store, make: Make) -> None:
    with Registry(store) as registry:
        registry.register(str(make(1)), "bot")
        registry.register(str(make(2)), "bot", alias="live")
        again = registry.register(str(make(1)), "bot", alias="live")
        assert (again.created, again.version.version) == (False, 1)
        assert registry.find("bot@live").version == 1
        assert len(registry.database.versions("bot")) == 2


def test_a_pinned_version_says_what_an_alias_meant(store: Store, make: Make) -> None:
    with Registry(store) as registry:
        first = registry.register(str(make(1)), "bot", alias="live").version
        pinned = pin_version("bot@live", store=store)
        registry.register(str(make(2)), "bot", alias="live")
    assert (pinned.model, pinned.version, pinned.digest, pinned.size) == ("bot", 1, first.digest, first.size)
    assert (pinned.reference, pinned.alias) == ("bot/1", "live")
    resolved = resolve_version(pinned.reference, store=store)
    assert resolved.path.read_bytes() == make(1).read_bytes()
    assert (resolved.version, resolved.digest) == (1, pinned.digest)
    assert resolve_version("bot@live", store=store).version == 2


def test_what_was_only_pulled_has_version_0(store: Store, make: Make) -> None:
    store.pull(f"file:{make(1)}", name="plain")
    pinned = pin_version("plain", store=store)
    assert (pinned.model, pinned.version, pinned.reference) == ("plain", 0, "plain")
    assert pinned.digest == store.show("plain").digest
    path = make(3)
    local = resolve_version(str(path), store=store)
    assert (local.path, local.version, local.digest, local.size) == (path, 0, "", path.stat().st_size)


@pytest.mark.parametrize("reference", ["nobody/7", "nobody@x", "bot/9", "bot@nothing", "nobody"])
@pytest.mark.parametrize("registered", [True, False])
def test_what_there_is_not_is_not_found(store: Store, make: Make, reference: str, registered: bool) -> None:
    if registered:
        with Registry(store) as registry:
            registry.register(str(make(1)), "bot")
    for call in (store.resolve, store.show, lambda text: pin_version(text, store=store)):
        with pytest.raises(ModelNotFoundError):
            call(reference)
    if not registered:
        assert not (store.home / "registry.db").exists()  # asking makes no database


@pytest.mark.parametrize("alias", ["latest", "LATEST", "v7", "V12", "7", "a b", "", "-x", "x" * 65, "a/b"])
def test_reserved_and_malformed_aliases_are_refused(store: Store, make: Make, alias: str) -> None:
    from toque.registry.names import check_alias

    with pytest.raises(RequestError):
        check_alias(alias)
    if alias:
        with Registry(store) as registry, pytest.raises(RequestError):
            registry.register(str(make(1)), "bot", alias=alias)
        assert not store.list()


def test_a_ready_version_does_not_change(store: Store, make: Make) -> None:
    with Registry(store) as registry:
        registry.register(str(make(1)), "bot")
        before = registry.find("bot/1")
        database = registry.database
        for change in (
            lambda: database.ready("bot", 1),
            lambda: database.fail("bot", 1, "no"),
            lambda: database.expire_pending(2**62),
        ):
            with suppress(RequestError):
                change()
            assert registry.find("bot/1") == before
        database.add_evaluations("bot", 1, [EvalResult("accuracy", 0.5)])  # beside it, not in it
        assert registry.find("bot/1") == before
        # There is no statement in the code that writes any other column of a version that exists.
        source = Path(sys.modules[RegistryDatabase.__module__].__file__ or "").read_text()
        assert source.count("update(model_version)") == 2


def test_an_alias_points_to_what_is_ready_and_each_move_is_an_event(store: Store, make: Make) -> None:
    with Registry(store) as registry:
        for number in (1, 2):
            registry.register(str(make(number)), "bot")
        database = registry.database
        assert database.move_alias("bot", "live", 1, actor="ann") is None
        assert database.move_alias("bot", "live", 2, actor="bob", expected=1) == 1
        assert database.move_alias("bot", "live", 2, actor="bob") == 2  # no move, no event
        with pytest.raises(RequestError, match="points to version 2, not to version 1"):
            database.move_alias("bot", "live", 1, expected=1)
        with pytest.raises(ModelNotFoundError):
            database.move_alias("bot", "live", 3)
        with pytest.raises(RequestError, match=r"bot@live points to"):
            registry.remove("bot/2")
        assert database.remove_alias("bot", "live", actor="ann") == 2
        with pytest.raises(ModelNotFoundError):
            database.remove_alias("bot", "live")
        registry.remove("bot/2")
        with pytest.raises(RequestError, match="ARCHIVED"):
            database.move_alias("bot", "live", 2)
        events = [(e.previous, e.version, e.actor) for e in database.alias_events("bot", "live")]
        assert events == [(None, 1, "ann"), (1, 2, "bob"), (2, None, "ann")]
        assert registry.find("bot").version == 1
        with pytest.raises(ModelNotFoundError, match="ARCHIVED"):
            store.resolve("bot/2")
        assert registry.register(str(make(2)), "bot").version.version == 3  # numbers are not given twice


def test_a_pulled_model_becomes_version_1_of_its_name(store: Store, make: Make) -> None:
    pulled = store.pull(f"file:{make(1)}", name="bot")
    with Registry(store) as registry:
        registry.register(str(make(2)), "bot")
        assert [version.version for version in registry.database.versions("bot")] == [1, 2]
    assert store.resolve("bot/1").read_bytes() == pulled.read_bytes() == make(1).read_bytes()
    assert store.resolve("bot").read_bytes() == make(2).read_bytes()


def test_a_catalog_name_is_not_taken_by_another_model(store: Store, make: Make) -> None:
    with Registry(store) as registry, pytest.raises(RequestError, match="a name of the catalog"):
        registry.register(str(make(1)), "smollm2")


def test_a_parent_is_a_version_or_becomes_one(store: Store, make: Make) -> None:
    store.pull(f"file:{make(1)}", name="base")
    with Registry(store) as registry:
        registry.register(str(make(2)), "bot", parent="base")
        registry.register(str(make(3)), "bot", parent="bot@v1")
        registry.register(str(make(4)), "bot", parent="hf:org/base@abc")
        made = {number: registry.database.origin("bot", number)[1] for number in (1, 2, 3)}
        assert [(i.kind, i.name, i.context) for i in made[1]] == [("model", "base/1", "parent")]
        assert made[1][0].digest == store.show("base").digest
        assert made[2][0].name == "bot/1"
        assert made[3][0].name == "hf:org/base@abc"
        assert registry.database.children("base", 1) == ["bot/1"]
        assert registry.find("bot/2").base_model == "bot/1"
        assert registry.find("bot/2").base_relation == "finetune"
        with pytest.raises(ModelNotFoundError):
            registry.register(str(make(5)), "bot", parent="nobody")
    assert store.resolve("base").read_bytes() == make(1).read_bytes()


def test_a_version_copies_to_another_model_without_its_bytes(store: Store, make: Make) -> None:
    with Registry(store) as registry:
        registry.register(str(make(1)), "lab")
        registry.register("lab/1", "shop", alias="live")
        assert registry.find("shop@live").digest == registry.find("lab/1").digest
    assert len(list((store.home / "blobs").iterdir())) == 1


def lock_out(store: Store) -> sqlite3.Connection:
    """Takes the database away: whoever asks is told that it is no database."""
    database = store.home / "registry.db"
    for path in store.home.glob("registry.db*"):
        path.unlink()
    database.write_bytes(b"not a database any more, but long enough to be looked at" * 20)
    return sqlite3.connect(":memory:")


def test_what_was_resolved_here_needs_no_database(
    store: Store, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with Registry(store) as registry:
        registry.register(str(make(1)), "bot", alias="live")
        registry.register(str(make(2)), "bot")
    store.resolve("bot@live")
    store.resolve("bot")
    lock_out(store).close()
    assert store.resolve("bot/1").read_bytes() == make(1).read_bytes()
    assert store.resolve("bot@live").read_bytes() == make(1).read_bytes()
    assert pin_version("bot@live", store=store).reference == "bot/1"
    assert pin_version("bot", store=store).reference == "bot/2"
    assert "as it last was" in caplog.text
    for text in ("bot@other", "bot/3"):
        with pytest.raises(StoreError, match=r"registry .* cannot be used"):
            store.resolve(text)


def test_a_version_starts_without_the_database_s_packages(store: Store, make: Make) -> None:
    with Registry(store) as registry:
        registry.register(str(make(1)), "bot")
    store.pull(f"file:{make(1)}", name="plain")
    code = (
        "import sys; from toque.registry.store import Store\n"
        "for name in ('bot/1', 'plain'): Store().resolve(name)\n"
        "found = {m.split('.')[0] for m in sys.modules} & {'sqlalchemy', 'alembic', 'obstore', 'mlflow', 'psycopg'}\n"
        "sys.exit(', '.join(found) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"TOQUE_HOME": str(store.home), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_files_of_another_machine_are_missed_clearly(store: Store, make: Make, tmp_path: Path) -> None:
    with Registry(store) as registry:
        registry.register(str(make(1)), "bot", actor="ann@lab")
    from toque.registry.settings import RegistrySettings

    other = Store(tmp_path / "other", registry=RegistrySettings(store.registry.database_url(store.home)))
    with pytest.raises(StoreError, match=r"registered by ann@lab; set registry\.blobs"):
        other.resolve("bot/1")
    assert pin_version("bot/1", store=other).digest

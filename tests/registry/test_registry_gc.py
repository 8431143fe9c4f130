"""A sweep frees what nothing refers to, and never anything else; a registration that is killed leaves nothing."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from formats.gguf_builder import tiny_llama
from toque.errors import ModelNotFoundError, RequestError, StoreError
from toque.registry.database import RegistryDatabase
from toque.registry.gc import collect
from toque.registry.registry import Registry
from toque.registry.store import Store
from toque.registry.version import Status


@pytest.fixture(scope="module")
def models() -> Iterator[list[Path]]:
    """Three small models; the third is two files, of which the first model is one."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        paths = []
        for number in (1, 2):
            (root / str(number)).mkdir()
            paths.append(tiny_llama(n_layers=1, seed=number).write(root / str(number) / "m.gguf"))
        yield paths


def check(store: Store, registry: Registry, ready: dict[str, str]) -> None:
    """Every READY version opens, with the bytes that it was registered with."""
    for reference, source in ready.items():
        assert store.resolve(reference).read_bytes() == Path(source).read_bytes()
    assert {v.reference for v in registry.database.versions() if v.status is Status.READY} == set(ready)


_step = st.tuples(
    st.sampled_from(["register", "rm", "pull", "rm-pulled", "gc", "forget"]),
    st.integers(0, 1),
    st.sampled_from(["a", "b"]),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(_step, max_size=14))
def test_no_sweep_takes_a_file_that_something_refers_to(
    models: list[Path], steps: list[tuple[str, int, str]]
) -> None:
    with tempfile.TemporaryDirectory() as home:
        store = Store(Path(home))
        ready: dict[str, str] = {}
        pulled: dict[str, str] = {}
        with Registry(store) as registry:
            for what, number, name in steps:
                source = str(models[number])
                if what == "register":
                    ready[registry.register(source, name).version.reference] = source
                elif what == "rm" and ready:
                    reference = sorted(ready)[number % len(ready)]
                    registry.remove(reference)
                    del ready[reference]
                elif what == "pull":
                    store.pull(f"file:{source}", name=f"pulled-{name}")
                    pulled.setdefault(f"pulled-{name}", source)
                elif what == "rm-pulled" and f"pulled-{name}" in pulled:
                    store.remove(f"pulled-{name}")
                    del pulled[f"pulled-{name}"]
                elif what == "forget":  # the manifest of a version is only a cache
                    for reference in ready:
                        store.forget(reference)
                elif what == "gc":
                    collect(store, grace_s=-5)
                check(store, registry, ready)
                for called, origin in pulled.items():
                    assert store.path(called).read_bytes() == Path(origin).read_bytes()
            collect(store, grace_s=-5)
            check(store, registry, ready)
            needed = {Path(path).read_bytes() for path in (*ready.values(), *pulled.values())}
            blobs = list((store.home / "blobs").glob("*"))
            assert {blob.read_bytes() for blob in blobs} == needed
            assert len(blobs) == len(needed)


def test_new_files_and_running_models_are_left_alone(home: Path, models: list[Path]) -> None:
    store = Store(home)
    with Registry(store) as registry:
        version = registry.register(str(models[0]), "bot").version
        registry.remove("bot/1")
        assert collect(store).local_files == 0
        assert collect(store, grace_s=-5, in_use=[version.digest]).local_files == 0
        assert collect(store, grace_s=-5, dry_run=True).local_files == 1
        assert collect(store, grace_s=-5).local_bytes == version.size
        assert not list((home / "blobs").iterdir())
        assert not list((home / "models").iterdir())
        with pytest.raises(ModelNotFoundError):
            store.resolve("bot/1")


def test_a_running_model_without_a_registry_keeps_its_files(home: Path, models: list[Path]) -> None:
    store = Store(home)
    path = store.pull(f"file:{models[0]}", name="bot")
    digest = store.show("bot").digest
    store.forget("bot")
    assert collect(store, grace_s=-5, in_use=[digest]).local_files == 0
    assert path.exists()
    assert collect(store, grace_s=-5).local_files == 1


def test_nothing_is_freed_while_the_database_or_a_manifest_cannot_be_read(
    home: Path, models: list[Path]
) -> None:
    store = Store(home)
    with Registry(store) as registry:
        registry.register(str(models[0]), "bot")
    store.pull(f"file:{models[0]}", name="same")
    (manifest,) = [path for path in (home / "manifests").iterdir() if b'"same"' in path.read_bytes()]
    kept = manifest.read_bytes()
    manifest.write_bytes(kept.replace(b'"schema": 1', b'"schema": 2'))  # a newer Toque's
    with pytest.raises(StoreError, match="schema"):
        collect(store, grace_s=-5)
    manifest.write_bytes(kept)
    for path in home.glob("registry.db*"):
        path.unlink()
    (home / "registry.db").write_bytes(b"no database" * 500)
    with pytest.raises(StoreError):
        collect(store, grace_s=-5)
    assert store.remove("same") == 0  # who knows whether a version needs them
    assert len(list((home / "blobs").iterdir())) == 1


def test_a_sweep_while_others_register_takes_nothing_of_theirs(home: Path, models: list[Path]) -> None:
    store = Store(home)
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            with Registry(Store(home)) as registry:
                for number in range(12):
                    version = registry.register(str(models[number % 2]), f"{name}{number}").version
                    assert Store(home).resolve(version.reference).exists()
                    registry.remove(version.reference)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        try:
            collect(store, grace_s=3600)
        except BaseException as error:
            errors.append(error)
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize(
    ("where", "step", "left"),
    [
        (RegistryDatabase, "add", []),
        (Store, "commit", ["PENDING"]),
        (RegistryDatabase, "ready", ["PENDING"]),
        (Store, "_write", ["READY"]),
    ],
)
def test_a_registration_that_is_killed_is_visible_whole_or_not_at_all(
    home: Path, models: list[Path], where: type, step: str, left: list[str]
) -> None:
    def register_and_die() -> None:
        setattr(where, step, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        with Registry(Store(home)) as registry:
            registry.register(str(models[0]), "bot", alias="live")

    process = multiprocessing.get_context("fork").Process(target=register_and_die)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    store = Store(home)
    with Registry(store) as registry:
        found = registry.database.versions(every=True)
        assert [version.status for version in found] == left
        if left == ["READY"]:
            assert store.resolve("bot@live").read_bytes() == models[0].read_bytes()
            return
        for text in ("bot", "bot/1", "bot@live"):
            with pytest.raises(ModelNotFoundError):
                store.resolve(text)
        assert store.list() == []
        swept = collect(store, grace_s=-5)
        assert swept.failed == ["bot/1"] * len(left)
        assert not list((home / "blobs").glob("*"))
        again = registry.register(str(models[0]), "bot", alias="live").version
        assert again.version == 1 + len(left)
        assert store.resolve("bot@live").read_bytes() == models[0].read_bytes()


def test_a_registration_that_fails_says_why_in_its_row(
    home: Path, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(home)

    def full(*_: object, **__: object) -> None:
        raise StoreError("bot/1: cannot be written: No space left on device")

    with Registry(store) as registry:
        monkeypatch.setattr(store, "commit", full)
        with pytest.raises(StoreError, match="No space"):
            registry.register(str(models[0]), "bot")
        monkeypatch.undo()
        version = registry.find("bot/1")
        assert (version.status, version.problem) == (
            Status.FAILED,
            "bot/1: cannot be written: No space left on device",
        )
        with pytest.raises(RequestError, match="FAILED, not READY"):
            registry.remove("bot/1")


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a small file system")
def test_a_disk_that_is_full_while_pulling_is_said_and_the_pull_continues(
    tmp_path: Path, models: list[Path]
) -> None:
    home = tmp_path / "small"
    home.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", home], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        filler = home / "filler"
        filler.write_bytes(bytes((1 << 20) - models[0].stat().st_size - (24 << 10) + (40 << 10)))
        store = Store(home)
        with pytest.raises(StoreError, match="No space left on device"):
            store.pull(f"file:{models[0]}", name="bot")
        assert store.list() == []
        assert not list((home / "blobs").glob("*"))
        filler.unlink()
        assert store.pull(f"file:{models[0]}", name="bot").read_bytes() == models[0].read_bytes()
    finally:
        subprocess.run(["umount", "-l", home], check=True)
        shutil.rmtree(home, ignore_errors=True)

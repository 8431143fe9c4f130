"""Blobs that several machines share, and models in a bucket: against a real S3 server that misbehaves."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from formats.gguf_builder import tiny_llama
from registry.s3_server import S3, s3_server
from toque.errors import ConfigError, DownloadError, StoreError
from toque.registry.blobs import SharedBlobs
from toque.registry.gc import collect
from toque.registry.object_store import ObjectStore
from toque.registry.progress import silent
from toque.registry.record import StoredFile
from toque.registry.registry import Registry
from toque.registry.settings import RegistrySettings
from toque.registry.store import Store

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:botocore", "ignore::DeprecationWarning:moto"
)
BUCKET = "models"
_prefixes = (f"p{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def running() -> Iterator[S3]:
    with s3_server(BUCKET) as server:
        yield server


@pytest.fixture
def s3(running: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # no pause between attempts
    running.busy.clear()
    running.cut.clear()
    running.requests.clear()
    running.ranges.clear()
    running.alter, running.down = None, False
    return running


@pytest.fixture
def url(s3: S3) -> str:
    return f"s3://{BUCKET}/{next(_prefixes)}"


def put(url: str, data: bytes, tmp_path: Path) -> StoredFile:
    path = tmp_path / "given"
    path.write_bytes(data)
    file = StoredFile("m.gguf", len(data), hashlib.sha256(data).hexdigest())
    SharedBlobs(url).put(file, path, silent)
    return file


# --- blobs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 100_000, 8 << 20, (17 << 20) + 3])
def test_a_blob_comes_back_as_it_went(url: str, tmp_path: Path, size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    file = put(url, data, tmp_path)
    blobs = SharedBlobs(url)
    assert blobs.has(file)
    assert blobs.get(file, tmp_path / "work", silent).path.read_bytes() == data
    assert [(sha256, length) for sha256, length, _ in blobs.every()] == [(file.sha256, size)]
    blobs.delete([file.sha256])
    assert not blobs.has(file)


def test_a_blob_that_is_there_is_not_sent_again(s3: S3, url: str, tmp_path: Path) -> None:
    file = put(url, b"a" * 5_000, tmp_path)
    put(url, b"a" * 5_000, tmp_path)
    assert s3.requests["PUT", f"sha256-{file.sha256}"] == 1


@pytest.mark.parametrize("size", [100_000, (17 << 20) + 3])
def test_a_file_that_is_not_what_its_digest_says_is_not_stored(url: str, tmp_path: Path, size: int) -> None:
    path = tmp_path / "given"
    path.write_bytes(b"x" * size)
    file = StoredFile("m.gguf", size, hashlib.sha256(b"y" * size).hexdigest())
    blobs = SharedBlobs(url)
    with pytest.raises(StoreError, match="sha256"):
        blobs.put(file, path, silent)
    assert not blobs.has(file)
    assert not list(blobs.every())


def test_a_busy_server_is_asked_again(s3: S3, url: str, tmp_path: Path) -> None:
    s3.busy.update({"PUT": 2, "HEAD": 1})
    file = put(url, b"data" * 1_000, tmp_path)
    s3.busy.update({"GET": 3})
    assert SharedBlobs(url).get(file, tmp_path / "work", silent).path.read_bytes() == b"data" * 1_000


def test_a_connection_that_is_cut_continues_where_it_stopped(s3: S3, url: str, tmp_path: Path) -> None:
    data = bytes(range(256)) * 4_000
    file = put(url, data, tmp_path)
    s3.cut += [300_000, 200_000]
    assert SharedBlobs(url).get(file, tmp_path / "work", silent).path.read_bytes() == data
    assert s3.ranges == ["bytes=300000-", "bytes=500000-"]


def test_a_download_that_was_given_up_is_continued_by_the_next(s3: S3, url: str, tmp_path: Path) -> None:
    data = bytes(range(256)) * 4_000
    file = put(url, data, tmp_path)
    s3.cut += [300_000, *[0] * 20]
    with pytest.raises(DownloadError, match="again to continue"):
        SharedBlobs(url).get(file, tmp_path / "work", silent)
    s3.cut.clear()
    s3.ranges.clear()
    assert SharedBlobs(url).get(file, tmp_path / "work", silent).path.read_bytes() == data
    assert s3.ranges == ["bytes=300000-"]


def test_a_blob_with_another_content_is_refused(s3: S3, url: str, tmp_path: Path) -> None:
    file = put(url, b"good" * 1_000, tmp_path)
    s3.alter = lambda body: body[:-1] + b"!"
    with pytest.raises(DownloadError, match="sha256"):
        SharedBlobs(url).get(file, tmp_path / "work", silent)
    assert not [path for path in (tmp_path / "work").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "url",
    ["http://x/y", "s3://", "s3:bucket", "s3://key:secret@bucket/x", "s3://bucket/x?secret_access_key=abc"],
)
def test_a_url_holds_no_secret(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ObjectStore(url)
    assert "abc" not in refused.value.message


# --- the registry on shared blobs ----------------------------------------------------------------------------


Make = Callable[[int], Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(number: int) -> Path:
        path = tmp_path / f"m{number}" / "m.gguf"
        path.parent.mkdir(exist_ok=True)
        return tiny_llama(seed=number).write(path)

    return made


@pytest.fixture
def machines(tmp_path: Path, url: str) -> Callable[[str], Store]:
    settings = RegistrySettings(f"sqlite:///{tmp_path / 'shared.db'}", url)
    return lambda name: Store(tmp_path / name, registry=settings)


def test_another_machine_brings_a_version_once(s3: S3, machines: Callable[[str], Store], make: Make) -> None:
    with Registry(machines("one")) as registry:
        version = registry.register(str(make(1)), "bot", alias="live").version
    blob = f"sha256-{version.files[0].sha256}"
    other = machines("two")
    path = other.resolve("bot@live")
    assert path.read_bytes() == make(1).read_bytes()
    assert s3.requests["GET", blob] == 1
    assert machines("two").resolve("bot/1") == path
    assert s3.requests["GET", blob] == 1
    s3.down = True  # and from the cache without the store
    assert machines("two").resolve("bot@live") == path


def test_a_store_that_is_away_is_a_clear_error_and_the_next_attempt_works(
    s3: S3, machines: Callable[[str], Store], make: Make
) -> None:
    with Registry(machines("one")) as registry:
        registry.register(str(make(1)), "bot")
    s3.down = True
    with pytest.raises(DownloadError, match="503") as refused:
        machines("two").resolve("bot/1")
    assert "X-Amz" not in refused.value.message  # no signed address in a log
    assert machines("two").list() == []
    s3.down = False
    assert machines("two").resolve("bot/1").read_bytes() == make(1).read_bytes()


def test_a_registration_that_cannot_upload_is_failed_and_invisible(
    s3: S3, machines: Callable[[str], Store], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import timedelta

    from toque.registry import object_store

    few = {"max_retries": 1, "backoff": {"init_backoff": timedelta(milliseconds=1)}}
    monkeypatch.setattr(object_store, "_RETRY", few)
    s3.busy.update({"PUT": 50, "POST": 50})
    with Registry(machines("one")) as registry:
        with pytest.raises(StoreError):
            registry.register(str(make(1)), "bot", alias="live")
        assert registry.database.versions("bot") == []
        (failed,) = registry.database.versions("bot", every=True)
        assert (failed.status, "503" in failed.problem) == ("FAILED", True)
        s3.busy.clear()
        assert registry.register(str(make(1)), "bot", alias="live").version.version == 2
        assert registry.find("bot@live").version == 2


def test_a_sweep_frees_shared_blobs_that_no_version_needs(
    s3: S3, url: str, machines: Callable[[str], Store], make: Make
) -> None:
    store = machines("one")
    with Registry(store) as registry:
        first, second = (registry.register(str(make(n)), "bot").version for n in (1, 2))
        registry.register("bot/1", "shop")
        blobs = SharedBlobs(url)
        registry.remove("bot/1")
        registry.remove("bot/2")
        assert collect(store).shared_files == 0  # within the grace
        assert collect(store, grace_s=-5, in_use=[second.digest]).shared_files == 0
        assert collect(store, grace_s=-5, dry_run=True).shared_files == 1
        assert blobs.has(second.files[0])
        swept = collect(store, grace_s=-5)
        assert (swept.shared_files, swept.shared_bytes) == (1, second.size)
        assert (swept.local_files, swept.local_bytes) == (1, second.size)
        assert not blobs.has(second.files[0])
        assert blobs.has(first.files[0])
    assert machines("two").resolve("shop/1").read_bytes() == make(1).read_bytes()


# --- the source ----------------------------------------------------------------------------------------------


def upload(tmp_path: Path, prefix: str, files: dict[str, bytes]) -> None:
    objects = ObjectStore(f"s3://{BUCKET}")
    for name, data in files.items():
        path = tmp_path / "object"
        path.write_bytes(data)
        objects.upload(path, f"{prefix}/{name}", hashlib.sha256(data).hexdigest(), silent, name)


def test_an_object_is_a_model(s3: S3, tmp_path: Path, home: Path, model_bytes: bytes) -> None:
    upload(tmp_path, "solo", {"m.Q8_0.gguf": model_bytes, "other.gguf": b"no"})
    s3.cut += [len(model_bytes) // 2]
    store = Store(home)
    assert store.pull(f"s3://{BUCKET}/solo/m.Q8_0.gguf").read_bytes() == model_bytes
    assert s3.ranges == [f"bytes={len(model_bytes) // 2}-"]
    record = store.show(f"s3:{BUCKET}/solo/m.Q8_0.gguf")
    assert (record.architecture, len(record.files)) == ("llama", 1)
    assert record.revision


def test_a_prefix_is_a_folder_and_what_is_no_plain_name_stays_out(
    s3: S3, tmp_path: Path, home: Path, model_bytes: bytes
) -> None:
    files = {
        "m.gguf": model_bytes,
        "notes.txt": b"x",
        "README.md": b"---\nlicense: mit\n---\n",
        "a:b.gguf": b"x",
    }
    upload(tmp_path, "folder/deep", files)
    store = Store(home)
    path = store.pull(f"s3:{BUCKET}/folder/deep/", name="deep")
    assert path.read_bytes() == model_bytes
    assert [file.name for file in store.show("deep").files] == ["m.gguf"]
    assert store.show("deep").license == "mit"
    with Registry(store) as registry:
        registry.register(f"s3:{BUCKET}/folder/deep/", "bot")
        assert registry.find("bot").card == {"license": "mit"}


@pytest.mark.parametrize("key", ["nothing.gguf", "nothing/", "folder"])
def test_what_is_not_in_the_bucket_is_a_clear_error(s3: S3, home: Path, key: str) -> None:
    with pytest.raises(DownloadError):
        Store(home).pull(f"s3:{BUCKET}/{key}")
    assert Store(home).list() == []


def test_a_bucket_that_is_not_there_is_a_clear_error(s3: S3, home: Path) -> None:
    with pytest.raises((DownloadError, StoreError), match="no-such-bucket"):
        Store(home).pull("s3:no-such-bucket/m.gguf")

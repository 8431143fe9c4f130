"""docs/models.md says what the code does."""

from __future__ import annotations

import sys
from pathlib import Path

from formats.test_schemes import CASES
from toque.formats.layout import ARCHITECTURES
from toque.formats.schemes import LAYOUTS, METHODS

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import make_models_doc  # noqa: E402  scripts are no package


def test_the_page_is_up_to_date() -> None:
    written = make_models_doc.PAGE.read_text(encoding="utf-8")
    assert written == make_models_doc.page(), "run: python scripts/make_models_doc.py"


def test_the_page_lists_what_the_readers_accept() -> None:
    assert set(make_models_doc.FAMILIES) == set(ARCHITECTURES)
    assert {method for method, _, _ in LAYOUTS} == set(METHODS)
    # Every checkpoint that the tests write becomes what the page says for its method.
    promised = {(method, kind) for method, _, kind in LAYOUTS}
    found = {(config["quant_method"], kind) for config, _, _, kind in CASES.values()}
    assert found == promised

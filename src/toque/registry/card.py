"""Model cards: the YAML between the dashes at the top of a README.md, as Hugging Face defines its keys."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from toque.registry.version import EvalResult, Lineage, Origin, VersionInput, plain_json

_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
_WANDB = re.compile(r"https://wandb\.ai/[\w.-]+/[\w.-]+/runs/([\w-]+)")
MAX_CARD = 1 << 20


def front_matter(text: str) -> dict[str, Any]:
    """The card's keys and values; nothing where there is no card, or one that is no mapping."""
    import yaml

    match = _FRONT.search(text[:MAX_CARD])
    if match is None:
        return {}
    try:
        card = yaml.safe_load(match[1])
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return plain_json(card) if isinstance(card, dict) else {}


def card_origin(card: dict[str, Any], text: str = "") -> Origin:
    """What a card says: license, base model, data sets, evaluation results; and the run that its text links to."""
    tags = texts(card.get("tags"))
    bases = texts(card.get("base_model"))
    run = _WANDB.search(text)
    system = "trl" if "trl" in tags else str(card.get("library_name") or "") if run else ""
    return Origin(
        lineage=Lineage(system, run[1] if run else "", run[0] if run else "") if system or run else None,
        inputs=tuple(
            VersionInput("dataset", name, source_type="huggingface", source=name, context="training")
            for name in texts(card.get("datasets"))
        ),
        evaluations=tuple(_model_index(card.get("model-index"))),
        card=card,
        license=" ".join(texts(card.get("license"))[:1]),
        base_model=bases[0] if bases else "",
        base_relation=str(card.get("base_model_relation") or ""),
    )


def texts(value: Any) -> list[str]:
    """A text or a list of them, as a list; what is neither is left out."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, str) and item]


def number(value: Any) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def _model_index(value: Any) -> Iterable[EvalResult]:
    for entry in _mappings(value):
        for result in _mappings(entry.get("results")):
            task, dataset, source = (_mapping(result.get(key)) for key in ("task", "dataset", "source"))
            for metric in _mappings(result.get("metrics")):
                measured = number(metric.get("value"))
                kind = metric.get("type") or metric.get("name")
                if measured is None or not isinstance(kind, str):
                    continue
                yield EvalResult(
                    kind,
                    measured,
                    task=str(task.get("type") or task.get("name") or ""),
                    dataset=str(dataset.get("type") or dataset.get("name") or ""),
                    revision=str(dataset.get("revision") or ""),
                    split=str(dataset.get("split") or ""),
                    source=str(source.get("url") or source.get("name") or "README.md"),
                )


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []

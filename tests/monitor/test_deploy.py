"""The rules and the dashboard in deploy/monitoring ask for metrics and labels that there are."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
import yaml

from toque.monitor.devices import DeviceCollector
from toque.monitor.engine_metrics import ReplicaCollector
from toque.monitor.ledger.ledger import Ledger
from toque.monitor.ledger.record import Outcome
from toque.monitor.ledger_metrics import LedgerCollector, PaidTime, PaidTimeCollector
from toque.monitor.metrics import Metrics
from toque.types import EngineStats

from .test_devices import Library

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"


def exposed(folder: Path) -> dict[str, set[str]]:
    """Every sample name of a server that has served, with its labels."""
    ledger = Ledger(folder)
    metrics = Metrics(lambda: {"m": EngineStats()})
    metrics.registry.register(ReplicaCollector(lambda: {"m": {"m-0": EngineStats()}}))
    metrics.registry.register(DeviceCollector(Library()))
    metrics.registry.register(LedgerCollector(ledger, "USD"))
    metrics.registry.register(PaidTimeCollector(PaidTime(lambda: {"m": EngineStats()}), Decimal(1), "USD"))
    metrics.answered("/v1/completions", 200)
    record = metrics.record("m", 0.0)
    record.queued(0.1)
    record.prompt(1, 1)
    record.tokens(2, 0.1, 1.0)
    record.completed(1.0)
    metrics.series("m").finished["stop"] = 1
    ledger.open("r", endpoint="e", model="m").close(Outcome.OK, 200)
    text = metrics.exposition().decode()
    ledger.close()
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def check(expression: str, known: dict[str, set[str]]) -> None:
    names = re.findall(r"\btoque_\w+", expression)
    assert names, expression
    for name in names:
        assert name in known, f"{name} in {expression}"
    for name, matchers in re.findall(r"\b(toque_\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)=", matchers)) <= known[name], expression
    for grouping in re.findall(r"by \(([^)]*)\)", expression):
        labels = {label.strip() for label in grouping.split(",")}
        assert any(labels <= known[name] for name in names), expression
    assert expression.count("(") == expression.count(")")


def test_alert_rules_ask_for_what_there_is(tmp_path: Path) -> None:
    known = exposed(tmp_path)
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) >= 6
    for rule in group["rules"]:
        check(rule["expr"], known)
        assert rule["labels"]["severity"] in ("warn", "page")
        assert rule["annotations"]["summary"]
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]


def test_the_dashboard_is_what_its_code_makes_and_asks_for_what_there_is(tmp_path: Path) -> None:
    known = exposed(tmp_path)
    made = runpy.run_path(str(FOLDER / "make_dashboard.py"))
    assert (FOLDER / "dashboard.json").read_text() == made["text"](), (
        "run deploy/monitoring/make_dashboard.py"
    )
    for panel in made["dashboard"]()["panels"]:
        for target in panel["targets"]:
            check(target["expr"], known)


def test_each_alert_is_tried_where_it_fires_and_where_it_does_not() -> None:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    tried: dict[str, set[bool]] = {}
    for case in yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]:
        for test in case["alert_rule_test"]:
            tried.setdefault(test["alertname"], set()).add(bool(test["exp_alerts"]))
    assert tried == {rule["alert"]: {True, False} for rule in group["rules"]}


PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=str(Path(sys.executable).parent))


@pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool: scripts/fetch_promtool.sh, or Debian's prometheus, brings it"
)
def test_alerts_fire_when_they_should_and_only_then() -> None:
    for arguments in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            [str(PROMTOOL), *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

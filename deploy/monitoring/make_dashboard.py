"""Writes dashboard.json, for Grafana: `python deploy/monitoring/make_dashboard.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SUM = "sum by (model) (rate({0}[$__rate_interval]))"
_QUANTILE = "histogram_quantile({1}, sum by (model, le) (rate({0}_bucket[$__rate_interval])))"
_TOKENS = "sum by (model) (rate(toque_prompt_tokens_total[30m]) + rate(toque_generation_tokens_total[30m]))"


def quantiles(metric: str) -> list[tuple[str, str]]:
    return [(_QUANTILE.format(metric, q), f"{{{{model}}}} p{q * 100:.0f}") for q in (0.5, 0.95, 0.99)]


def rate(metric: str, legend: str = "{{model}}") -> tuple[str, str]:
    return _SUM.format(metric), legend


# title, unit, (expression, legend)s
PANELS: tuple[tuple[str, str, list[tuple[str, str]]], ...] = (
    ("Requests", "reqps", [(
        "sum by (endpoint, status) (rate(toque_requests_total[$__rate_interval]))", "{{endpoint}} {{status}}",
    )]),
    ("Tokens", "short", [
        rate("toque_generation_tokens_total", "{{model}} generated"),
        rate("toque_prompt_tokens_total", "{{model}} prompt"),
        rate("toque_prompt_tokens_cached_total", "{{model}} cached"),
    ]),
    ("Time to first token", "s", quantiles("toque_time_to_first_token_seconds")),
    ("Between tokens", "s", quantiles("toque_inter_token_latency_seconds")),
    ("Whole answers", "s", quantiles("toque_e2e_request_latency_seconds")),
    ("In the queue", "s", quantiles("toque_request_queue_seconds")),
    ("Running and waiting", "short", [
        ("toque_requests_running", "{{model}} running"),
        ("toque_requests_waiting", "{{model}} waiting"),
    ]),
    ("KV memory", "percentunit", [("toque_kv_cache_usage_ratio", "{{model}}")]),
    ("Prefix cache", "percentunit", [(
        "sum by (model) (rate(toque_prefix_cache_hits_total[$__rate_interval]))"
        " / sum by (model) (rate(toque_prefix_cache_queries_total[$__rate_interval]))", "{{model}} hits",
    )]),
    ("Preemptions", "short", [rate("toque_preemptions_total")]),
    ("Replicas' time", "percentunit", [(
        "sum by (model, kind) (rate(toque_replica_seconds_total[$__rate_interval]))", "{{model}} {{kind}}",
    )]),
    ("Cost per million tokens", "short", [
        (f"1e6 * sum by (model) (rate(toque_cost_total[30m])) / {_TOKENS}", "{{model}} delivered"),
        (f"1e6 * sum by (model) (rate(toque_list_amount_total[30m])) / {_TOKENS}", "{{model}} listed"),
    ]),
    ("Money per hour", "short", [
        ("3600 * sum by (currency) (rate(toque_list_amount_total[30m]))", "listed {{currency}}"),
        ("3600 * sum by (currency) (rate(toque_deployment_cost_total[30m]))", "cost with idle time {{currency}}"),
    ]),
    ("Time in steps", "percentunit", [(
        "sum by (model, phase) (rate(toque_engine_step_seconds_total[$__rate_interval]))", "{{model}} {{phase}}",
    )]),
    ("Finish reasons", "reqps", [(
        "sum by (model, reason) (rate(toque_finished_requests_total[$__rate_interval]))", "{{model}} {{reason}}",
    )]),
    ("Replicas' memory", "bytes", [("toque_replica_memory_bytes", "{{model}} {{replica}}")]),
    ("Replicas' CPUs", "short", [(
        "sum by (model, replica) (rate(toque_replica_cpu_seconds_total[$__rate_interval]))", "{{model}} {{replica}}",
    )]),
    ("Replicas' sequences", "short", [
        ("toque_replica_requests_running", "{{model}} {{replica}} running"),
        ("toque_replica_requests_waiting", "{{model}} {{replica}} waiting"),
    ]),
    ("GPUs", "percentunit", [
        ("toque_device_utilisation_ratio", "{{device}} {{name}}"),
        (
            'toque_device_memory_bytes{kind="used"} / ignoring (kind) toque_device_memory_bytes{kind="total"}',
            "{{device}} {{name}} memory",
        ),
    ]),
    ("Ledger", "bytes", [("toque_ledger_journal_bytes", "journal"), ("toque_ledger_rows_lost_total", "rows lost")]),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    panels = []
    for number, (title, unit, series) in enumerate(PANELS):
        panels.append(
            {
                "id": number + 1,
                "type": "timeseries",
                "title": title,
                "datasource": source,
                "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": [
                    {"refId": chr(65 + i), "datasource": source, "expr": expression, "legendFormat": legend}
                    for i, (expression, legend) in enumerate(series)
                ],
            }
        )
    return {
        "uid": "toque",
        "title": "Toque",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "source", "type": "datasource", "query": "prometheus"}]},
        "panels": panels,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("dashboard.json").write_text(text(), encoding="utf-8")

"""The Grafana dashboard `docs/grafana.json`: a panel or more for every metric. Pure.

Made anew with `python -m kvtide.metrics.dashboard > docs/grafana.json`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kvtide.metrics.names import METRICS, Metric

WIDTH, HEIGHT = 8, 8  # of a panel; a row of the dashboard is 24 wide
PICKED = '{store=~"$store"}'
RATIO = f"sum by (unit) (rate(kvtide_hit_total{PICKED}[$__rate_interval]))"
RATIO += f" / sum by (unit) (rate(kvtide_asked_total{PICKED}[$__rate_interval]))"
FILL = f"kvtide_used_bytes{PICKED} / kvtide_capacity_bytes{PICKED}"
QUANTILES = (0.5, 0.99)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it; it asks for the Prometheus to query."""
    panels: list[dict[str, Any]] = []
    extras = {"Hits": ("Hit rate", RATIO, "percentunit"), "Room": ("Fill", FILL, "percentunit")}
    for section in dict.fromkeys(metric.section for metric in METRICS):
        top = max((p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels), default=0)
        panels.append({"type": "row", "title": section, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}})
        wanted = [_panel(*extras[section])] if section in extras else []
        wanted += [_of(metric) for metric in METRICS if metric.section == section]
        for place, panel in enumerate(wanted):
            x, y = place * WIDTH % 24, top + 1 + place * WIDTH // 24 * HEIGHT
            panels.append(panel | {"gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT}})
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    store = {
        "name": "store",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${prometheus}"},
        "query": "label_values(kvtide_store_info, store)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
    }
    return {
        "title": "kvtide",
        "uid": "kvtide",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": [{"name": "prometheus", "type": "datasource", "query": "prometheus"}, store]},
        "panels": panels,
    }


def _of(metric: Metric) -> dict[str, Any]:
    """Return the panel that shows `metric`."""
    unit = _unit(metric.name)
    title = metric.name.removeprefix("kvtide_").removesuffix("_total").replace("_", " ")
    if metric.kind == "histogram":
        labels = ", ".join(("le", *metric.labels))
        rate = f"sum by ({labels}) (rate({metric.name}_bucket{PICKED}[$__rate_interval]))"
        return _panel(title, *(f"histogram_quantile({q}, {rate})" for q in QUANTILES), unit, about=metric.about)
    if metric.kind == "counter":
        per_second = {"bytes": "Bps", "s": "percentunit"}.get(unit, "cps")
        return _panel(title, f"rate({metric.name}{PICKED}[$__rate_interval])", per_second, about=metric.about)
    return _panel(title, metric.name + PICKED, unit, about=metric.about)


def _unit(name: str) -> str:
    stem = name.removesuffix("_total")
    return "bytes" if stem.endswith("_bytes") else "s" if stem.endswith("_seconds") else "short"


def _panel(title: str, *queries_and_unit: str, about: str = "") -> dict[str, Any]:
    *queries, unit = queries_and_unit
    source = {"type": "prometheus", "uid": "${prometheus}"}
    targets = [{"refId": chr(65 + i), "expr": query, "datasource": source} for i, query in enumerate(queries)]
    return {
        "type": "timeseries",
        "title": title,
        "description": about,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": targets,
    }


def main() -> None:
    """Print the dashboard."""
    sys.stdout.write(json.dumps(dashboard(), indent=1) + "\n")


if __name__ == "__main__":
    main()

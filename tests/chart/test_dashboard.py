"""The dashboard asks for metrics that exist, by labels that the PodMonitor gives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from tests.chart.render import CHART, ROOT, Helm, one
from xpyd_core.kv_outcome import OUTCOMES, PATH_CAUSES
from xpyd_operator.controller.main import OperatorMetrics

FILE = CHART / "files" / "dashboards" / "xpyd.json"
ON = {"grafana": {"dashboard": {"enabled": True}}, "metrics": {"podMonitor": {"enabled": True}}}
SCRAPE_LABELS = {"namespace", "pod", "le"}


def _dashboard() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in _dashboard()["panels"] if panel["type"] != "row"]


def _queries() -> Iterator[str]:
    for panel in _panels():
        for target in panel["targets"]:
            yield target["expr"]
    for variable in _dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"]


def _known() -> dict[str, set[str]]:
    """The metrics of docs/metrics.md and of the operator, as they are asked for; their labels."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(xpyd_\w+)` \| (\w+) \| ([^|]*)\|", page, re.M)
    found: dict[str, set[str]] = {}
    for name, kind, labels in rows:
        found.update(_series(name, kind, set(re.findall(r"`(\w+)`", labels))))
    for metric in vars(OperatorMetrics()).values():
        if isinstance(metric, Counter | Gauge | Histogram):
            family = metric.describe()[0]
            name = f"{family.name}_total" if family.type == "counter" else family.name
            # The names of the labels are nowhere public before a value was counted.
            found.update(_series(name, family.type, set(metric._labelnames)))
    return found


def _series(name: str, kind: str, labels: set[str]) -> dict[str, set[str]]:
    ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
    return {name + end: labels for end in ends}


def _alerts(helm: Helm, **values: Any) -> dict[str, dict[str, Any]]:
    rule = {"enabled": True, "labels": {"release": "prometheus"}, **values}
    made = one(helm.render({"metrics": {"prometheusRule": rule}}), "PrometheusRule", "xpyd-fleets")
    assert made["metadata"]["labels"]["release"] == "prometheus"
    return {one["alert"]: one for group in made["spec"]["groups"] for one in group["rules"]}


def test_alerts_go_by_metrics_labels_and_causes_that_exist(helm: Helm) -> None:
    alerts, known = _alerts(helm), _known()
    entry = {"XpydCertificateEnds", "XpydSecretNotLoaded"}
    change = {"XpydRoleLost", "XpydDrainCutsRequests"}
    kv = {"XpydKVNotArriving", "XpydPrefillIdle"}
    assert set(alerts) == {"XpydNoPair"} | kv | entry | change
    for alert in alerts.values():
        query = alert["expr"]
        names = set(re.findall(r"\bxpyd_\w+", query))
        assert names
        assert not names - set(known)
        used = set(re.findall(r"(\w+)=~?\"", query))
        assert used <= set().union(*(known[name] for name in names))
        words = " ".join(alert["annotations"].values())
        assert "$labels.fleet" in words
        assert query.count("(") == query.count(")")
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert all(f"`{name}`" in page for name in alerts)
    lost = alerts["XpydKVNotArriving"]["expr"]
    [causes] = re.findall(r'cause=~"([^"]*)"', lost)
    assert set(causes.split("|")) == PATH_CAUSES | {"other"}
    assert set("|".join(re.findall(r'outcome=~"([^"]*)"', lost)).split("|")) <= set(OUTCOMES)


def test_the_share_of_lost_kv_that_alerts_is_a_value(helm: Helm) -> None:
    assert _alerts(helm)["XpydKVNotArriving"]["expr"].endswith("> 10")
    assert _alerts(helm, lostKVPercent=1)["XpydKVNotArriving"]["expr"].endswith("> 1")


def test_every_metric_of_the_dashboard_is_known() -> None:
    asked = {name for query in _queries() for name in re.findall(r"\bxpyd_\w+", query)}
    assert len(asked) > 20
    assert not asked - set(_known())


def test_the_dashboard_shows_every_program() -> None:
    text = " ".join(_queries())
    for prefix in ("xpyd_router_", "xpyd_engine_", "xpyd_kv_", "xpyd_operator_"):
        assert prefix in text


def test_the_dashboard_groups_by_labels_that_exist(helm: Helm) -> None:
    monitor = one(helm.render(ON), "PodMonitor", "xpyd-fleets")
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        rules = endpoint["relabelings"]
        given = SCRAPE_LABELS | {rule["targetLabel"] for rule in rules if "targetLabel" in rule}
        _group_by(given)


def _group_by(given: set[str]) -> None:
    known = _known()
    for query in _queries():
        own = {
            label for name in re.findall(r"\bxpyd_\w+", query) for label in known.get(name, set())
        }
        groups = re.findall(r"\bby \(([^)]*)\)", query)
        used = {label.strip() for group in groups for label in group.split(",")}
        used |= set(re.findall(r"(\w+)=~?\"", query))
        assert used <= given | own, query


def test_rates_are_of_counters_only() -> None:
    for query in _queries():
        for name in re.findall(r"\brate\((\w+)", query):
            assert name.endswith(("_total", "_bucket", "_sum", "_count")), query


def test_every_panel_has_a_title_a_unit_and_its_own_place() -> None:
    places: list[tuple[int, int, int, int]] = []
    ids = [panel["id"] for panel in _dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in _panels():
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        box = panel["gridPos"]
        places.append((box["x"], box["y"], box["x"] + box["w"], box["y"] + box["h"]))
    for n, (left, top, right, bottom) in enumerate(places):
        assert right <= 24
        for other_left, other_top, other_right, other_bottom in places[:n]:
            apart = right <= other_left or other_right <= left
            assert apart or bottom <= other_top or other_bottom <= top


def test_the_configmap_holds_the_dashboard_as_it_is(helm: Helm) -> None:
    config = one(helm.render(ON), "ConfigMap", "xpyd-dashboard")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config["data"]["xpyd.json"]) == _dashboard()

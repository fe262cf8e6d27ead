"""docs/metrics.md and docs/grafana.json: they name the metrics that there are."""

import json
import re
from pathlib import Path

import pytest

from cachestore_connector import metrics_table as table

DOCS = Path(__file__).resolve().parents[1] / "docs"
SUFFIXES = {
    table.COUNTER: [""],
    table.GAUGE: [""],
    table.HISTOGRAM: ["_bucket", "_sum", "_count"],
}
SERIES = {
    metric.name + suffix: metric for metric in table.TABLE for suffix in SUFFIXES[metric.kind]
}
# What Prometheus adds to a series when it scrapes a server.
SCRAPED = {"instance", "job"}


def dashboard():
    return json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))


def expressions():
    """(title, expression) of each query of each panel."""
    return [
        (panel["title"], target["expr"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]


def labels_of(metric, suffix=""):
    buckets = {"le"} if metric.kind == table.HISTOGRAM else set()
    return {*table.COMMON_LABELS, *metric.labels, *SCRAPED, *buckets}


def test_the_page_has_every_metric():
    """Pinned: the table is the code's, line for line; no other name is in the text."""
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert table.markdown() in text
    assert set(re.findall(r"cachestore_\w+", text)) == {metric.name for metric in table.TABLE}
    for label in table.COMMON_LABELS:
        assert f"`{label}`" in text


def test_the_dashboard_shows_every_metric_and_no_other():
    """Pinned: a metric that is renamed, or added, must be on the dashboard by its name."""
    named = {name for _, text in expressions() for name in re.findall(r"cachestore_\w+", text)}
    assert named <= set(SERIES)
    assert {SERIES[name].name for name in named} == {metric.name for metric in table.TABLE}


@pytest.mark.parametrize(("title", "text"), expressions())
def test_a_query_fits_its_metrics(title, text):
    """Pinned: counters and histograms as rates, gauges as they are; labels that there are."""
    used = re.findall(r"(rate\()?(cachestore_\w+)\{([^}]*)\}(\[\$__rate_interval\])?", text)
    assert used and text.count("cachestore_") == len(used)
    grouped = {
        label.strip() for by in re.findall(r"by \(([^)]*)\)", text) for label in by.split(",")
    }
    for rate, name, selector, window in used:
        metric = SERIES[name]
        assert bool(rate) == bool(window) == (metric.kind != table.GAUGE), title
        matched = dict(re.findall(r'(\w+)[!=~]+"([^"]*)"', selector))
        assert set(matched) | grouped <= labels_of(metric), title
        for label in set(matched) & set(metric.labels) & {"tier", "state"}:
            assert matched[label] in metric.read
    assert text.count("(") == text.count(")")
    if "histogram_quantile" in text:
        assert "le" in grouped


def test_the_dashboard_can_be_imported():
    """Pinned: panels that don't overlap, variables and labels that there are."""
    board = dashboard()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(board)))
    assert used <= variables and {"datasource", "model", "instance"} == variables
    for panel in panels:
        for target in panel.get("targets", ()):
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert legend <= set(
                re.findall(r"\w+", "".join(re.findall(r"by \(([^)]*)\)", target["expr"])))
            )

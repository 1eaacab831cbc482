"""The file of the Grafana dashboard. That its queries return data is tested in tests/monitoring."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import distill_rl
from distill_rl.observe.metrics import FAULTS
from distill_rl.workers.cluster.telemetry import PREFIX, gauge_of

DASHBOARD: dict[str, Any] = json.loads(
    (Path(distill_rl.__file__).parents[1] / "launch" / "monitoring" / "grafana-dashboard.json").read_text()
)
PANELS = DASHBOARD["panels"]
TARGETS = [target for panel in PANELS for target in panel.get("targets", ())]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def test_every_query_uses_the_chosen_source_and_run() -> None:
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "run"]
    for panel in PANELS:
        assert panel["type"] in ("row", "stat", "timeseries")
        assert panel["type"] == "row" or panel["datasource"] == SOURCE
    for target in TARGETS:
        assert target["datasource"] == SOURCE
        queried = re.findall(r"(\w+)\{([^}]*)\}", target["expr"])
        assert queried, target["expr"]
        for metric, labels in queried:
            assert metric.startswith(f"ray_{PREFIX}")
            assert labels.startswith('run="$run"')


def test_every_important_metric_has_a_panel() -> None:
    shown = " ".join(target["expr"] for target in TARGETS)
    for name in ("train/kl_loss", "train/nll_loss", "align/coverage", "align/queue", "transport/teacher_wait", "transport/slot_occupancy", "train/tokens_per_second", *FAULTS):  # fmt: skip
        assert f"ray_{PREFIX}{gauge_of(name, 0.0)[0]}{{" in shown, name


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for one, other in combinations((panel["gridPos"] for panel in PANELS), 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PANELS)

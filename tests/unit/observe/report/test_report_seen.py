"""The report as a browser shows it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distill_rl.config.save import save_config
from distill_rl.observe.report.report import write_report
from distill_rl.observe.report.scores import read_runs
from tests.helpers import results
from tests.helpers.chromium import PROGRAM, Browser, View, chromium
from tests.unit.observe.report.test_report import make_config, make_run, training

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium on this machine")

CHARTS = {
    "Distillation loss (KD)",
    "Cross-entropy with the data (CE)",
    "Alignment across tokenizers",
    "Learning rate",
    "Gradient norm before clipping",
    "Tokens per second",
    "Seconds per step, by part",
    "Faults (cumulative)",
    "Score during training",
}


def full_records() -> list[dict[str, Any]]:
    """A run across tokenizers with every kind of metric, and with faults."""
    records = training(400)
    for record in records:
        step = record["step"]
        if "train/kl_loss" not in record:
            continue
        noise = math.sin(step * 1.7) * 0.2
        record |= {"train/kl_loss": 3 / step**0.5 + noise * 0.3, "train/nll_loss": 4 / step**0.2 + noise}
        record |= {"train/grad_norm": 2 + noise * 4, "train/lr": 1e-3 * (1 - step / 500), "train/skipped": 0.0}
        record |= {"train/tokens_per_second": 5000 + 900 * noise, "align/coverage": 0.97 + noise / 50}
        record |= {"align/one_to_one": 0.7 + noise / 10, "timing/step": 2.0, "timing/wait_teachers": 0.3 + noise / 2}
        record |= {"timing/student": 1.4, "timing/wait_aligner": 0.1, "timing/teacher/forward": 0.4, "align/queue": 1}
        if step > 120:
            record |= {"faults/teacher_restarts": 1.0 if step < 300 else 2.0}
        if step > 200:
            record |= {"faults/skipped_steps": 3.0}
        if step % 100 == 0:
            record |= {"eval/exact_match": step / 500}
    return records


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("seen") / "a run", full_records())
    save_config(make_config(), run / "config.yaml")
    for name, right in (("teacher", 1.0), ("student", 0.75)):
        results.write_result(run / "evals" / name, results.numbered([right] * 20))
    return write_report(run, evaluation=read_runs([run], [run.name]))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_report_opens_offline_and_shows_every_chart(page: Path, browser: Browser, width: int, scheme: Any) -> None:
    view = View(browser, page, width=width, scheme=scheme)
    view.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert view.requested == [page.as_uri()], "nothing but the file itself"
    assert view.console_messages == []
    shown = json.loads(
        view.evaluate("""JSON.stringify([...document.querySelectorAll('figure')].map(figure => ({
            title: figure.querySelector('figcaption b').textContent,
            box: (({width, height}) => [width, height])(figure.querySelector('svg').getBoundingClientRect()),
            marks: [...figure.querySelectorAll('.line, .area')].map(mark => mark.getBBox().width),
            ink: getComputedStyle(figure.querySelector('.line, .area')).getPropertyValue('--c'),
        })))""")
    )
    assert {chart["title"] for chart in shown} >= CHARTS
    for chart in shown:
        assert min(chart["box"]) > 100, f"{chart['title']} can be seen"
        assert chart["marks"], f"{chart['title']} has curves"
        assert all(extent > 10 for extent in chart["marks"])
        assert chart["ink"]
    assert view.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out to the right"
    ink, ground = (
        sum(int(part) for part in view.evaluate(f"getComputedStyle(document.body).{name}")[4:-1].split(",")) / 3
        for name in ("color", "backgroundColor")
    )
    assert (ink < 64 and ground > 192) if scheme == "light" else (ink > 192 and ground < 64)


def test_figures_include_faults(page: Path, browser: Browser) -> None:
    view = View(browser, page, width=1280, scheme="light")
    tiles = view.evaluate("document.querySelector('.tiles').innerText")
    assert "teachers restarted\n2" in tiles
    assert "steps skipped\n3" in tiles
    assert "aligners" not in tiles


def test_the_strip_under_the_pointer_shows_its_values(page: Path, browser: Browser) -> None:
    view = View(browser, page, width=1280, scheme="light")
    visible = "[...document.querySelectorAll('.tip')].filter(tip => getComputedStyle(tip).display != 'none').length"
    assert view.evaluate(visible) == 0
    x, y = view.evaluate(
        "(box => [box.x + box.width / 2, box.y + box.height / 2])(document.querySelector('figure svg').getBoundingClientRect())"
    )
    view.point_at(x, y)
    assert view.evaluate(visible) == 1

"""The report as a browser shows it, and what its switches do."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distill_rl.config.save import save_config
from distill_rl.observe.report.report import number, write_report
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
    "Trained tokens per second",
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


SAMPLES = [
    {"step": step, "who": who, "teacher": "big", "suite": suite, "id": item, "prompt": [{"role": "user", "content": "2 + 2?"}],
     "reference": "4", "completion": f"{who} says {step}", "correct": True, "outcome": "right"}
    for suite in ("sums", "words") for item in ("a", "b") for who, step in (("student", 0), ("student", 200), ("student", 400), ("teacher", 0))
]  # fmt: skip


def write_run(folder: Path, factor: float = 1.0) -> Path:
    records = full_records()
    for record in records:
        if "train/kl_loss" in record:
            record["train/kl_loss"] *= factor
    run = make_run(folder, records)
    config = make_config()
    config.optimizer.lr = 1e-3 * factor
    save_config(config, run / "config.yaml")
    (run / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    for name, right in (("teacher", 1.0), ("student", 0.75)):
        results.write_result(run / "evals" / name, results.numbered([right] * 20))
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("seen") / "a run")


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    return write_report(run, evaluation=read_runs([run]))


@pytest.fixture(scope="module")
def three_runs(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    others = [write_run(folder / "second", 2.0), write_run(folder / "<script>third", 3.0)]
    evaluation = read_runs([run, *others])
    return write_report(run, comparisons=others, evaluation=evaluation, out=folder / "three.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def open_page(browser: Browser, page: Path, width: int = 1400, scheme: Any = "light") -> View:
    """The page with all charts drawn."""
    view = View(browser, page, width=width, scheme=scheme)
    view.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    view.evaluate("dispatchEvent(new Event('beforeprint'))")
    view.wait_until("report.charts.every(chart => chart.plot)")
    return view


def chart(title: str) -> str:
    return f"report.charts.find(chart => chart.spec.title === {json.dumps(title)})"


def legend(view: View, title: str) -> str:
    return view.evaluate(f"{chart(title)}.figure.querySelector('.legend').innerText")


def middle(view: View, title: str) -> tuple[float, float]:
    """A point in the middle of a chart, which is scrolled to."""
    view.evaluate(f"{chart(title)}.figure.scrollIntoView({{block: 'center'}})")
    box = f"{chart(title)}.plot.over.getBoundingClientRect()"
    return tuple(view.evaluate(f"(box => [box.x + box.width / 2, box.y + box.height / 2])({box})"))  # type: ignore[return-value]


def choose(view: View, control: str, value: str) -> None:
    events = "element.dispatchEvent(new Event('input')), element.dispatchEvent(new Event('change'))"
    view.evaluate(
        f"(element => {{ element.value = {json.dumps(value)}; {events} }})(document.querySelector({json.dumps(control)}))"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("name", ["page", "three_runs"])
def test_report_opens_offline_and_shows_every_chart(
    request: pytest.FixtureRequest, browser: Browser, name: str, width: int, scheme: Any
) -> None:
    file: Path = request.getfixturevalue(name)
    view = open_page(browser, file, width, scheme)
    assert view.requested == [file.as_uri()], "nothing but the file itself"
    assert view.console_messages == []
    shown = json.loads(
        view.evaluate("""JSON.stringify(report.charts.map(chart => {
            const canvas = chart.figure.querySelector('canvas');
            const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            const colors = new Set();
            for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 250) colors.add(pixels.slice(i, i + 3).join());
            return {title: chart.spec.title, box: [chart.plot.width, chart.plot.height], colors: colors.size};
        }))""")
    )
    titles = {drawn["title"].partition(": ")[0] for drawn in shown}
    assert titles >= CHARTS
    for drawn in shown:
        assert min(drawn["box"]) > 100, f"{drawn['title']} can be seen"
        assert drawn["colors"] >= 3, f"{drawn['title']} has curves, axis and text"
    assert view.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out to the right"
    ink, ground = (
        sum(int(part) for part in view.evaluate(f"getComputedStyle(document.body).{name}")[4:-1].split(",")) / 3
        for name in ("color", "backgroundColor")
    )
    assert (ink < 64 and ground > 192) if scheme == "light" else (ink > 192 and ground < 64)


def test_charts_are_drawn_only_when_they_come_into_view(page: Path, browser: Browser) -> None:
    view = View(browser, page, width=400, scheme="light")
    view.evaluate("report.charts[0].figure.scrollIntoView()")
    view.wait_until("report.charts[0].plot")
    last = "report.charts.findLast(chart => chart.figure.closest('details').open)"
    assert not view.evaluate(f"Boolean({last}.plot)")
    view.evaluate(f"{last}.figure.scrollIntoView()")
    view.wait_until(f"{last}.plot")


def test_figures_include_faults(page: Path, browser: Browser) -> None:
    view = View(browser, page, width=1400, scheme="light")
    tiles = view.evaluate("document.querySelector('.tiles').innerText")
    assert "teachers restarted\n2" in tiles
    assert "steps skipped\n3" in tiles
    assert "aligners" not in tiles


@pytest.mark.parametrize("width", [1400, 400])
def test_hover_shows_the_values_of_that_step_in_all_charts(page: Path, browser: Browser, width: int) -> None:
    view = open_page(browser, page, width)
    assert legend(view, "Learning rate").split() == ["last", "lr", "2e-4"]
    view.point_at(*middle(view, "Learning rate"))
    view.wait_until(f"{chart('Learning rate')}.step.textContent.startsWith('step ')")
    step = int(legend(view, "Learning rate").split()[1])
    assert 190 <= step <= 210
    expected = number(1e-3 * (1 - step / 500))
    assert legend(view, "Learning rate").split() == ["step", f"{step}", "lr", expected]
    measured = 3 / step**0.5 + math.sin(step * 1.7) * 0.06
    values = legend(view, "Distillation loss (KD)").split()
    assert values[:3] == ["step", f"{step}", "train"], "the other charts follow"
    assert float(values[3]) == pytest.approx(measured, rel=1e-3)
    around = step // 10 * 10, step // 10 * 10 + 10
    assert values[-1] in {number(2.5 / measured_step) for measured_step in around}, "of the nearest measured step"


def test_drag_zooms_all_charts_and_double_click_resets(page: Path, browser: Browser) -> None:
    view = open_page(browser, page)
    x, y = middle(view, "Learning rate")
    ends = "report.charts.map(chart => [chart.plot.scales.x.min, chart.plot.scales.x.max])"
    before = view.evaluate(ends)
    assert [1, 400] in before
    view.drag(x, y, 60)
    view.wait_until(f"{chart('Learning rate')}.plot.scales.x.min > 150")
    zoomed = view.evaluate(ends)
    assert len({tuple(pair) for pair in zoomed}) == 1, "all charts show the same steps"
    assert 190 < zoomed[0][0] < zoomed[0][1] < 300
    view.double_click(x, y)
    view.wait_until(f"{chart('Learning rate')}.plot.scales.x.min === 1")
    assert view.evaluate(ends) == before


def test_axes_are_switched_for_one_chart_and_for_all(page: Path, browser: Browser) -> None:
    view = open_page(browser, page)
    scale, button = "{}.plot.scales.y.distr", "{}.logButton"
    kd, norm = chart("Distillation loss (KD)"), chart("Gradient norm before clipping")
    assert view.evaluate(scale.format(norm)) == 1
    view.evaluate(f"{button.format(norm)}.click()")
    assert view.evaluate(scale.format(norm)) == 3
    assert view.evaluate(f"{button.format(norm)}.getAttribute('aria-pressed')") == "true"
    choose(view, "#axis", "log")
    assert view.evaluate(scale.format(kd)) == view.evaluate(scale.format(norm)) == 3
    choose(view, "#axis", "linear")
    assert view.evaluate(scale.format(kd)) == view.evaluate(scale.format(norm)) == 1
    assert view.console_messages == [], "values of 0 have no place on a logarithmic axis, and do no harm"


def test_smoothing_draws_the_corrected_mean_over_faint_values(page: Path, browser: Browser) -> None:
    assert smoothed([5.0, 5.0, 5.0], 0.9) == pytest.approx([5.0] * 3), "without the correction it would start at 0.5"
    view = open_page(browser, page)
    values = [1.0, 4.0, None, 2.0, 8.0]
    assert view.evaluate(f"report.smooth({json.dumps(values)}, 0.8)") == pytest.approx(smoothed(values, 0.8))
    kd = chart("Distillation loss (KD)")
    widths = f"{kd}.plot.series.slice(1).map(series => series.width)"
    choose(view, "#smoothing", "0")
    assert view.evaluate(widths) == [1.8, 1.8], "train and validation"
    choose(view, "#smoothing", "0.9")
    assert view.evaluate(widths) == [1, 1.8, 1.8], "validation stays as it was measured"
    raw = [3 / step**0.5 + math.sin(step * 1.7) * 0.06 for step in range(1, 401)]
    assert view.evaluate(f"{kd}.plot.data[1].slice(-3)") == pytest.approx(raw[-3:], rel=1e-4)
    assert view.evaluate(f"{kd}.plot.data[2].slice(-3)") == pytest.approx(smoothed(raw, 0.9)[-3:], rel=1e-4)


def smoothed(values: list[float | None], weight: float) -> list[float | None]:
    """The weighted mean of all values up to each one, with weights that fall by `weight` per value."""
    means: list[float | None] = []
    for i, value in enumerate(values):
        past = [other for other in values[: i + 1] if other is not None]
        weights = [weight**age for age in range(len(past))][::-1]
        mean = sum(w * v for w, v in zip(weights, past)) / sum(weights)
        means.append(None if value is None else mean)
    return means


def test_runs_are_overlaid_and_switched_off(three_runs: Path, browser: Browser) -> None:
    view = open_page(browser, three_runs)
    names = ["a run", "second", "<script>third"]
    assert view.evaluate("report.page.runs") == names
    lines = (
        f"{chart('Distillation loss (KD)')}.plot.series.slice(1).filter(line => line.width > 1).map(line => line.label)"
    )
    assert view.evaluate(lines) == [f"{name}, {split}" for split in ("train", "validation") for name in names]
    view.evaluate("document.querySelectorAll('.runs button')[1].click()")
    assert view.evaluate(lines) == [
        f"{name}, {split}" for split in ("train", "validation") for name in (names[0], names[2])
    ]
    assert view.evaluate("document.querySelectorAll('.runs button')[1].getAttribute('aria-pressed')") == "false"
    assert not view.evaluate(
        "report.charts.some(chart => !chart.figure.hidden && chart.spec.title.endsWith(': second'))"
    )
    table = view.evaluate("document.body.innerText")
    assert "optimizer.lr" in table
    assert "train.micro_batch_size" not in table.partition("Resolved configuration")[0]


def test_a_curve_is_switched_off_in_its_legend(page: Path, browser: Browser) -> None:
    view = open_page(browser, page)
    kd = chart("Distillation loss (KD)")
    view.evaluate(f"{kd}.figure.querySelector('.legend button').click()")
    assert view.evaluate(f"{kd}.plot.series.slice(1).map(series => series.label)") == ["validation"]


def test_search_hides_other_charts(page: Path, browser: Browser) -> None:
    view = open_page(browser, page)
    choose(view, "#search", "gradient")
    shown = "report.charts.filter(chart => chart.figure.offsetParent).map(chart => chart.spec.title)"
    assert view.evaluate(shown) == ["Gradient norm before clipping"]
    choose(view, "#search", "")
    assert len(view.evaluate(shown)) == view.evaluate("report.charts.length")


@pytest.mark.parametrize("width", [1400, 400])
def test_completions_are_shown_at_a_chosen_step(page: Path, browser: Browser, width: int) -> None:
    view = open_page(browser, page, width)
    text = "document.querySelector('.completions').innerText"
    shown = view.evaluate(text)
    for part in ("2 + 2?", "teacher big", "teacher says 0", "student says 0", "student says 400", "right"):
        assert part in shown
    assert "student says 200" not in shown
    choose(view, ".completions input", "1")
    shown = view.evaluate(text)
    assert "student says 200" in shown
    assert "student says 400" not in shown
    assert view.evaluate("document.querySelectorAll('.sample').length") == 2
    assert view.evaluate("document.querySelector('.samples').scrollWidth") <= width


def test_without_scripts_the_tables_are_readable(page: Path, browser: Browser, tmp_path: Path) -> None:
    plain = tmp_path / "plain.html"
    plain.write_text(page.read_text("utf-8").replace("script-src", "script-src 'none'; x-"), "utf-8")
    view = View(browser, plain, width=400, scheme="light")
    assert view.evaluate("typeof report") == "undefined"
    text = view.evaluate("document.querySelector('.final').innerText")
    assert "validation/kl_loss\t0.00625" in text
    assert view.evaluate("getComputedStyle(document.querySelector('.controls')).display") == "none"

from __future__ import annotations

from typing import Any

import pytest

from distill_rl.observe.report.report import ReportRun, Section, constants, sections


def make_run(*metrics: str, name: str = "r", steps: int = 3, **values: list[Any]) -> ReportRun:
    """A run in which each of the metrics changes from step to step."""
    records = [{"step": step, **{metric: float(step) for metric in metrics}} for step in range(1, steps + 1)]
    for metric, series in values.items():
        for record, value in zip(records, series):
            record[metric] = value
    return ReportRun(name, records)


def titles(found: list[Section]) -> dict[str, list[str]]:
    return {section.title: [chart.title for chart in section.charts] for section in found}


@pytest.mark.parametrize(
    ("metric", "section", "title", "label"),
    [
        ("train/kl_loss", "Losses", "Distillation loss (KD)", "train"),
        ("validation/kl_loss/math", "Losses", "Distillation loss (KD) by teacher", "math, validation"),
        ("validation/top1_agreement", "Losses", "Top-1 agreement with the teacher", "validation"),
        ("validation/acceptance", "Losses", "Acceptance, Σ min(p, q)", "validation"),
        (
            "validation/acceptance_low/math",
            "Losses",
            "Acceptance, Σ min(p, q) by teacher",
            "math, validation, at least",
        ),
        ("validation/entropy", "Losses", "entropy", "validation"),
        ("train/lr", "Optimisation", "Learning rate", "lr"),
        ("train/novelty", "Optimisation", "train/novelty", "novelty"),
        ("train/tokens", "Coverage and data", "Labelled tokens per step", "train"),
        ("align/coverage/math", "Coverage and data", "Alignment across tokenizers", "coverage/math"),
        ("align/method/bytes", "Coverage and data", "align/method per step", "bytes"),
        ("timing/math/forward", "Speed", "timing/math", "forward"),
        ("train/tokens_per_second", "Speed", "Trained tokens per second", "tokens_per_second"),
        ("memory/student", "Memory and utilisation", "Peak memory of workers, GiB", "student"),
        ("busy/big", "Memory and utilisation", "Share of the step in which workers were busy", "big"),
        ("align/labelled", "Coverage and data", "Share of tokens with a label", "labelled"),
        ("align/efficiency", "Coverage and data", "Share of positions that hold a token", "efficiency"),
        ("transport/slot_occupancy", "Memory and utilisation", "Share of the teachers' slots in use", "slot_occupancy"),
        ("transport/bytes", "Transport", "transport/bytes per step", "bytes"),
        ("faults/skipped_steps", "Faults", "Faults (cumulative)", "steps skipped"),
        ("new/thing", "new", "new/thing", "thing"),
        ("new/thing/a/b", "new", "new/thing", "a/b"),
        ("plain", "Other", "plain", "plain"),
        ("odd/", "Other", "odd/", "odd/"),
    ],
)
def test_a_metric_finds_its_section_chart_and_label(metric: str, section: str, title: str, label: str) -> None:
    (found,) = sections([make_run(metric)])
    (chart,) = found.charts
    assert (found.title, chart.title) == (section, title)
    assert [curve.label for curve in chart.curves] == [label]


def test_training_and_validation_share_a_chart_and_teachers_another() -> None:
    run = make_run("train/kl_loss", "validation/kl_loss", "train/kl_loss/a", "train/kl_loss/b", "validation/kl_loss/a")
    (losses,) = sections([run])
    assert {chart.title: [curve.label for curve in chart.curves] for chart in losses.charts} == {
        "Distillation loss (KD)": ["train", "validation"],
        "Distillation loss (KD) by teacher": ["a, train", "b, train", "a, validation"],
    }


def test_only_training_curves_that_vary_freely_are_smoothed() -> None:
    run = make_run("train/kl_loss", "validation/kl_loss", "train/lr", "new/x")
    exact = {
        curve.label: curve.exact for section in sections([run]) for chart in section.charts for curve in chart.curves
    }
    assert exact == {"train": False, "validation": True, "lr": True, "x": False}


def test_constants_are_listed_and_not_drawn() -> None:
    run = make_run("new/moving", **{"new/still": [5.0] * 3, "new/once": [7.0]})
    assert titles(sections([run])) == {"new": ["new/moving"]}
    assert constants([run]) == [("new/still", ["5"])]


def test_a_metric_that_moves_in_one_run_is_drawn_for_all() -> None:
    still, moving = make_run(**{"new/x": [1.0] * 3}), make_run("new/x", name="s")
    (found,) = sections([still, moving])
    assert [(curve.run, len(curve.points)) for curve in found.charts[0].curves] == [(0, 3), (1, 3)]
    assert constants([still, moving]) == []
    assert constants([still, make_run(name="s", **{"new/x": [2.0] * 3})]) == [("new/x", ["1", "2"])]


def test_several_runs_split_charts_of_many_metrics() -> None:
    names = [f"new/x/{letter}" for letter in "abcd"]
    assert titles(sections([make_run(*names)])) == {"new": ["new/x"]}
    assert titles(sections([make_run(*names), make_run(*names)])) == {"new": [f"new/x: {letter}" for letter in "abcd"]}


def test_the_share_of_cut_documents_is_derived_from_counts() -> None:
    run = make_run(**{"align/truncated": [1, 0, 2], "align/documents": [4, 4, 4]})
    charts = {chart.title: chart.curves[0].points for section in sections([run]) for chart in section.charts}
    assert charts["Share of documents cut at the length limit"] == [(1, 0.25), (2, 0.0), (3, 0.5)]


def test_fault_counts_go_on_after_a_resume() -> None:
    run = make_run(steps=5, **{"faults/skipped_steps": [1, 3, 0, 0, 2]})
    (found,) = sections([run])
    assert [value for _, value in found.charts[0].curves[0].points] == [1, 3, 3, 3, 5]


@pytest.mark.parametrize(("training", "is_explained"), [([3.0, 2.9, 2.8], True), ([3.0, 1.0, 1.01], False)])
def test_ce_above_validation_is_explained(training: list[float], is_explained: bool) -> None:
    (losses,) = sections([make_run(**{"train/nll_loss": training, "validation/nll_loss": [2.0, 1.5, 1.0]})])
    caption = losses.charts[0].caption
    assert ("Training ends at 2.8, validation at 1." in caption) == is_explained
    assert bool(caption) == is_explained

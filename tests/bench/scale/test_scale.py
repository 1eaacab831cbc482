"""The benchmark of the driver's cost: ranks that compute nothing go through a whole run, and the fit is one."""

from __future__ import annotations

import json

import pytest

from tests.bench.scale import scale


def test_a_run_of_ranks_that_share_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "PROCESSES", 2)
    monkeypatch.setattr(scale, "AMONG", 4)
    assert scale.Case(4).per_process == 2
    out = tmp_path / "scale.json"
    sizes = ["--ranks", "4", "--micro-batches", "1", "--steps", "20", "--sleep-ms", "20"]
    assert scale.main([*sizes, "--out", str(out)]) in (0, 1)
    (case,) = json.loads(out.read_text())["cases"]
    assert (case["ranks"], case["micro_batches"], case["ranks_per_process"], case["nodes"]) == (4, 1, 2, 1)
    assert case["driver_cpu_ms"] > 0
    assert case["sleep_ms"] == 20
    assert case["step_ms"] >= 20
    # Between two steps that are ready: how often the driver called the student late, and how late.
    assert 0 <= case["called_ahead"] <= 1
    assert (case["gap_ms"] == 0) == (case["called_ahead"] == 1)
    assert 0 < case["step_ms"] / 1000 < case["start_s"]
    assert case["replace_teacher_s"] > 0
    assert case["objects"] == 0, "the driver has let go of all"


def test_more_nodes_than_fit_on_a_machine_are_refused(tmp_path, capsys):
    assert scale.main(["--ranks", "4", "--nodes", "11", "--out", str(tmp_path / "out.json")]) == 2
    assert "--nodes: must be at most 10" in capsys.readouterr().err


def test_the_fit_finds_the_cost_of_ranks_and_micro_batches():
    def cost(ranks: int, micro_batches: int) -> float:
        return 2 + 0.5 * ranks + 0.25 * ranks * micro_batches

    sizes = [(4, 1), (8, 1), (16, 1), (64, 1), (16, 2), (16, 8)]
    cases = [{"ranks": r, "micro_batches": m, "driver_cpu_ms": cost(r, m)} for r, m in sizes]
    fit = scale.fit(cases)
    assert fit["fixed_ms"] == pytest.approx(2)
    assert fit["per_rank_ms"] == pytest.approx(0.5)
    assert fit["per_rank_and_micro_batch_ms"] == pytest.approx(0.25)
    assert fit["far_ms"] == pytest.approx(cost(scale.FAR, 1))
    assert fit["far_error_ms"] == pytest.approx(0, abs=1e-6)
    cases[3]["driver_cpu_ms"] *= 1.1
    assert scale.fit(cases)["far_error_ms"] > 1


def test_a_missed_target_is_told():
    figures = {
        "cases": [{"ranks": ranks, "micro_batches": 1, "driver_cpu_ms": 30.0, "sleep_ms": 0} for ranks in (64, 128)]
    }
    (line,) = scale.verdict(figures)
    assert line.startswith("64 ranks, 1 micro-batches: a step takes 30.0 ms")


def test_a_gap_between_two_steps_is_told():
    case = {"micro_batches": 1, "driver_cpu_ms": 5.0, "sleep_ms": 100, "called_ahead": 1.0}
    cases = [
        case | {"ranks": 8, "step_ms": 101.9},
        case | {"ranks": 8, "step_ms": 102.5},
        case | {"ranks": 64, "step_ms": 300.0},
    ]
    (line,) = scale.verdict({"cases": cases})
    assert line.startswith("8 ranks: a step takes 102.5 ms")
    (line,) = scale.verdict({"cases": [cases[0] | {"called_ahead": 0.95}]})
    assert line.startswith("8 ranks: the student is called on 95.0% of the steps before the end of the last one")


def test_whole_replicas_share_a_process():
    for ranks in scale.RANKS:
        case = scale.Case(ranks)
        assert case.per_process == 1 or case.per_process % case.tp == 0
        assert ranks / case.per_process <= max(scale.PROCESSES, ranks // case.tp)

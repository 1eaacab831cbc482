"""The benchmark of log-likelihoods: a small one runs, its ways agree, and what it writes can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distill_rl.system.environment import ROOT
from tests.bench import evals
from tests.bench.evals import BATCHED, ITEMS, LOOP, SHARED

RECORD = ROOT / "docs/benchmarks/evals.json"


def test_all_ways_agree_and_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "evals.json"
    sizes = {"subjects": 2, "questions": 3, "batch": 2, "vocabulary": 400, "hidden": 64, "layers": 1, "rounds": 1}
    arguments = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    evals.main([*arguments, "--out", str(out)])
    written = json.loads(out.read_text("utf-8"))
    assert list(written["ways"]) == sorted([LOOP, ITEMS, BATCHED, SHARED])
    assert all(way["greatest_difference"] < evals.MAX_DIFFERENCE for way in written["ways"].values())
    assert written["ways"][LOOP]["times_as_fast"] == 1.0
    assert written["workload"]["prompt_tokens_mean"] > 300
    assert sizes.items() <= written["workload"].items()
    assert {"cpu", "commit"} <= written["environment"].keys()
    assert SHARED in capsys.readouterr().out


def test_questions_are_shaped_like_mmlu_and_the_same_every_time() -> None:
    items = evals.invent(2, 3)
    assert items == evals.invent(2, 3)
    assert [item.prefix == items[0].prefix for item in items] == [True] * 3 + [False] * 3
    for item in items:
        assert item.prefix.startswith("The following are multiple choice questions (with answers) about ")
        assert item.prefix.count("Answer: ") == evals.SHOTS
        assert [line[:3] for line in str(item.prompt).splitlines()[1:5]] == ["A. ", "B. ", "C. ", "D. "]
        assert str(item.prompt).endswith("\nAnswer:")


@pytest.mark.parametrize(
    ("faster", "difference", "told"),
    [(3.0, 1e-5, []), (2.9, 1e-5, ["must be at least 3"]), (9.0, 1e-2, ["log-likelihoods differ by 1.0e-02"])],
)
def test_a_slow_or_wrong_way_is_told(faster: float, difference: float, told: list[str]) -> None:
    way = {"times_as_fast": faster, "greatest_difference": difference}
    problems = evals.verdict({SHARED: way})
    assert len(problems) == len(told)
    assert all(text in problem for text, problem in zip(told, problems))


def test_the_published_record_holds_what_is_promised() -> None:
    record = json.loads(RECORD.read_text("utf-8"))
    assert not record["environment"]["dirty"]
    assert evals.verdict(record["ways"]) == []

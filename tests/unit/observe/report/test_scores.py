from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill_rl.errors import DataError
from distill_rl.observe.report.scores import Difference, Evaluation, Score, ScorePart, read_runs, read_score

WHOLE = {
    "suite": "mmlu",
    "title": "four choices",
    "score": 0.5,
    "interval": [0.4, 0.6],
    "num_items": 96,
    "outcomes": {"right": 48, "wrong": 40, "truncated": 8, "unparsable": 0},
    "truncated": 9,
    "macro": 0.45,
    "per_task": {"law": {"score": 0.25, "num_items": 4}},
    "num_fewshot": 5,
    "limit": None,
    "seconds": 12345.678,
}


def read(folder: Path, **fields: Any) -> Score:
    (folder / "mmlu.json").write_text(json.dumps(WHOLE | fields))
    score = read_score(folder / "mmlu.json", "student")
    assert score is not None
    return score


def test_every_field_of_a_result_is_read(tmp_path: Path) -> None:
    score = read(tmp_path)
    assert (score.model, score.suite, score.title, score.macro, score.step) == ("student", "mmlu", "four choices", 0.45, None)  # fmt: skip
    outcomes = {"wrong": 40, "truncated": 8, "unparsable": 0}
    assert score.whole == ScorePart(0.5, (0.4, 0.6), 96, outcomes)
    assert score.tasks == {"law": ScorePart(0.25, None, 4, {})}
    assert score.facts == {"num_fewshot": "5", "limit": "none", "seconds": "12,346"}


@pytest.mark.parametrize(
    "fields",
    [
        {"interval": 3}, {"interval": [0.1]}, {"interval": [0.1, "x"]}, {"interval": [None, None]},
        {"num_items": "x"}, {"num_items": True}, {"num_items": -1}, {"num_items": 10**400},
        {"outcomes": [1]}, {"outcomes": {"wrong": "x"}}, {"macro": "x"}, {"macro": float("nan")},
        {"per_task": [1]}, {"per_task": {"law": 3}}, {"per_task": {"law": {"score": 10**400}}},
        {"title": None}, {"title": ["x"]}, {"suite": None}, {"seconds": float("inf")}, {"seconds": {"a": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_optional_fields_are_left_empty(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert read(tmp_path, **fields).whole.score == 0.5


@pytest.mark.parametrize("value", ["high", None, True, -0.1, 1.1, float("nan"), float("inf"), 10**400, [0.5]], ids=repr)
def test_a_score_must_be_between_0_and_1(tmp_path: Path, value: object) -> None:
    with pytest.raises(DataError, match=r"mmlu\.json: `score` must be a number from 0 to 1; got ") as error:
        read(tmp_path, score=value)
    assert len(str(error.value)) < len(str(tmp_path)) + 150


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b'{"score": ' + b"9" * 10_000 + b"}"])
def test_invalid_json_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.json: must be JSON"):
        read_score(tmp_path / "a.json", "m")


def test_missing_file_is_refused_and_other_json_skipped(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_score(tmp_path / "a.json", "m")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_score(tmp_path / "config.json", "m") is None


def test_outcomes_that_occurred_known_ones_first() -> None:
    parts = [ScorePart(0.5, outcomes={"zeta": 1, "truncated": 2, "wrong": 0}), ScorePart(0.5, outcomes={"wrong": 3, "unparsable": 0})]  # fmt: skip
    evaluation = Evaluation(tuple(Score(f"m{index}", "s", part) for index, part in enumerate(parts)))
    assert list(evaluation.outcomes().items()) == [("wrong", "wrong"), ("truncated", "cut off"), ("zeta", "zeta")]


def test_tasks_of_all_models_are_listed() -> None:
    scores = (
        Score("a", "s", ScorePart(0.5), {"x": ScorePart(0.5, num_items=3)}),
        Score("b", "s", ScorePart(0.5), {"x": ScorePart(0.5, num_items=4), "y": ScorePart(0.5)}),
        Score("b", "other", ScorePart(0.5), {"z": ScorePart(0.5)}),
    )
    assert Evaluation(scores).tasks("s") == {"x": 3, "y": None}


@pytest.mark.parametrize(
    ("interval", "clear"), [((-0.2, -0.1), True), ((0.1, 0.2), True), ((-0.1, 0.1), False), ((0.0, 0.1), False)]
)
def test_a_difference_is_clear_if_its_interval_excludes_zero(interval: tuple[float, float], clear: bool) -> None:
    assert Difference(0.0, interval, 10, 0, 0).clear == clear


def test_step_is_read_from_the_folder_name(tmp_path: Path) -> None:
    for name in ("step-120", "step-x", "step-7-old"):
        (tmp_path / "evals" / name).mkdir(parents=True)
        read(tmp_path / "evals" / name)
    assert {score.model: score.step for score in read_runs([tmp_path]).scores} == {
        "step-7-old": None,
        "step-x": None,
        "step-120": 120,
    }


@pytest.mark.parametrize("summary", ["{", "[]", '{"teacher": "x"}', "[" * 100_000])
def test_damaged_summary_has_no_scores(tmp_path: Path, summary: str) -> None:
    (tmp_path / "summary.json").write_text(summary)
    assert read_runs([tmp_path]) == Evaluation()

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distill_rl.observe.report.report import MAX_CHARACTERS, MAX_STEPS, ReportRun, samples
from distill_rl.types import RunPaths


def make_run(folder: Path, rows: list[Any]) -> ReportRun:
    folder.mkdir()
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "samples.jsonl").write_text("\n".join(lines))
    return ReportRun(folder.name, [], paths=RunPaths(folder))


def row(step: int, **fields: Any) -> dict[str, Any]:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    base = {"step": step, "who": "student", "suite": "sums", "id": "q:1", "prompt": chat, "reference": "4"}
    return (
        base
        | {"completion": f"at {step}", "correct": False, "outcome": "wrong", "score": 0.0, "truncated": False}
        | fields
    )


def test_an_item_has_the_answers_of_teacher_and_student(tmp_path: Path) -> None:
    teacher = row(0, who="teacher", teacher="big", correct=True, outcome="right")
    (item,) = samples([make_run(tmp_path / "a", [row(0), teacher, row(50, outcome="truncated", truncated=True)])])
    assert item["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    assert (item["suite"], item["id"], item["reference"]) == ("sums", "q:1", "4")
    assert [(answer["who"], answer["step"], answer["verdict"], answer["right"]) for answer in item["answers"]] == [
        ("student", 0, "wrong", False),
        ("teacher big", 0, "right", True),
        ("student", 50, "cut off", False),
    ]


def test_runs_share_their_items(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", [row(1)]), make_run(tmp_path / "b", [row(2), row(2, id="q:2", prompt="plain")])]
    first, second = samples(runs)
    assert [(answer["run"], answer["step"]) for answer in first["answers"]] == [(0, 1), (1, 2)]
    assert second["prompt"] == [{"role": "", "content": "plain"}]


def test_no_file_and_damaged_lines_give_what_is_there(tmp_path: Path) -> None:
    assert samples([ReportRun("r", [], paths=RunPaths(tmp_path / "none"))]) == []
    damaged = ['{"step": 1, "compl', "[]", "3", {"step": "1", "completion": "x"}, {"step": 1, "completion": 5}]
    (item,) = samples([make_run(tmp_path / "a", [*damaged, {"step": 1, "completion": "alone"}])])
    assert item["answers"] == [{"run": 0, "who": "student", "step": 1, "text": "alone", "verdict": "", "right": False}]


def test_many_steps_and_long_texts_are_limited(tmp_path: Path) -> None:
    rows = [row(step, completion="x" * 10_000) for step in range(0, 1000, 10)]
    (item,) = samples([make_run(tmp_path / "a", rows)])
    steps = [answer["step"] for answer in item["answers"]]
    assert len(steps) == MAX_STEPS
    assert (steps[0], steps[-1]) == (0, 990)
    assert all(len(answer["text"]) <= MAX_CHARACTERS + 2 for answer in item["answers"])

"""The samples of a run in their file."""

from __future__ import annotations

from pathlib import Path

from distill_rl.evals.options import Options, load_questions
from distill_rl.evals.results import SampleFile, items_file, read_samples, samples_of, to_line
from tests.helpers.suites import write_suite


def sample(item: str, completion: str) -> dict[str, object]:
    return {"suite": "math", "id": item, "completion": completion}


def test_an_evaluation_that_is_repeated_replaces_its_samples(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "samples.jsonl")
    file.add(0, [sample("a", "old"), sample("b", "old")])
    file.add(0, [sample("a", "of the teacher")], teacher="big")
    file.add(4, [sample("a", "later")])
    file.add(0, [sample("a", "new")])
    assert [
        (s["step"], s["who"], s.get("teacher"), s["completion"]) for s in read_samples(tmp_path / "samples.jsonl")
    ] == [
        (0, "teacher", "big", "of the teacher"),
        (4, "student", None, "later"),
        (0, "student", None, "new"),
    ]


def test_samples_of_steps_that_are_trained_again_are_removed(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "samples.jsonl")
    file.drop_after(0)
    assert not (tmp_path / "samples.jsonl").exists()
    for step in (0, 4, 8):
        file.add(step, [sample("a", "x")])
    file.drop_after(4)
    assert [s["step"] for s in read_samples(tmp_path / "samples.jsonl")] == [0, 4]


def test_samples_are_the_items_that_are_drawn_first(tmp_path: Path) -> None:
    path, picked = str(write_suite(tmp_path)), []
    for limit in (6, None):
        loaded = load_questions([path], tmp_path, Options(limit=limit))
        rows = [
            {"id": item.id, "prompt": item.prompt, "completion": f"{item.id}?", "answer": "even", "outcome": "right",
             "score": 1.0, "truncated": False}
            for item in loaded[0].items
        ]  # fmt: skip
        items_file(tmp_path, "own").write_bytes(b"".join(map(to_line, rows)))
        picked.append(samples_of(loaded, tmp_path, 3))
    assert picked[0] == picked[1]
    assert [s["completion"] for s in picked[0]] == [f"{item}?" for item in loaded[0].drawn[:3]]
    assert picked[0][0]["correct"]
    assert picked[0][0]["reference"] == "even"

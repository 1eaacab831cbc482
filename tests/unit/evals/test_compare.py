from __future__ import annotations

import os
from pathlib import Path

import pytest

from distill_rl.errors import ConfigError, DataError
from distill_rl.evals.compare import compare, find, of_run, read_items
from distill_rl.evals.results import paired_bootstrap
from distill_rl.observe.report.scores import Evaluation, Score
from tests.helpers.results import numbered, write_result

GOOD, BAD = [1.0] * 60 + [0.0] * 40, [0.0] * 20 + [1.0] * 30 + [0.0] * 50


def row(evaluation: Evaluation, model: str, suite: str = "quiz") -> Score:
    (match,) = [score for score in evaluation.scores if (score.model, score.suite) == (model, suite)]
    return match


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Two models; the one that sorts last was scored first."""
    for when, (name, scores) in enumerate({"z_first": GOOD, "a_second": BAD}.items()):
        folder = write_result(tmp_path / "out" / name, numbered(scores), tasks=["even", "odd"], macro=0.5)
        os.utime(folder / "quiz.json", (when, when))
    return tmp_path / "out"


def test_difference_is_item_mean_with_bootstrap_interval(out: Path) -> None:
    evaluation = compare(find([out]))
    assert (evaluation.baseline, evaluation.models, evaluation.notes, evaluation.problems) == (
        "z_first",
        ["z_first", "a_second"],
        (),
        (),
    )
    assert row(evaluation, "z_first").whole.difference is None
    difference = row(evaluation, "a_second").whole.difference
    assert difference is not None
    assert difference.value == pytest.approx(-0.3)
    assert (difference.better, difference.worse, difference.num_items) == (0, 30, 100)
    assert difference.interval == paired_bootstrap([b - a for a, b in zip(GOOD, BAD)])
    assert difference.clear


def test_task_differences_use_the_tasks_items(out: Path) -> None:
    tasks = row(compare(find([out])), "a_second").tasks
    assert list(tasks) == ["even", "odd"]
    assert [part.difference.num_items for part in tasks.values() if part.difference] == [50, 50]
    even = tasks["even"].difference
    assert even is not None
    assert even.interval == paired_bootstrap([b - a for a, b in zip(GOOD[::2], BAD[::2])])


def test_items_are_paired_by_id_not_by_line(tmp_path: Path) -> None:
    ids = [f"q/{index}" for index in range(100)]
    write_result(tmp_path / "a", dict(zip(ids, GOOD)))
    write_result(tmp_path / "b", dict(zip(reversed(ids), reversed(GOOD))))
    difference = row(compare(find([tmp_path])), "b").whole.difference
    assert difference is not None
    assert (difference.value, difference.interval, difference.worse) == (0, (0, 0), 0)
    assert not difference.clear


def test_the_baseline_can_be_named(out: Path) -> None:
    evaluation = compare(find([out]), "a_second")
    difference = row(evaluation, "z_first").whole.difference
    assert difference is not None
    assert difference.value == pytest.approx(0.3)
    with pytest.raises(ConfigError, match="--baseline: must be a model among z_first, a_second; got nobody"):
        compare(find([out]), "nobody")


def test_one_model_has_scores_and_no_difference(out: Path) -> None:
    evaluation = compare(find([out / "z_first"]))
    assert evaluation.baseline is None
    assert row(evaluation, "z_first").whole.difference is None


def test_items_missing_from_a_model_are_excluded_with_note(tmp_path: Path) -> None:
    write_result(tmp_path / "a", numbered(GOOD))
    write_result(tmp_path / "b", numbered(GOOD[:80]) | {"other": 0.0})
    evaluation = compare(find([tmp_path]))
    difference = row(evaluation, "b").whole.difference
    assert difference is not None
    assert (difference.num_items, difference.value) == (80, 0)
    assert evaluation.notes == ("quiz: 81 items of b and 100 of a have 80 in common; the difference is over these 80",)


def test_models_without_a_common_item_are_not_compared(tmp_path: Path) -> None:
    write_result(tmp_path / "a", {"x": 1.0})
    write_result(tmp_path / "b", {"y": 1.0})
    evaluation = compare(find([tmp_path]))
    assert row(evaluation, "b").whole.difference is None
    assert "have 0 in common; there is no difference to show" in evaluation.notes[0]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("suite_sha256", "cd" * 32, "suite_sha256 differs: efefefefefef (a), cdcdcdcdcdcd (b)"),
        ("prompts_sha256", "cd" * 32, "prompts_sha256 differs: efefefefefef (a), cdcdcdcdcdcd (b)"),
        ("data_sha256", "cd" * 32, "data_sha256 differs: abababababab (a), cdcdcdcdcdcd (b)"),
        ("num_fewshot", 0, "num_fewshot differs: 5 (a), 0 (b)"),
        ("limit", 100, "limit differs: none (a), 100 (b)"),
        ("max_new_tokens", 5, "max_new_tokens differs: 9 (a), 5 (b)"),
        ("backend", "vllm", "backend differs: hf (a), vllm (b)"),
    ],
)
def test_differing_settings_are_noted(tmp_path: Path, field: str, value: object, words: str) -> None:
    write_result(tmp_path / "a", numbered(GOOD))
    write_result(tmp_path / "b", numbered(GOOD), **{field: value})
    assert compare(find([tmp_path])).notes == (f"quiz: {words}",)


def test_seed_matters_only_with_a_limit(tmp_path: Path) -> None:
    for limit, notes in ((None, 0), (100, 1)):
        write_result(tmp_path / "a", numbered(GOOD), limit=limit)
        write_result(tmp_path / "b", numbered(GOOD), limit=limit, seed=7)
        assert len(compare(find([tmp_path])).notes) == notes


def test_only_seeds_that_drew_items_are_compared(tmp_path: Path) -> None:
    for name, limit, seed in (("a", 100, 0), ("b", None, 1), ("c", 100, 2), ("d", None, 3)):
        write_result(tmp_path / name, numbered(GOOD), limit=limit, seed=seed)
    assert compare(find([tmp_path / "a", tmp_path / "b"])).notes == ("quiz: limit differs: 100 (a), none (b)",)
    assert compare(find([tmp_path])).notes[1:] == ("quiz: seed differs: 0 (a), 2 (c)",)


def test_many_models_are_counted_in_a_note(tmp_path: Path) -> None:
    for index in range(6):
        folder = write_result(tmp_path / f"m{index}", numbered(GOOD), num_fewshot=0 if index else 5)
        os.utime(folder / "quiz.json", (index, index))
    assert compare(find([tmp_path])).notes == ("quiz: num_fewshot differs: 5 (m0), 0 (m1, m2, m3 and 2 others)",)


def test_suite_missing_from_the_baseline_is_noted(out: Path) -> None:
    write_result(out / "a_second", numbered(GOOD), "other")
    assert compare(find([out])).notes == ("other: z_first has no result, so there is nothing to compare with",)


def test_without_items_there_is_a_score_and_a_note(out: Path) -> None:
    (out / "a_second" / "quiz.items.jsonl").unlink()
    evaluation = compare(find([out]))
    assert row(evaluation, "a_second").whole.difference is None
    assert evaluation.notes == ("quiz: a_second has no items file, so there is no difference to show",)


def test_unfinished_evaluation_is_noted(out: Path) -> None:
    (out / "a_second" / ".math.partial.jsonl").touch()
    assert find([out]).notes == ("math: the evaluation of a_second has not finished; run it again to continue",)


@pytest.mark.parametrize(
    "line",
    [
        '{"id": "q", "sco', "[]", '{"score": 1}', '{"id": "q"}', '{"id": "q", "score": NaN}', '{"id": "q", "score": true}',
        '{"id": "q", "score": 1e999}', '{"id": "q", "score": 1, "task": 3}', '{"id": "q/0", "score": 1}', "[" * 100_000,
        '{"id": "q", "score": ' + "9" * 4000 + "}", '{"id": "\udcff"}',
    ],
)  # fmt: skip
def test_damaged_items_are_named_by_line(out: Path, line: str) -> None:
    items = out / "a_second" / "quiz.items.jsonl"
    items.write_bytes(items.read_bytes() + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(DataError) as error:
        read_items(items.with_name("quiz.json"))
    assert [str(items) + ", line 101: " in problem for problem in error.value.problems] == [True]
    assert compare(find([out])).problems == error.value.problems


def test_a_problem_cannot_write_to_a_terminal(tmp_path: Path) -> None:
    for name in ("a", "b\x1b[2J"):
        write_result(tmp_path / name, numbered(GOOD))
    (tmp_path / "b\x1b[2J" / "quiz.items.jsonl").write_text('{"id": "\\u001b", "score": 1}\n' * 2)
    (tmp_path / "b\x1b[2J" / "other.json").write_text("{")
    evaluation = compare(find([tmp_path]))
    assert len(evaluation.problems) == 2
    assert not [problem for problem in evaluation.problems if "\x1b" in problem]


def test_damaged_lines_are_reported_up_to_a_limit(out: Path) -> None:
    items = out / "a_second" / "quiz.items.jsonl"
    items.write_text("x\n" * 1000)
    with pytest.raises(DataError) as error:
        read_items(items.with_name("quiz.json"))
    assert len(error.value.problems) == 21


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '{"score": "high"}', '{"suite": "quiz"}', '{"score": -1}'])
def test_damaged_results_are_problems(out: Path, content: str) -> None:
    (out / "a_second" / "quiz.json").write_text(content)
    evaluation = find([out])
    assert evaluation.models == ["z_first"]
    assert len(evaluation.problems) == 1
    assert str(out / "a_second" / "quiz.json") in evaluation.problems[0]


def test_json_without_a_result_is_ignored(out: Path) -> None:
    (out / "a_second" / "config.json").write_text('{"model_type": "gpt2"}')
    (out / "a_second" / "list.json").write_text("[1]")
    assert find([out]).problems == ()
    assert len(find([out]).scores) == 2


def test_all_paths_without_results_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "file.json").write_text("{}")
    paths = [tmp_path / name for name in ("empty", "model", "file.json", "absent")]
    with pytest.raises(ConfigError) as error:
        find(paths)
    endings = ("a folder that is neither", "a folder that is neither", "a file", "no such folder")
    assert len(error.value.problems) == 4
    for path, ending, problem in zip(paths, endings, error.value.problems):
        assert problem.startswith(f"{path}: must be a run directory")
        assert f"got {ending};" in problem


def test_models_with_one_name_are_labelled_by_folder(tmp_path: Path) -> None:
    for run in ("kd", "ce"):
        (tmp_path / run / "evals").mkdir(parents=True)
        write_result(tmp_path / run / "evals" / "student", numbered(GOOD))
    write_result(tmp_path / "ce" / "evals" / "teacher", numbered(GOOD))
    write_result(tmp_path / "out", numbered(GOOD))
    paths = [tmp_path / "kd", tmp_path / "ce" / "evals", tmp_path / "out", tmp_path / "kd" / "evals" / "student"]
    assert find(paths).models == ["kd/student", "teacher", "ce/student", "out"]


def test_models_are_ordered_by_path_then_role_and_step(tmp_path: Path) -> None:
    for name in ("step-100", "ce_only", "step-20", "student_after", "own", "teacher", "step-3", "student_before"):
        write_result(tmp_path / "evals" / name, numbered(GOOD))
    write_result(tmp_path / "other", numbered(GOOD))
    named = ["teacher", "student_before", "student_after", "ce_only", "own", "step-3", "step-20", "step-100"]
    assert find([tmp_path / "other", tmp_path]).models == ["other", *named]


def test_a_run_is_compared_with_itself_and_with_others(tmp_path: Path) -> None:
    write_result(tmp_path / "kd" / "evals" / "teacher", numbered(GOOD))
    write_result(tmp_path / "kd" / "evals" / "student", numbered(BAD))
    write_result(tmp_path / "ce" / "evals" / "student", numbered(BAD))
    evaluation = of_run(tmp_path / "kd", [tmp_path / "ce"])
    assert evaluation.models == ["teacher", "student", "ce: student"]
    values = [score.whole.difference and round(score.whole.difference.value, 6) for score in evaluation.scores]
    assert values == [None, -0.3, -0.3]


def test_damaged_result_of_a_run_is_a_problem_not_an_error(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_result(tmp_path / "evals" / name, numbered(GOOD))
    (tmp_path / "evals" / "b" / "quiz.json").write_text("{")
    (tmp_path / "evals" / "c" / "quiz.items.jsonl").write_text("{")
    evaluation = of_run(tmp_path)
    assert evaluation.models == ["a", "c"]
    assert len(evaluation.problems) == 2


def test_names_cannot_control_a_terminal_or_reverse_text(tmp_path: Path) -> None:
    write_result(tmp_path / "a\x1b[2J", numbered([1.0, 0.0]), "s\u202e", tasks=["t\n1"], title="\x07")
    (score,) = find([tmp_path]).scores
    assert (score.model, score.suite, list(score.tasks)) == (r"a\x1b[2J", r"s\u202e", [r"t\n1"])
    assert score.title == r"\x07"


def test_suite_of_mmlus_size_is_compared_from_disk(tmp_path: Path) -> None:
    scores = [float(index % 3 > 0) for index in range(14_042)]
    for name in ("a", "b"):
        write_result(tmp_path / name, numbered(scores), tasks=[f"t{index}" for index in range(57)])
    evaluation = compare(find([tmp_path]))
    assert all(part.difference and part.difference.value == 0 for part in evaluation.scores[1].tasks.values())

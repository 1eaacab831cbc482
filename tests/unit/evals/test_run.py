from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from distill_rl.errors import ConfigError, DataError, WorkerError
from distill_rl.evals.backends.base import Output, Settings
from distill_rl.evals.executor import LocalExecutor
from distill_rl.evals.grading.grader import Graded
from distill_rl.evals.options import Options, load_questions
from distill_rl.evals.results import wilson
from distill_rl.evals.run import Model, _rest, evaluate_models
from distill_rl.evals.suites.base import Item, Verdict
from distill_rl.evals.suites.registry import SUITES
from tests.helpers.models import write_tiny_model
from tests.helpers.suites import write_suite
from tests.unit.evals.conftest import KNOWN, chat, write_rows


def evaluate(
    model: Path, names: list[str], data: Path, *, out_dir: Path | None = None, batch_size: int = 64, **options: Any
) -> dict[str, dict[str, Any]]:
    """One model, in this process: suite → result."""
    settings = Options(**options, settings=Settings(batch_size=batch_size))
    suites = load_questions(names, data, settings)
    with closing(LocalExecutor()) as executor:
        return evaluate_models([Model("m", model, out_dir)], suites, settings, executor)["m"]


def test_known_prompts_score_one_and_others_zero(parrot: Path, questions: Path) -> None:
    result = evaluate(parrot, ["exact_match"], questions)["exact_match"]
    assert result["score"] == 0.5
    assert result["num_items"] == 4
    assert result["interval"] == list(wilson(0.5, 4))
    assert {task: (part["score"], part["num_items"]) for task, part in result["per_task"].items()} == {
        "first": (0.5, 2),
        "second": (1.0, 1),
    }
    assert sum(result["outcomes"].values()) == 4
    assert result["data"] == [str(questions)]
    assert result["macro"] == 0.75


def test_data_hash_covers_questions_and_answers(parrot: Path, questions: Path) -> None:
    first = evaluate(parrot, ["exact_match"], questions)["exact_match"]["data_sha256"]
    rows = questions.read_text().splitlines()
    questions.write_text(
        "".join(json.dumps(json.loads(row), indent=None, separators=(" ,", " : ")) + "\n" for row in rows)
    )
    assert evaluate(parrot, ["exact_match"], questions)["exact_match"]["data_sha256"] == first
    questions.write_text("\n".join(rows[:3]))
    assert evaluate(parrot, ["exact_match"], questions)["exact_match"]["data_sha256"] != first


def test_an_untrained_model_scores_nothing(questions: Path, tmp_path: Path) -> None:
    assert evaluate(write_tiny_model(tmp_path / "m"), ["exact_match"], questions)["exact_match"]["score"] == 0.0


def test_written_results_are_found_by_the_report(parrot: Path, questions: Path, tmp_path: Path) -> None:
    from distill_rl.observe.report.scores import read_runs

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    out = tmp_path / "run" / "evals" / "student"
    results = evaluate(parrot, ["exact_match"], questions.parent, out_dir=out)
    assert sorted(file.name for file in out.glob("[!.]*")) == ["exact_match.items.jsonl", "exact_match.json"]
    assert json.loads((out / "exact_match.json").read_text()) == results["exact_match"]
    rows = [json.loads(line) for line in (out / "exact_match.items.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"exact_match.jsonl:{number}" for number in (1, 2, 3, 4)]
    assert [row["score"] for row in rows] == [1.0, 1.0, 0.0, 0.0]
    assert rows[0]["completion"] == "one two"
    (row,) = read_runs([tmp_path / "run"]).scores
    assert (row.model, row.suite, row.whole.score, row.whole.num_items) == ("student", "exact_match", 0.5, 4)


def test_second_call_reuses_results_of_the_first(parrot: Path, questions: Path, tmp_path: Path) -> None:
    first = evaluate(parrot, ["exact_match"], questions, out_dir=tmp_path / "out")
    written = (tmp_path / "out" / "exact_match.json").stat().st_mtime_ns
    assert evaluate(parrot, ["exact_match"], questions, out_dir=tmp_path / "out", batch_size=1) == first
    assert (tmp_path / "out" / "exact_match.json").stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match=r"another evaluation; got max_new_tokens \d+; now max_new_tokens 3"):
        evaluate(parrot, ["exact_match"], questions, out_dir=tmp_path / "out", max_new_tokens=3)


def test_a_chat_suite_needs_a_chat_template(parrot: Path, questions: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(parrot, bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"the chat prompts of exact_match need .* chat template; got none; "):
        evaluate(bare, ["exact_match"], questions)


def test_results_of_an_edited_suite_are_not_reused(parrot: Path, tmp_path: Path) -> None:
    suite = write_suite(tmp_path, count=3, max_new_tokens=2)
    evaluate(parrot, [str(suite)], tmp_path, out_dir=tmp_path / "out")
    suite.write_text(suite.read_text().replace("% 2 == 0)", "% 2 == 1)"))
    with pytest.raises(ConfigError, match="another evaluation; got suite_sha256"):
        evaluate(parrot, [str(suite)], tmp_path, out_dir=tmp_path / "out")
    suite.write_text(suite.read_text().replace("question", "riddle"))
    with pytest.raises(ConfigError, match="another evaluation; got prompts_sha256"):
        evaluate(parrot, [str(suite)], tmp_path, out_dir=tmp_path / "out")


def test_interruption_is_noticed_while_grading(parrot: Path, tmp_path: Path) -> None:
    suite = write_suite(tmp_path, count=3, max_new_tokens=2)
    suite.write_text(
        "import time\n"
        + suite.read_text().replace("        return Verdict", "        time.sleep(600)\n        return Verdict")
    )

    class Stopped(Exception):
        pass

    calls = 0

    def interrupted() -> None:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise Stopped

    suites = load_questions([str(suite)], tmp_path, Options())
    with closing(LocalExecutor()) as executor, pytest.raises(Stopped):
        evaluate_models([Model("m", parrot)], suites, Options(), executor, interrupted=interrupted)


def test_nothing_is_written_unless_requested(parrot: Path, questions: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in [*parrot.rglob("*"), *questions.parent.rglob("*")]}
    evaluate(parrot, ["exact_match"], questions)
    assert {file: file.stat().st_mtime_ns for file in [*parrot.rglob("*"), *questions.parent.rglob("*")]} == before


def test_a_cut_off_answer_is_counted(parrot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill_rl.evals.run.ANSWER_MARGIN", 0)
    rows: list[dict[str, object]] = [{"messages": chat(KNOWN[1][0]), "answer": "o", "task": "t"}]
    out = tmp_path / "out"
    result = evaluate(parrot, ["exact_match"], write_rows(tmp_path / "rows.jsonl", rows), out_dir=out)["exact_match"]
    assert (result["truncated"], result["per_task"]["t"]["truncated"], result["max_new_tokens"]) == (1, 1, 1)
    assert json.loads((out / "exact_match.items.jsonl").read_text())["truncated"] is True


def test_limit_samples_by_seed_and_keeps_file_order(parrot: Path, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": f"ka {number}", "answer": "x"} for number in range(30)]
    data = write_rows(tmp_path / "rows.jsonl", rows)

    def drawn(seed: int) -> list[int]:
        evaluate(parrot, ["exact_match"], data, out_dir=tmp_path / "out", limit=5, seed=seed, clean=True)
        lines = (tmp_path / "out" / "exact_match.items.jsonl").read_text().splitlines()
        return [int(json.loads(line)["id"].rpartition(":")[2]) for line in lines]

    assert drawn(0) == drawn(0) == sorted(drawn(0))
    assert len(set(drawn(0))) == 5
    assert drawn(0) != drawn(1)


def test_unknown_suite_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"suites: must be among .*exact_match.*; got maths, mmmlu"):
        evaluate(tmp_path / "no-model", ["maths", "exact_match", "mmmlu"], tmp_path / "no-data")
    with pytest.raises(ConfigError, match="suites: must name at least one"):
        evaluate(tmp_path, [], tmp_path)


def test_bad_rows_are_reported_before_loading_the_model(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "p"}])
    with pytest.raises(DataError, match=r"rows\.jsonl, row 1: `answer` must be"):
        evaluate(tmp_path / "no-model", ["exact_match"], data)


@pytest.mark.parametrize("name", ["limit", "batch_size"])
def test_a_size_below_one_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: must be 1 or more; got 0"):
        evaluate(tmp_path, ["exact_match"], tmp_path, **{name: 0})


class PlayedGrader:
    """Its grades arrive when a test says so."""

    def __init__(self, longest_s: float):
        self.longest_s, self.futures = longest_s, list[Future[Graded]]()

    def submit(self, suite: str, item: Item, completion: str) -> Future[Graded]:
        self.futures.append(Future())
        return self.futures[-1]


def awaited(longest_s: float, moments: Iterator[int | None]) -> Iterator[list[str]]:
    """The ids of two items whose grades are awaited; at each look, the grade of the item that `moments` names next arrives."""
    grader = PlayedGrader(longest_s)

    def interrupted() -> None:
        if (number := next(moments)) is not None:
            grader.futures[number].set_result(Graded("judged", Verdict(1.0, "")))

    items, output = [Item(name, "a question", "an answer") for name in "ab"], Output("an answer")
    pending = {grader.submit("exact_match", item, output.text): (item, output) for item in items}
    for rows in _rest(pending, grader, interrupted):
        yield [row["id"] for row in rows]


def test_the_time_for_a_grade_starts_anew_with_each_that_arrives() -> None:
    assert list(awaited(60.0, iter([1, None, None, 0]))) == [["b"], ["a"]]


def test_a_grader_that_is_silent_for_too_long_ends_the_evaluation() -> None:
    rest = awaited(0.1, iter([0, None, None, None]))
    assert next(rest) == ["a"]
    with pytest.raises(WorkerError, match=r"grader: must judge an item within 0\.1 s; got no verdict"):
        next(rest)


def test_every_suite_is_registered_under_its_name() -> None:
    assert all(name == suite.name for name, suite in SUITES.items())


def test_importing_run_loads_no_torch_and_no_ray() -> None:
    import subprocess
    import sys

    code = "import sys, distill_rl.evals.run; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

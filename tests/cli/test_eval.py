"""`distill-rl eval` from the command line. Killed and stopped evaluations: tests/faults."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.command import (
    distill_rl,
    distill_rl_in_process,
)
from tests.helpers.models import write_tiny_model
from tests.helpers.suites import write_suite

pytestmark = pytest.mark.cli

COUNT = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden=32, seed=1)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite long enough to be interrupted."""
    return write_suite(tmp_path_factory.mktemp("suite"), count=COUNT, max_new_tokens=40)


def arguments(model: Path, suite: Path, out: Path, *more: str) -> list[str]:
    options = ("--model", model, "--suites", suite, "--data", suite.parent, "--out", out, "--batch-size", "4")
    return ["eval", *map(str, options), *more]


@pytest.fixture(scope="module")
def whole(model: Path, suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an undisturbed evaluation on two shards."""
    out = tmp_path_factory.mktemp("whole") / "out"
    ended = distill_rl(*arguments(model, suite, out, "--shards", "2"))
    assert ended.code == 0, ended.err
    return out


def items(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "own.items.jsonl").read_text().splitlines()]


def result(out: Path) -> dict:
    return json.loads((out / "own.json").read_text())


def judged(out: Path) -> int:
    """The number of judged items that a running evaluation has on disk."""
    partial = out / ".own.partial.jsonl"
    return max(0, partial.read_bytes().count(b"\n") - 1) if partial.exists() else 0


def test_results_record_model_data_and_settings(whole: Path, model: Path, suite: Path) -> None:
    summary = result(whole)
    assert summary["num_items"] == COUNT == len(items(whole))
    assert sum(summary["outcomes"].values()) == COUNT
    assert (summary["backend"], summary["dtype"], summary["device"]) == ("hf", "auto", "cpu")
    assert (summary["model"], summary["data"]) == (str(model), [str(suite.parent)])
    assert summary["tokens_per_second"] > 0
    assert summary["example_prompt"] == items(whole)[0]["prompt"] == "question 0 is"
    assert [row["id"] for row in items(whole)] == [f"q{n}" for n in range(COUNT)]


def test_shards_change_no_item(whole: Path, model: Path, suite: Path, tmp_path: Path) -> None:
    ended = distill_rl(*arguments(model, suite, tmp_path / "out", "--shards", "0"))
    assert ended.code == 0, ended.err
    assert items(tmp_path / "out") == items(whole)


@pytest.mark.long_run
def test_a_model_split_over_two_ranks_gives_the_same_items(
    whole: Path, model: Path, suite: Path, tmp_path: Path
) -> None:
    ended = distill_rl(*arguments(model, suite, tmp_path / "out", "--tp", "2", "--limit", "24"))
    assert ended.code == 0, ended.err
    assert re.search(r"^own  tiny: 24/24  score [01]\.\d+  \d+ tokens/s", ended.out, re.MULTILINE), ended.out
    by_id = {row["id"]: row for row in items(whole)}
    assert items(tmp_path / "out") == [by_id[row["id"]] for row in items(tmp_path / "out")]
    assert (result(tmp_path / "out")["num_items"], result(tmp_path / "out")["tensor_parallel"]) == (24, 2)


def test_results_of_another_model_are_not_overwritten(whole: Path, suite: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", hidden=32, seed=2)
    before = {path: path.read_bytes() for path in whole.glob("own.*")}
    ended = distill_rl_in_process(*arguments(other, suite, whole))
    assert ended.code == 2
    assert "holds results of another evaluation; got model_sha256" in ended.errors[0]
    assert "--clean" in ended.errors[0]
    assert {path: path.read_bytes() for path in whole.glob("own.*")} == before


def test_models_are_compared_side_by_side(model: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", hidden=16, seed=2)
    suite = write_suite(tmp_path, count=20)
    options = ("--model", f"big={model}", "--model", other, "--suites", suite, "--data", tmp_path, "--shards", "0")
    ended = distill_rl("eval", *options, "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    for name in ("big", "other"):
        assert result(tmp_path / "out" / name)["num_items"] == 20
    report = distill_rl_in_process("report", tmp_path / "out")
    assert report.code == 0, report.err
    assert "big" in report.out
    assert "other" in report.out


def test_suites_are_listed(tmp_path: Path) -> None:
    ended = distill_rl_in_process("eval", "--list")
    assert ended.code == 0
    listed = [line.split()[0] for line in ended.out.splitlines()]
    assert {"math", "math500", "minerva_math", "mmlu", "mmlu_cot", "gsm8k", "exact_match"} <= set(listed)


def test_every_mistake_in_the_command_is_reported(model: Path, tmp_path: Path) -> None:
    suite = write_suite(tmp_path, count=4, warnings=("own: 4 rows; published are 5",))
    cases: list[tuple[tuple[object, ...], tuple[str, ...]]] = [
        (("--model", model, "--suites", "maths,mmul", "--data", tmp_path), ("maths, mmul", "minerva_math")),
        (("--model", model, "--suites", "mmlu,gsm8k", "--data", tmp_path / "nothing"), ("nothing",)),
        (("--model", tmp_path / "no", "--suites", suite, "--data", tmp_path), ("no such folder",)),
        (("--model", model, "--suites", suite, "--data", tmp_path, "--strict"), ("4 rows; published are 5",)),
        (("--model", model, "--suites", suite, "--data", tmp_path, "--limit", "0"), ("limit: must be 1 or more",)),
        (("--model", model, model, "--suites", suite, "--data", tmp_path), ("are both called tiny", "NAME=DIR")),
        (
            ("--model", tmp_path / "no", "--suites", "maths", "--data", tmp_path, "--shards", "-1", "--deadline", "0"),
            ("--shards: must be 0 or more", "--deadline: must be", "maths", "no such folder"),
        ),
        (("--model", model, "--suites", suite, "--data", tmp_path, "--out", suite), ("--out: must be a folder",)),
        (
            ("--model", model, "--suites", suite, "--data", tmp_path, "--backend", "vllm", "--shards", "0"),
            ("vllm", "not installed"),
        ),
    ]
    for options, words in cases:
        ended = distill_rl_in_process("eval", *options)
        assert ended.code == 2, (options, ended.err)
        assert "Traceback" not in ended.err
        assert all(word in " ".join(ended.errors) for word in words), (options, ended.err)


def test_data_unlike_the_published_is_only_a_warning(model: Path, tmp_path: Path) -> None:
    suite = write_suite(tmp_path, count=4, warnings=("own: 4 rows; published are 5",))
    ended = distill_rl("eval", "--model", model, "--suites", suite, "--data", tmp_path, "--shards", "0")
    assert ended.code == 0, ended.err
    assert "warning: own: 4 rows; published are 5" in ended.out

"""`distill-rl eval` from the command line: its results, and no item lost or repeated however it is interrupted."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.helpers.command import (
    Ended,
    actor_pid,
    distill_rl,
    distill_rl_in_process,
    leftovers,
    running,
    shared_memory,
    survivors,
    temporary,
    until,
)
from tests.helpers.models import write_tiny_model
from tests.helpers.suites import write_suite

pytestmark = pytest.mark.cli

COUNT = 200
ROOT = Path(__file__).parents[2]


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


@contextmanager
def evaluating(command: list[str], out: Path, log: Path) -> Iterator[psutil.Popen]:
    """Starts an evaluation and yields once some items are judged. Afterwards, asserts that it left nothing behind."""
    before = shared_memory()
    with running(*command, log=log) as process:
        until(lambda: judged(out) >= 8 or process.poll() is not None, "the first items")
        assert process.poll() is None, log.read_text()
        children = leftovers(process.pid)
        assert len(children) > 3
        yield process
    assert not survivors(children.values(), deadline_s=30)
    until(lambda: shared_memory() <= before, "shared memory given back")


def assert_resumes(whole: Path, command: list[str], out: Path) -> Ended:
    """Runs the command again and asserts that every item is there once, equal to that of the whole evaluation."""
    before = judged(out)
    assert 0 < before < COUNT
    assert not (out / "own.json").exists()
    ended = distill_rl(*command)
    assert ended.code == 0, ended.err
    assert f"{before} of {COUNT} items are already done" in ended.out
    assert items(out) == items(whole)
    assert result(out)["resumed_items"] == before
    assert {key: result(out)[key] for key in ("score", "interval", "outcomes", "per_task")} == {
        key: result(whole)[key] for key in ("score", "interval", "outcomes", "per_task")
    }
    return ended


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


def test_sigkill_loses_no_item_and_repeats_none(whole: Path, model: Path, suite: Path, tmp_path: Path) -> None:
    command = arguments(model, suite, tmp_path / "out", "--shards", "2")
    with evaluating(command, tmp_path / "out", tmp_path / "log") as process:
        process.kill()
    assert_resumes(whole, command, tmp_path / "out")


def test_sigterm_keeps_judged_items_and_exits_85(whole: Path, model: Path, suite: Path, tmp_path: Path) -> None:
    command = arguments(model, suite, tmp_path / "out")
    with evaluating(command, tmp_path / "out", tmp_path / "log") as process:
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == 85, (tmp_path / "log").read_text()
        assert not temporary(process.pid)
    assert "the same command continues" in (tmp_path / "log").read_text()
    assert_resumes(whole, [*command, "--shards", "0"], tmp_path / "out")


def test_a_killed_actor_is_one_error_line_and_the_command_resumes(
    whole: Path, model: Path, suite: Path, tmp_path: Path
) -> None:
    command = arguments(model, suite, tmp_path / "out")
    with evaluating(command, tmp_path / "out", tmp_path / "log") as process:
        os.kill(actor_pid(process.pid, "EvalWorker"), signal.SIGKILL)
        assert process.wait(timeout=60) == 1, (tmp_path / "log").read_text()
    (error,) = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("distill-rl: error:")]
    assert "evaluator-0: its process died during running the model" in error
    assert "give the same command again" in error
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert_resumes(whole, [*command, "--shards", "0"], tmp_path / "out")


def test_results_of_another_model_are_not_overwritten(whole: Path, suite: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", hidden=32, seed=2)
    before = {path: path.read_bytes() for path in whole.glob("own.*")}
    ended = distill_rl(*arguments(other, suite, whole))
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
    report = distill_rl("report", tmp_path / "out")
    assert report.code == 0, report.err
    assert "big" in report.out
    assert "other" in report.out


def test_suites_are_listed(tmp_path: Path) -> None:
    ended = distill_rl("eval", "--list")
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


def test_the_batch_script_forwards_the_signal_and_requeues(model: Path, suite: Path, tmp_path: Path) -> None:
    """A stand-in for `scontrol` records the requeue."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/scontrol-arguments\n')
    (tmp_path / "scontrol").chmod(0o755)
    out, log = tmp_path / "out", tmp_path / "log"
    variables = {"MODELS": f"tiny={model}", "SUITES": str(suite), "DATA": str(suite.parent), "OUT": str(out)}
    variables |= {"EXTRA": "--batch-size 4", "SLURM_JOB_ID": "77", "DISTILL_RL_ROOT": str(ROOT)}
    variables |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with log.open("wb") as file:
        script = psutil.Popen(
            ["bash", ROOT / "launch" / "eval.sbatch"], env=os.environ | variables, stdout=file, stderr=file
        )
    until(lambda: judged(out) >= 8 or script.poll() is not None, "the first items")
    script.send_signal(signal.SIGUSR1)
    assert script.wait(timeout=60) == 85, log.read_text()
    assert (tmp_path / "scontrol-arguments").read_text() == "requeue 77\n"
    assert 0 < judged(out) < COUNT

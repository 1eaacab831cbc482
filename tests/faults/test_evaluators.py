"""Disturbed evaluations beside training: a killed or stopped evaluator costs only its scores; a stopped run resumes them."""

import json
import os
import re
import signal

from tests.cli.test_train import assert_equal_runs
from tests.examples.test_evaluations import result, settings
from tests.helpers.command import actor_pid, distill_rl, running, series, until
from tests.helpers.suites import write_suite


def test_a_stopped_evaluator_is_killed_and_the_export_still_scored(material, tmp_path):
    config, run, log = material.config(tmp_path), tmp_path / "runs" / "tiny", tmp_path / "log"
    suite = write_suite(tmp_path, count=400, max_new_tokens=40)
    evaluation = [f"evaluate.suites=[{suite}]", f"evaluate.data={tmp_path}", "evaluate.suites_every=7"]
    with running("train", "-c", config, *evaluation, "evaluate.limit=396", "faults.stopped_s=1", log=log) as process:
        until(lambda: list(run.glob("evals/step-7/.own.partial.jsonl")) or process.poll() is not None, "an evaluation")
        os.kill(actor_pid(process.pid, "EvalWorker"), signal.SIGSTOP)
        assert process.wait(timeout=120) == 0, log.read_text()
    message = r"the evaluation of step 7 failed, .*: evaluator on \S+: .*it was stopped \(SIGSTOP\) for 1 s, and killed"
    assert re.search(message, log.read_text()), log.read_text()
    assert [step for step, _ in series(run, "eval/own")] == [8]


def test_a_killed_evaluator_costs_only_its_scores(material, undisturbed, tmp_path):
    config, run, log = material.config(tmp_path), tmp_path / "runs" / "tiny", tmp_path / "log"
    suite = write_suite(tmp_path, count=200, max_new_tokens=40)
    evaluation = [f"evaluate.suites=[{suite}]", f"evaluate.data={tmp_path}", "evaluate.batch_size=4"]
    limit = ("evaluate.suites_every=4", "evaluate.limit=196", "aligner.workers=0")
    with running("train", "-c", config, *evaluation, *limit, log=log) as process:
        until(lambda: list(run.glob("evals/step-4/.own.partial.jsonl")) or process.poll() is not None, "an evaluation")
        os.kill(actor_pid(process.pid, "EvalWorker"), signal.SIGKILL)
        assert process.wait(timeout=120) == 0, log.read_text()
    message = r"the evaluation of step 4 failed, training goes on: evaluator on \S+: its process died"
    assert re.search(message, log.read_text())
    assert [step for step, _ in series(run, "eval/own")] == [8]
    assert json.loads((run / "evals" / "student" / "own.json").read_text())["num_items"] == 200
    assert not list((run / "evals").glob(".weights-*"))
    assert_equal_runs(undisturbed(), run)


def test_a_killed_rank_of_a_split_evaluator_costs_only_its_scores(material, tmp_path):
    config, run, log = material.config(tmp_path), tmp_path / "runs" / "tiny", tmp_path / "log"
    suite = write_suite(tmp_path, count=200, max_new_tokens=40)
    limits = ("evaluate.suites_every=4", "evaluate.limit=196", "evaluate.final_limit=8", "evaluate.parallel.tp=2")
    with running("train", "-c", config, *settings(suite, *limits), "aligner.workers=0", log=log) as process:
        until(lambda: list(run.glob("evals/step-4/.own.partial.jsonl")) or process.poll() is not None, "an evaluation")
        assert "evaluator-tp0, evaluator-tp1" in log.read_text()
        os.kill(actor_pid(process.pid, "EvalWorker.follow"), signal.SIGKILL)
        assert process.wait(timeout=120) == 0, log.read_text()
    message = r"the evaluation of step 4 failed, training goes on: evaluator-tp1 on \S+: its process died"
    assert re.search(message, log.read_text()), log.read_text()
    assert [step for step, _ in series(run, "eval/own")] == [8]
    assert re.search(
        r"evaluating the student on own: \d+ of 8 items|evaluating step 4 on own: \d+ of 196 items", log.read_text()
    )
    assert json.loads((run / "evals" / "student" / "own.json").read_text())["tensor_parallel"] == 2
    assert not list((run / "evals").glob(".weights-*"))


def test_a_run_stopped_while_evaluating_scores_after_resume(material, undisturbed, tmp_path):
    config, run = material.config(tmp_path), tmp_path / "runs" / "tiny"
    suite = write_suite(tmp_path, count=4000, max_new_tokens=40)
    slow = settings(suite, "evaluate.suites_every=2", "aligner.workers=0")
    with running("train", "-c", config, *slow, log=tmp_path / "log") as process:
        until(lambda: list(run.glob("evals/step-2/.own.partial.jsonl")) or process.poll() is not None, "an evaluation")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == 85, (tmp_path / "log").read_text()
    assert ".weights-2" in [path.name for path in (run / "evals").glob(".weights-*")]
    assert not series(run, "eval/own")
    write_suite(tmp_path, count=24)  # other questions, so the interrupted evaluation must not be continued
    resumed = settings(tmp_path / "own.py", "evaluate.suites_every=2", "aligner.workers=0")
    ended = distill_rl("train", "-c", config, *resumed, "--resume")
    assert ended.code == 0, ended.err
    assert {2, 8} <= set(dict(series(run, "eval/own")))
    assert not list((run / "evals").glob(".weights-*"))
    assert result(run, "step-2")["num_items"] == 24
    assert_equal_runs(undisturbed(), run)

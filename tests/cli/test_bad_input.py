"""Bad input on the real command line: exit code 2, one line per problem, all problems at once, nothing written.

The table of everything that can be wrong with a training run is in test_bad_input_table.py.
"""

import shutil
from pathlib import Path

import pytest

from tests.helpers.command import distill_rl, distill_rl_in_process
from tests.helpers.suites import write_recipe_data

pytestmark = pytest.mark.cli


def refused(*arguments, run=distill_rl_in_process) -> list[str]:
    """Runs the command, asserts that it refuses its input, and returns the error lines."""
    ended = run(*arguments)
    assert ended.code == 2, ended.err
    assert "Traceback" not in ended.err
    assert ended.errors == [line for line in ended.err.splitlines() if line.strip()]
    return ended.errors


def assert_named(errors: list[str], *expected: tuple[str, ...]) -> None:
    """Every tuple of words occurs on exactly one line, and there are no other lines."""
    matched = [[line for line in errors if all(word in line for word in words)] for words in expected]
    assert all(len(lines) == 1 for lines in matched), (expected, errors)
    assert len(errors) == len(expected), errors


def test_all_wrong_settings_are_reported_and_nothing_is_written(material, tmp_path):
    errors = refused(
        "train", "-c", material.config(tmp_path), "optimizer.learning_rat=1", "train.steps=many", "train.step=3",
        "student.model=/no/such/model",
        "data.path=/no/such/data.jsonl", "student.parallel.dp=3", "teachers.0.dtype=fp8", run=distill_rl,
    )  # fmt: skip
    assert_named(
        errors,
        ("optimizer.learning_rat", "unknown key", "weight_decay"),
        ("train.step:", "unknown key", "train.steps"),
        ("train.steps:", "many"),
        ("student.model", "/no/such/model"),
        ("data.path", "/no/such/data.jsonl"),
        ("train.global_batch_size", "8", "dp 3", "micro-batch 2"),
        ("teachers.0.dtype", "fp8", "bf16"),
    )
    assert not (tmp_path / "runs").exists()


def test_zero_sizes_are_refused_without_deriving_from_them(material, tmp_path):
    zeros = ("train.micro_batch_size=0", "teachers.0.parallel.dp=0", "prefetch.slots=4")
    ended = distill_rl_in_process("check", "-c", material.config(tmp_path), *zeros)
    assert ended.code == 2
    assert_named(ended.errors, ("train.micro_batch_size", "1 or more"), ("teachers.0.parallel.dp", "1 or more"))
    assert "Traceback" not in ended.err


def test_missing_values_and_wrong_entries_of_every_type_are_reported_at_once(material, tmp_path):
    missing = ("train.steps", "optimizer.lr", "data.packing", "loss.tail", "run.dir", "student.lora", "schedule")
    overrides = [f"{key}=???" for key in missing]
    for betas, words in (("[0.9,null]", ("null",)), ("[0.9,0.95x]", ("0.95x",)), ("[0.9,'???']", ("missing value",))):
        settings = (f"optimizer.betas={betas}", *overrides, "loss.draws=0")
        errors = refused("check", "-c", material.config(tmp_path), *settings)
        expected = [(f"{key}: missing value", f"add {key}=") for key in missing]
        assert_named(errors, *expected, ("optimizer.betas.1: ", *words), ("loss.draws", "1 or more"))


def test_an_unreachable_hub_model_stops_train_but_not_check(material, tmp_path):
    config = material.config(tmp_path)
    checked = distill_rl(
        "check", "-c", config, "student.model=some-org/some-model", "teachers.0.model=some-org/another"
    )
    assert checked.code == 0, checked.err
    assert checked.out.count("# not checked") >= 2
    assert len(refused("train", "-c", config, "student.model=some-org/some-model", run=distill_rl)) >= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "-c", "absent.yaml"), ("absent.yaml",)),
        (("report", "/no/such/run"), ("/no/such/run", "run directory")),
        (("export", "/no/such/run"), ("/no/such/run", "run directory")),
    ],
)
def test_other_commands_name_what_is_missing(arguments, words):
    errors = refused(*arguments)
    assert len(errors) == 1
    assert all(word in errors[0] for word in words)


@pytest.mark.parametrize("arguments", [
    "export {long}", "report {long}", "store info {long}", "check -c {long}", "eval --model {long}=x y --suites gsm8k --data x", "try {long} x x", "quickstart --runs {long}",
])  # fmt: skip
def test_a_path_that_no_file_can_have_gives_one_line(arguments):
    ended = distill_rl_in_process(*arguments.format(long="n" * 300).split())
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert "255 bytes" in line or "File name too long" in line


def test_resume_excludes_clean_and_needs_a_checkpoint(material, tmp_path):
    config = material.config(tmp_path)
    assert "exclude each other" in refused("train", "-c", config, "--resume", "--clean")[0]
    assert "--clean" in refused("train", "-c", config, "--resume")[0]


def test_eval_reports_bad_suites_and_models_together():
    suites, model = refused("eval", "--model", "absent", "--suites", "nonsense", "--data", "x")
    assert "nonsense" in suites
    assert "exact_match" in suites
    assert "model absent: must be a folder" in model


def test_export_of_a_missing_checkpoint_lists_those_that_exist(material, tmp_path):
    for step in (10, 2):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    material.config(tmp_path).rename(tmp_path / "config.yaml")
    ended = distill_rl_in_process("export", tmp_path, "--checkpoint", "step-999")
    assert ended.code != 0
    assert "--checkpoint: must be latest, best, or one of the run's checkpoints (2, 10); got step-999" in ended.err


def test_report_of_a_run_without_evaluations_has_no_baseline(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 0, "train/loss": 1.0}\n')
    (error,) = refused("report", tmp_path, "--baseline", "big")
    assert "--baseline: names an evaluated model, and there are no results of suites; got big; leave it out" in error


def test_eval_names_options_as_they_are_typed(tmp_path):
    (tmp_path / "exact_match.jsonl").write_text('{"prompt": "x", "answer": "y"}\n')
    common = ("eval", "--model", tmp_path, "--suites", "exact_match", "--data", tmp_path)
    lines = refused(*common, "--num-fewshot", "-1", "--max-new-tokens", "0", "--batch-size", "0")[:3]
    assert sorted(line.split(": ")[2] for line in lines) == ["--batch-size", "--max-new-tokens", "--num-fewshot"]
    assert "error: --num-fewshot: is for suites that take worked" in refused(*common, "--num-fewshot", "2")[0]


@pytest.mark.parametrize("command", [[], ["train"], ["check"], ["eval"], ["align"], ["export"], ["report"]])
def test_every_command_prints_its_help(command):
    ended = (distill_rl_in_process if command else distill_rl)(*command, "--help")
    assert ended.code == 0
    assert "usage: distill-rl" in ended.out
    if not command:
        assert "exit codes" in ended.out
        assert "85" in ended.out


RECIPES = sorted((Path(__file__).parents[2] / "configs" / "recipes").glob("*.yaml"))


def test_every_shipped_recipe_passes_check(tmp_path, monkeypatch):
    """Where the folder is as the downloads of docs/evaluation.md make it, or the suites are left out."""
    monkeypatch.chdir(tmp_path)
    write_recipe_data(Path("evals"))
    for recipe in RECIPES:
        ended = distill_rl_in_process("check", "-c", recipe)
        assert ended.code == 0, ended.err
        assert "evaluator: 1 process: mmlu, gsm8k, minerva_math every" in ended.out
    shutil.rmtree("evals")
    for recipe in RECIPES:
        ended = distill_rl_in_process("check", "-c", recipe, "evaluate.suites=[]", "evaluate.data=null")
        assert ended.code == 0, ended.err


def test_recipe_without_its_evaluation_data_says_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (error,) = refused("check", "-c", RECIPES[0])
    assert "evaluate.suites: evals: must be a file or folder with data of suites; got no such file or folder" in error
    assert "docs/evaluation.md#data" in error


def test_all_suite_problems_are_reported_before_the_start(material, tmp_path):
    wrong = ("evaluate.suites=[maths]", "evaluate.backend=vllm", "evaluate.limit=0", "evaluate.gpu_share=2")
    ended = distill_rl_in_process("train", "-c", material.config(tmp_path), *wrong, f"evaluate.data={tmp_path}")
    assert ended.code == 2, ended.err
    errors = " ".join(ended.errors)
    for words in ("minerva_math", "evaluate.backend: needs vllm", "evaluate.limit", "evaluate.gpu_share"):
        assert words in errors
    assert not (tmp_path / "runs").exists()

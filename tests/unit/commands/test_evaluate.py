"""The arguments of `distill-rl eval`, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from distill_rl.commands.evaluate import (
    ExecutorOptions,
    parse_models,
    print_table,
    require_valid,
    warn_about_too_long_items,
)
from distill_rl.errors import ConfigError, problems_of
from distill_rl.evals.backends.base import Settings
from distill_rl.evals.options import Options
from distill_rl.evals.results import OUTCOMES

Asked = tuple[Options, ExecutorOptions]


def asked(where: ExecutorOptions, backend: str = "hf", tensor_parallel: int = 1) -> Asked:
    return Options(backend=backend, settings=Settings(tensor_parallel=tensor_parallel)), where  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "where",
    [
        ExecutorOptions(),
        ExecutorOptions(shards=0),
        ExecutorOptions(shards=4, gpus_per_shard=0.25),
        ExecutorOptions(gpus_per_shard=2.0),
    ],
)
def test_valid_settings_are_accepted(where: ExecutorOptions) -> None:
    assert problems_of(lambda: require_valid(*asked(where))) == []


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (asked(ExecutorOptions(shards=-1)), "--shards: must be 0 or more; got -1"),
        (asked(ExecutorOptions(deadline_s=0.0)), "--deadline: must be greater than 0"),
        (asked(ExecutorOptions(deadline_s=float("inf"))), "--deadline: must be greater than 0"),
        (
            asked(ExecutorOptions(gpus_per_shard=1.5)),
            "--gpus-per-shard: must be a fraction of a GPU, or a whole number; got 1.5",
        ),
        (asked(ExecutorOptions(gpus_per_shard=-1.0)), "--gpus-per-shard: must be a fraction"),
        (asked(ExecutorOptions(gpus_per_shard=float("nan"))), "--gpus-per-shard: must be a fraction"),
        (
            asked(ExecutorOptions(shards=0), tensor_parallel=2),
            "--tp: the backend hf splits a model over Ray actors, and --shards 0 starts none; got 2; set --shards to 1",
        ),
        (
            asked(ExecutorOptions(gpus_per_shard=1.0), "vllm", 2),
            "--gpus-per-shard: has no effect here: --tp decides",
        ),
        (asked(ExecutorOptions(shards=0, gpus_per_shard=1.0)), "--gpus-per-shard: has no effect here: --shards 0"),
    ],
)
def test_invalid_settings_are_refused(refused: Asked, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_valid(*refused)
    assert words in caught.value.problems[0]


def test_all_invalid_options_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        require_valid(*asked(ExecutorOptions(shards=0, deadline_s=-5.0, address="auto"), tensor_parallel=2))
    assert len(caught.value.problems) == 3


def test_models_are_named_after_folder_run_or_argument(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine" / "export").mkdir(parents=True)
    (tmp_path / "big").mkdir()
    (tmp_path / "a=b").mkdir()
    given = [tmp_path / "runs" / "mine" / "export", tmp_path / "big", f"small={tmp_path / 'big'}", tmp_path / "a=b"]
    models = parse_models(list(map(str, given)), tmp_path / "out")
    assert [model.name for model in models] == ["mine", "big", "small", "a=b"]
    assert [model.out for model in models] == [tmp_path / "out" / model.name for model in models]
    (alone,) = parse_models([str(tmp_path / "big")], tmp_path / "out")
    assert alone.out == tmp_path / "out"
    assert parse_models([str(tmp_path / "big")], None)[0].out is None


@pytest.mark.parametrize("name", ["../up=x", ".hidden=x", "="])
def test_name_that_cannot_name_a_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--model: a name must (be the name of one folder|not begin with a dot)"):
        parse_models([name, "y"], None)


def result(right: int, wrong: int, too_long: int = 0, tasks: int = 0) -> dict:
    part = {
        "score": right / (right + wrong + too_long),
        "interval": [0.1, 0.9],
        "num_items": right + wrong + too_long,
        "outcomes": dict.fromkeys(OUTCOMES, 0) | {"right": right, "wrong": wrong, "too_long": too_long},
        "truncated": 0,
    }
    return part | {"per_task": {f"task {n}": part for n in range(tasks)}}


def test_table_has_columns_only_for_failures_that_occurred(capsys: pytest.CaptureFixture[str]) -> None:
    print_table({"one": {"mmlu": result(3, 1, too_long=2, tasks=3), "math": result(1, 1, tasks=57)}})
    printed = capsys.readouterr().out
    assert "too long" in printed
    assert "cut off" not in printed
    assert "not graded" not in printed
    assert "task 2" in printed
    assert "task 56" not in printed
    assert "0.500   0.100 to 0.900" in printed


def test_table_counts_items_without_a_grade(capsys: pytest.CaptureFixture[str]) -> None:
    late = result(3, 1)
    late["outcomes"] |= {"wrong": 0, "grader_timeout": 1, "grader_failed": 2}
    print_table({"one": {"math": late}})
    heading, figures = [
        line.split() for line in capsys.readouterr().out.splitlines() if "math" in line or "model" in line
    ]
    assert heading[-2:] == ["not", "graded"]
    assert figures[-2:] == ["4", "3"]


def test_model_names_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table({"\x1b[2Jevil[bold]": {"mmlu": result(1, 1)}})
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "evil[bold]" in printed


def test_too_long_items_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    warn_about_too_long_items({"one": {"mmlu": result(1, 1, too_long=2), "math": result(1, 1)}})
    assert capsys.readouterr().out.splitlines() == [
        "warning: 2 of 4 items of mmlu do not fit into the positions of one and count as wrong; "
        "fewer worked examples (--num-fewshot) may help"
    ]

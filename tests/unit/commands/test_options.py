"""Every option of the command line is a parameter of the function that it is passed to."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from distill_rl.commands.options import make_parser


@pytest.mark.parametrize(
    "line",
    [
        "train -c x.yaml a=1",
        "check -c x.yaml",
        "submit -c x.yaml",
        "status",
        "logs mine",
        "stop mine",
        "align --student S --teacher T --data D",
        "export RUN",
        "report RUN",
    ],
)
def test_options_are_parameters_of_their_function(line: str) -> None:
    options = vars(make_parser().parse_args(line.split()))
    module, function = options.pop("command").split(".")
    options.pop("resume", None)
    signature = inspect.signature(getattr(import_module(f"distill_rl.commands.{module}"), function))
    assert signature.bind(**options).arguments == options


def test_options_of_eval_set_fields_of_the_same_name() -> None:
    from dataclasses import fields

    from distill_rl.commands.evaluate import ExecutorOptions
    from distill_rl.evals.backends.base import Settings
    from distill_rl.evals.options import Options

    options = vars(make_parser().parse_args(["eval", "--model", "A", "--suites", "b,c", "--data", "D"]))
    names = {field.name for kind in (Options, Settings, ExecutorOptions) for field in fields(kind)}
    assert options.keys() - names == {"command", "list", "dry_run", "slurm", "models", "suites", "data", "out"}
    assert options["suites"] == ["b", "c"]

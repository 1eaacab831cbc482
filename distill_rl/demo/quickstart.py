"""distill-rl quickstart: makes the material, runs distillation and control, evaluates, prints the table."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

from distill_rl.config.load import load_config
from distill_rl.config.rules import problems
from distill_rl.demo.material import Material, make_material
from distill_rl.demo.recipe import RECIPE, RECIPES
from distill_rl.demo.runs import WITHOUT_TEACHER, ChildRun, figures, run_all
from distill_rl.errors import ConfigError, problem
from distill_rl.evals.compare import of_run
from distill_rl.observe.log import open_console, say
from distill_rl.observe.report.report import write_report
from distill_rl.observe.sinks import read_records
from distill_rl.run.run_directory import in_use
from distill_rl.system.environment import CONFIGS
from distill_rl.system.files import write_json
from distill_rl.system.memory import SHM, SPARE_OBJECT_STORE, available_bytes
from distill_rl.types import RunPaths

# Prints the quickstart's result.

ROWS = {
    "teacher": "teacher",
    "student_before": "student, untrained",
    "student_after": "student, distilled",
    "ce_only": "control, no teacher",
    "half_rows": "student, half the rows",
}
CROSS_NOTE = """\
The teacher has another tokenizer. Of the chunks of text that begin and end at
token boundaries of both, {share:.0%} are one token on either side; the others are
longer. They were compared by hybrid and cover {coverage:.0%} of the tokens that the
student is trained on."""
NOTE = """\
Student and control start from the same weights and see the same rows in the
same order, {wrong:.0%} of them with a wrong answer. The control imitates the rows
(CE), the student matches the teacher on them (KD). That noise is why
distillation wins. Without wrong answers the two would tie. The last student
had the teacher, but half of the rows and half of the steps."""


def print_table(scores: Mapping[str, Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Prints to stdout exact match per model, with 95 % intervals and per task, notes, speed and time; with two
    tokenizers also how well they match.

    Args:
        scores: result of the suite by model, with the names of ROWS.
        summary: as `run.summarise` returns it.
    """
    from rich import box
    from rich.table import Column, Table

    tasks = list(next(iter(scores.values()))["per_task"])
    title = f"Exact match on {summary['num_questions']} held-out questions, seed {summary['seed']}"
    interval = Column("95 % interval", justify="right", no_wrap=True)
    columns = (Column("model", no_wrap=True), Column("exact match", justify="right"), interval)
    of_tasks = (Column(task, justify="right") for task in tasks)
    table = Table(*columns, *of_tasks, title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name, result in scores.items():
        low, high = result["interval"]
        by_task = (f"{result['per_task'][task]['score']:.3f}" for task in tasks)
        style = "bold" if name == "student_after" else None
        table.add_row(ROWS[name], f"{result['score']:.3f}", f"{low:.3f} to {high:.3f}", *by_task, style=style)
    console = open_console(110)
    console.print()
    console.print(table)
    console.print(NOTE.format(wrong=RECIPE.wrong_share))
    if "one_to_one_share" in summary:
        console.print("\n" + CROSS_NOTE.format(share=summary["one_to_one_share"], coverage=summary["coverage"]))
    speed = f"{summary['tokens_per_second']:,.0f} answer tokens per second"
    console.print(f"\n{summary['seconds']:.0f} s in all; {speed} while distilling.\n")


NAME, CROSS_NAME = RECIPES
CONTROL_SUFFIX, HALF_SUFFIX, STORE_SUFFIX = "-ce", "-half", "-targets"
SUITE = "exact_match"
CONTROL_OVERRIDES = (*WITHOUT_TEACHER, "evaluate.suites=[]")
ALIGNED = {"one_to_one_share": "align/one_to_one", "coverage": "align/coverage"}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "DISTILL_RL_THREADS": "1"}
"""Of the runs, unless this process's environment says otherwise. More threads slow down models of this size."""
RUN_BYTES = 5 * 2**29
"""Of memory that one of the runs may need, with its Ray."""
RESERVED = {"run.name": "--runs", "run.dir": "--runs", "run.seed": "--seed", "data.path": "--material"}


def quickstart(
    *,
    cross: bool,
    stored: bool,
    config: Path | None,
    seed: int,
    runs: Path,
    material: Path,
    clean: bool,
    overrides: Sequence[str],
) -> int:
    """Makes the material, trains the student, its control and a student on half of the rows, scores all models, and prints
    and writes the results.

    The three trainings run beside each other, as many at once as the machine has room for. Writes summary.json and report.html
    into the run directory of the distillation. If a training fails, its exit code is returned at once, without scores.

    Args:
        cross: use a teacher with another tokenizer.
        stored: capture the teacher's targets first, and train from them.
        config: None: the file in configs/.
        seed: of data, models and data order.
        runs, material: folders of the runs, and of models and data.
        clean: delete the runs of an earlier quickstart.
        overrides: settings for all runs.

    Returns:
        0; 1 if distillation did not beat its control; or the exit code of a training that failed or was stopped.

    Raises:
        ConfigError: a run directory that is in use (without --clean), an override that a flag replaces, no configuration
            file, or a setting that is wrong.
    """
    start = time.perf_counter()
    run = CROSS_NAME if cross else NAME
    config = config or CONFIGS / f"{run}.yaml"
    paths, control, half = (RunPaths(runs / f"{run}{suffix}") for suffix in ("", CONTROL_SUFFIX, HALF_SUFFIX))
    _require_usable(overrides, config, () if clean else (paths, control, half))
    settled = load_config(config, overrides)
    ConfigError.raise_all(problems(settled))
    say(f"material  seed {seed} in {material}")
    made = make_material(material, seed, RECIPES[run])
    settings = [
        f"run.dir={runs}",
        f"run.seed={seed}",
        f"student.model={made.student}",
        f"teachers.0.model={made.teacher}",
        f"data.path={made.train}",
        f"data.validation.path={made.validation}",
        f"evaluate.data={made.test}",
        *overrides,
    ]
    of_taught: tuple[str, ...] = ()
    if stored:
        store = runs / f"{run}{STORE_SUFFIX}"
        if clean:
            shutil.rmtree(store, ignore_errors=True)
        of_taught = ("teachers.0.backend=store", f"teachers.0.store={store}")
        arguments = ("capture", "-c", str(config), "--out", str(store), *settings, f"run.name={run}")
        capture = ChildRun(arguments, f"the teacher's targets into {store}", "`distill-rl capture`")
        if code := run_all([capture], ENVIRONMENT):
            return code
    of_half = (*of_taught, "evaluate.suites=[]", f"data.path={made.half}")
    # Reads its rows as often as the others read all of them.
    if settled.train.steps is not None:
        of_half += (f"train.steps={max(1, settled.train.steps // 2)}",)
    if settled.train.minutes is not None:
        of_half += (f"train.minutes={settled.train.minutes / 2}",)
    common = ("train", "-c", str(config), *(["--clean"] if clean else []), *settings)
    trainings = []
    for trained, run_settings in ((paths, of_taught), (control, CONTROL_OVERRIDES), (half, of_half)):
        name, log = trained.root.name, trained.root / "logs" / "latest" / "driver.log"
        command = (*common, f"run.name={name}", *run_settings)
        trainings.append(ChildRun(command, name, f"`distill-rl train` of {name}", log))
    if code := run_all(trainings, ENVIRONMENT, at_once=runs_at_once()):
        return code
    say("evaluate  teacher, student before and after, control, student of half the rows")
    scores = score_all(made, paths, control, half, seed=seed)
    summary = summarise(scores, seed=seed, seconds=time.perf_counter() - start, metrics=paths.metrics)
    write_json(paths.root / "summary.json", summary)
    report = write_report(paths.root, comparisons=[control.root], evaluation=of_run(paths.root, [control.root]))
    print_table(scores, summary)
    for name, path in (("student", paths.export), ("figures", paths.root / "summary.json"), ("report", report)):
        say(f"{name:<9} {path}")
    return verdict(summary)


def runs_at_once() -> int:
    """How many trainings there are cores, memory and shared memory for now; at least 1. A run computes the same bits alone."""
    shared = shutil.disk_usage(SHM).free // (2 * SPARE_OBJECT_STORE)
    return max(1, min(len(os.sched_getaffinity(0)), available_bytes() // RUN_BYTES, shared))


def verdict(summary: Mapping[str, Any]) -> int:
    """Returns 0 if the distilled student scores higher than its control; otherwise prints an error on stderr and
    returns 1.

    Args:
        summary: as `summarise` returns it.
    """
    if summary["student_after"] > summary["ce_only"]:
        return 0
    print(
        f"distill-rl: error: distillation must beat the control; got {summary['student_after']:.3f} against "
        f"{summary['ce_only']:.3f}; check the losses in report.html, and the overrides if there were any",
        file=sys.stderr,
    )
    return 1


def score_all(
    material: Material, paths: RunPaths, control: RunPaths, half: RunPaths, *, seed: int
) -> dict[str, dict[str, Any]]:
    """The result of the suite SUITE on the held-out questions for every model of ROWS, by name.

    Runs the models in this process. Writes the results to `<run>/evals/<name>`, replacing earlier ones, and removes
    `evals/student`, the score of the export that `train` left. What teacher and control answer to the samples of the run is
    added to the sample files of the run and of the control.

    Args:
        paths, control, half: run directories with exported students, of the distillation, its control, and half the rows.
        seed: of the run, by which its samples were drawn.
    """
    from distill_rl.evals.backends.base import Settings
    from distill_rl.evals.executor import LocalExecutor
    from distill_rl.evals.options import Options, load_questions
    from distill_rl.evals.results import SampleFile, read_samples, samples_of
    from distill_rl.evals.run import ConsoleProgress, Model, evaluate_models

    evals = paths.root / "evals"
    # `train` has already scored the export, as evals/student; here it gets its name in the summary instead.
    shutil.rmtree(evals / "student", ignore_errors=True)
    folders = {
        "teacher": material.teacher,
        "student_before": material.student,
        "student_after": paths.export,
        "ce_only": control.export,
        "half_rows": half.export,
    }
    models = [Model(name, folder, evals / name) for name, folder in folders.items()]
    options = Options(clean=True, seed=seed, settings=Settings(threads=1))  # more slow down models of this size
    suites = load_questions([SUITE], material.test, options)
    with closing(LocalExecutor()) as executor:
        results = evaluate_models(models, suites, options, executor, ConsoleProgress())
    if own := read_samples(paths.samples):
        count, step = len({sample["id"] for sample in own}), own[-1]["step"]
        SampleFile(paths.samples).add(0, samples_of(suites, evals / "teacher", count), teacher="")
        SampleFile(control.samples).add(step, samples_of(suites, evals / "ce_only", count))
    return {name: suites[SUITE] for name, suites in results.items()}


def summarise(scores: Mapping[str, Mapping[str, Any]], *, seed: int, seconds: float, metrics: Path) -> dict[str, Any]:
    """Contents of summary.json: exact match (0 to 1) by model, with 95 % intervals and per task, speed, time and seed.

    With two tokenizers, also how well they match: the means of ALIGNED, fractions from 0 to 1.

    Args:
        scores: as `score_all` returns them.
        seconds: time of the whole quickstart.
        metrics: metrics.jsonl of the distillation.
    """
    records = read_records(metrics)
    aligned = {name: [each[metric] for each in records if metric in each] for name, metric in ALIGNED.items()}
    return {
        **{name: result["score"] for name, result in scores.items()},
        "intervals": {name: result["interval"] for name, result in scores.items()},
        "tasks": {
            name: {task: part["score"] for task, part in result["per_task"].items()} for name, result in scores.items()
        },
        "num_questions": scores["teacher"]["num_items"],
        "tokens_per_second": round(figures(metrics).tokens_per_second, 1),
        "seconds": round(seconds, 1),
        "seed": seed,
        **{name: round(fmean(shares), 4) for name, shares in aligned.items() if shares},
    }


def _require_usable(overrides: Sequence[str], config: Path, runs: Sequence[RunPaths]) -> None:
    """Checks for problems that `train` would find only after minutes of other work."""
    refused = [
        problem(text, f"is set by {RESERVED[key]}", remedy=f"use {RESERVED[key]}")
        for text in overrides
        if (key := text.partition("=")[0].strip()) in RESERVED
    ]
    rule, remedy = "the run directory is in use", "start over with --clean"
    refused += [problem(str(paths.root), rule, remedy=remedy) for paths in runs if in_use(paths.root)]
    if not config.is_file():
        refused.append(problem(str(config), "must be a file", remedy="give its path"))
    ConfigError.raise_all(refused)

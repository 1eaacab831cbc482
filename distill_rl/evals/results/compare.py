"""Models side by side: what evaluations left in folders, with the difference of every model to one of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distill_rl.errors import ConfigError, DataError
from distill_rl.evals.results.statistics import paired_bootstrap
from distill_rl.observe.log import printable
from distill_rl.observe.report.scores import (
    SETTINGS,
    Difference,
    Evaluation,
    Score,
    read_folders,
    read_runs,
    read_score,
)

NAMES_SHOWN = 3
MAX_PROBLEMS = 20
PARTIAL, ITEMS = ".partial.jsonl", ".items.jsonl"


@dataclass(frozen=True, slots=True)
class Answers:
    """A model's items of a suite."""

    scores: Mapping[str, float]
    """by id"""
    tasks: Mapping[str, str]


def find(paths: Sequence[Path]) -> Evaluation:
    """The results in folders, without differences.

    Args:
        paths: each is the folder of a model's results, or holds such folders, or is a run directory.

    Raises:
        ConfigError: paths without a result; all of them.
    """
    groups: list[list[Path]] = []
    problems = []
    for path in paths:
        seen = {folder for group in groups for folder in group}
        found = _model_folders(path)
        groups.append([folder for folder in found if folder not in seen])
        if not found:
            rule = "must be a run directory with a metrics.jsonl, or a folder of evaluation results (<suite>.json)"
            got = "a folder that is neither" if path.is_dir() else "a file" if path.exists() else "no such folder"
            remedy = "give the folder that distill-rl train or eval wrote"
            problems.append(str(ConfigError(str(path), rule, got, remedy)))
    if problems:
        raise ConfigError.many(problems)
    names = _labels([folder for group in groups for folder in group])
    scores: list[Score] = []
    for group in groups:
        found_scores, damaged = read_folders({folder: names[folder] for folder in group})
        scores += found_scores
        problems += damaged
    notes = [note for folder, name in names.items() for note in _unfinished(folder, name)]
    return Evaluation(tuple(scores), notes=tuple(notes), problems=tuple(problems))


def of_run(root: Path, comparisons: Sequence[Path] = (), baseline: str | None = None) -> Evaluation:
    """What `write_report` shows of a run's evaluations and those of other runs. Damaged files are told, not raised.

    Raises:
        ConfigError: no model is called `baseline`.
    """
    roots = [root, *comparisons]
    return compare(read_runs(roots, [each.resolve().name for each in roots]), baseline)


def compare(evaluation: Evaluation, baseline: str | None = None) -> Evaluation:
    """Adds every model's difference to the baseline, over the items that both answered, with a 95 % interval.

    Args:
        baseline: a model; None: the first one.

    Raises:
        ConfigError: no model is called so.
    """
    models = evaluation.models
    if baseline is not None and printable(baseline) not in models:
        raise ConfigError("--baseline", f"must be a model among {', '.join(models) or 'none'}", baseline)
    if len(models) < 2:
        return evaluation
    reference = models[0] if baseline is None else printable(baseline)
    notes, problems = list(evaluation.notes), list(evaluation.problems)
    compared: dict[str, list[Score]] = {}
    for suite, rows in evaluation.by_suite().items():
        compared[suite] = []
        base = next((row for row in rows if row.model == reference), None)
        theirs = _answers(base, notes, problems) if base else None
        if base is None:
            notes.append(f"{suite}: {reference} has no result, so there is nothing to compare with")
        notes += _different_settings(suite, rows)
        for row in rows:
            ours = _answers(row, notes, problems) if theirs and row.model != reference else None
            compared[suite].append(_with_difference(row, ours, theirs, reference, notes) if ours and theirs else row)
    remaining = {suite: iter(rows) for suite, rows in compared.items()}
    scores = tuple(next(remaining[score.suite]) for score in evaluation.scores)
    return Evaluation(scores, reference, tuple(notes), tuple(problems))


def read_items(file: Path) -> Answers:
    """The items beside a result.

    Raises:
        DataError: no such file, or bad rows, one line each.
    """
    path = file.with_name(file.stem + ITEMS)
    scores: dict[str, float] = {}
    tasks: dict[str, str] = {}
    problems: list[str] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    name, score, task = _item(line)
                    if name in scores:
                        raise ValueError(f"`id` must be unique; got {name[:80]} again")
                except ValueError as error:
                    problems.append(str(DataError(f"{path}, line {number}", str(error), remedy="evaluate again")))
                    if len(problems) == MAX_PROBLEMS:
                        problems.append(f"{path}: stopped after {MAX_PROBLEMS} bad lines")
                        break
                    continue
                scores[name], tasks[name] = score, task
    except OSError as error:
        raise DataError(str(path), "cannot be read", error.strerror) from error
    if problems:
        raise DataError.many(problems)
    return Answers(scores, tasks)


def _item(line: bytes) -> tuple[str, float, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("must be one JSON object") from error
    if not isinstance(row, dict):
        raise ValueError("must be one JSON object")
    name, score, task = row.get("id"), row.get("score"), row.get("task", "")
    if not isinstance(name, str) or not isinstance(task, str):
        raise ValueError("needs an `id`, and its `task` must be a text")
    if not isinstance(score, int | float) or isinstance(score, bool) or not 0 <= score <= 1:
        raise ValueError("`score` must be a number from 0 to 1")
    return name, float(score), printable(task)


def _answers(score: Score, notes: list[str], problems: list[str]) -> Answers | None:
    if score.file is None or not score.file.with_name(score.file.stem + ITEMS).exists():
        notes.append(f"{score.suite}: no file of {score.model}'s items, so no difference can be told")
        return None
    try:
        return read_items(score.file)
    except DataError as error:
        problems += map(printable, error.problems)
        return None


def _with_difference(row: Score, ours: Answers, theirs: Answers, reference: str, notes: list[str]) -> Score:
    """`row` with its difference to the baseline, of all items and by task."""
    common = [name for name in theirs.scores if name in ours.scores]
    if len(common) < max(len(ours.scores), len(theirs.scores)):
        counts = f"{len(ours.scores):,} items of {row.model} and {len(theirs.scores):,} of {reference}"
        remark = f"the difference is over these {len(common):,}" if common else "there is no difference to tell"
        notes.append(f"{row.suite}: {counts} have {len(common):,} in common; {remark}")
    by_task: dict[str, list[str]] = {}
    for name in common:
        by_task.setdefault(theirs.tasks[name], []).append(name)
    tasks = {
        task: replace(part, difference=_difference(by_task.get(task, []), ours, theirs))
        for task, part in row.tasks.items()
    }
    return replace(row, whole=replace(row.whole, difference=_difference(common, ours, theirs)), tasks=tasks)


def _difference(names: Sequence[str], ours: Answers, theirs: Answers) -> Difference | None:
    if not names:
        return None
    values = [ours.scores[name] - theirs.scores[name] for name in names]
    better, worse = sum(value > 0 for value in values), sum(value < 0 for value in values)
    return Difference(math.fsum(values) / len(values), paired_bootstrap(values), len(values), better, worse)


def _different_settings(suite: str, rows: Sequence[Score]) -> Iterator[str]:
    """One line per setting in which the models' results differ. The seed counts only where it has drawn the items."""
    drawn = [row for row in rows if row.facts.get("limit", "none") != "none"]
    for name in SETTINGS:
        models: dict[str, list[str]] = {}
        for row in drawn if name == "seed" else rows:
            if name in row.facts:
                models.setdefault(row.facts[name], []).append(row.model)
        if len(models) > 1:
            yield f"{suite}: {name} differs: " + ", ".join(
                f"{value[:12]} ({_several(who)})" for value, who in models.items()
            )


def _several(names: Sequence[str]) -> str:
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:NAMES_SHOWN])} and {rest} others"


def _model_folders(path: Path) -> list[Path]:
    """The folder itself if it holds results, and those in it; of a run directory those in its `evals`."""
    root = path / "evals" if (path / "evals").is_dir() else path
    try:
        folders = [
            root,
            *sorted(child for child in root.iterdir() if child.is_dir() and not child.name.startswith(".")),
        ]
    except OSError:
        return []
    return [folder.resolve() for folder in folders if any(_looks_like_result(file) for file in folder.glob("*.json"))]


def _looks_like_result(file: Path) -> bool:
    """Results have their items beside them; without, the JSON must be one, or be damaged."""
    if file.with_name(file.stem + ITEMS).is_file():
        return True
    try:
        return not file.name.startswith(".") and read_score(file, "") is not None
    except DataError:
        return True


def _unfinished(folder: Path, model: str) -> Iterator[str]:
    for file in sorted(folder.glob(f".*{PARTIAL}")):
        suite = file.name.removeprefix(".").removesuffix(PARTIAL)
        yield printable(f"{suite}: the evaluation of {model} has not finished; run it again to go on")


def _labels(folders: Sequence[Path]) -> dict[Path, str]:
    """Folder → the shortest end of its path that no other one has; `evals`, which every run has, is left out."""
    parts = {folder: [part for part in folder.parts[1:] if part != "evals"] or ["/"] for folder in folders}
    labels = {}
    for folder in folders:
        sizes = range(1, len(parts[folder]) + 1)
        others = [parts[other] for other in folders if other != folder]
        size = next((n for n in sizes if all(parts[folder][-n:] != other[-n:] for other in others)), 0)
        labels[folder] = "/".join(parts[folder][-size:]) if size else str(folder)
    return labels

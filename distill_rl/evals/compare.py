"""Compares models from result folders: every model's difference to a baseline, with a confidence interval."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from distill_rl.errors import ConfigError, DataError
from distill_rl.evals.results import paired_bootstrap
from distill_rl.observe.log import printable
from distill_rl.observe.report import scores as reported
from distill_rl.observe.report.scores import Difference, Evaluation, Score

NAMES_SHOWN = 3
MAX_PROBLEMS = 20
PARTIAL, ITEMS = ".partial.jsonl", ".items.jsonl"


@dataclass(frozen=True, slots=True)
class ItemScore:
    """A model's score on one item of a suite."""

    score: float
    task: str


Items = Mapping[str, ItemScore]
"""By the items' ids."""


def find(paths: Sequence[Path]) -> Evaluation:
    """Reads the results in folders, without computing differences; a model is named by the shortest end of its folder's
    path that no other model has (`_labels`).

    Damaged files are listed in `problems`, evaluations that have not finished in `notes`.

    Args:
        paths: each is the folder of a model's results, a folder that holds such folders, or a run directory; a model
            that occurs twice is read once.

    Raises:
        ConfigError: paths without a result; all of them are listed.
    """
    found = [(path, _model_folders(path)) for path in paths]
    problems = [_no_results(path) for path, folders in found if not folders]
    ConfigError.raise_all(problems)
    names = _labels(list(dict.fromkeys(folder for _, folders in found for folder in folders)))
    unread = dict(names)
    scores: list[Score] = []
    for _, folders in found:
        group = {folder: unread.pop(folder) for folder in folders if folder in unread}
        group_scores, damaged = reported.read_folders(group)
        scores += group_scores
        problems += damaged
    notes = [note for folder, name in names.items() for note in _unfinished(folder, name)]
    return Evaluation(tuple(scores), notes=tuple(notes), problems=tuple(problems))


def of_run(root: Path, comparisons: Sequence[Path] = (), baseline: str | None = None) -> Evaluation:
    """Reads the evaluations of a run directory and of other runs and compares all models with a baseline, for
    `write_report`.

    Models of the other runs are prefixed with the run's name. Damaged files are listed in `problems`.

    Args:
        root: the run directory.
        comparisons: further run directories.
        baseline: name of a model; None: the first one.

    Raises:
        ConfigError: no model is called `baseline`; the message lists those that there are.
    """
    return compare(reported.read_runs([root, *comparisons]), baseline)


def compare(evaluation: Evaluation, baseline: str | None = None) -> Evaluation:
    """Returns the evaluation with every model's difference to the baseline: per suite and task, over the items that
    both answered, with a 95 % interval.

    Reads the items files. Where one is missing or damaged there is no difference, and `notes` or `problems` says so;
    `notes` also lists settings in which the results differ. With fewer than two models the evaluation is returned
    unchanged.

    Args:
        baseline: name of a model; None: the first one.

    Raises:
        ConfigError: no model has that name.
    """
    models = evaluation.models
    if baseline is not None and printable(baseline) not in models:
        if not models:
            remedy = "leave it out, or evaluate first (evaluate.suites, or distill-rl eval)"
            rule = "names an evaluated model, and there are no results of suites"
            raise ConfigError("--baseline", rule, baseline, remedy)
        raise ConfigError("--baseline", f"must be a model among {', '.join(models)}", baseline)
    if len(models) < 2:
        return evaluation
    reference = models[0] if baseline is None else printable(baseline)
    notes, problems = list(evaluation.notes), list(evaluation.problems)
    compared: dict[str, list[Score]] = {}
    for suite, rows in evaluation.by_suite().items():
        compared[suite] = []
        base_row = next((row for row in rows if row.model == reference), None)
        base = None if base_row is None else _item_scores(base_row, notes, problems)
        if base_row is None:
            notes.append(f"{suite}: {reference} has no result, so there is nothing to compare with")
        notes += _different_settings(suite, rows)
        for row in rows:
            items = None if base is None or row.model == reference else _item_scores(row, notes, problems)
            if base is not None and items is not None:
                row = _with_difference(row, items, base, reference, notes)
            compared[suite].append(row)
    remaining = {suite: iter(rows) for suite, rows in compared.items()}
    scores = tuple(next(remaining[score.suite]) for score in evaluation.scores)
    return Evaluation(scores, reference, tuple(notes), tuple(problems))


def read_items(file: Path) -> Items:
    """Reads the items that belong to a result file `<suite>.json`, from `<suite>.items.jsonl` beside it: id → score and
    task.

    Raises:
        DataError: no such file, or bad rows, one line each, up to MAX_PROBLEMS; repeated ids count as bad.
    """
    path = file.with_name(file.stem + ITEMS)
    items: dict[str, ItemScore] = {}
    problems: list[str] = []
    try:
        with path.open("rb") as lines:
            for line_number, line in enumerate(lines, start=1):
                try:
                    item_id, item = _parse_item(line)
                    if item_id in items:
                        raise ValueError(f"`id` must be unique; got {item_id[:80]} again")
                except ValueError as error:
                    problems.append(str(DataError(f"{path}, line {line_number}", str(error), remedy="evaluate again")))
                    if len(problems) == MAX_PROBLEMS:
                        problems.append(f"{path}: stopped after {MAX_PROBLEMS} bad lines")
                        break
                    continue
                items[item_id] = item
    except OSError as error:
        raise DataError(str(path), "cannot be read", error.strerror) from error
    DataError.raise_all(problems)
    return items


def _parse_item(line: bytes) -> tuple[str, ItemScore]:
    row = None
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("must be one JSON object")
    item_id, score, task = row.get("id"), row.get("score"), row.get("task", "")
    if not isinstance(item_id, str) or not isinstance(task, str):
        raise ValueError("needs an `id`, and its `task` must be a text")
    if not isinstance(score, int | float) or isinstance(score, bool) or not 0 <= score <= 1:
        raise ValueError("`score` must be a number from 0 to 1")
    return item_id, ItemScore(float(score), printable(task))


def _item_scores(score: Score, notes: list[str], problems: list[str]) -> Items | None:
    """None if items are missing (a note) or damaged (a problem)."""
    if score.file is None or not score.file.with_name(score.file.stem + ITEMS).exists():
        notes.append(f"{score.suite}: {score.model} has no items file, so there is no difference to show")
        return None
    try:
        return read_items(score.file)
    except DataError as error:
        problems += map(printable, error.problems)
        return None


def _with_difference(row: Score, items: Items, base: Items, reference: str, notes: list[str]) -> Score:
    """Returns `row` with its difference to the baseline, over all items and by task."""
    common = [item_id for item_id in base if item_id in items]
    if len(common) < max(len(items), len(base)):
        counts = f"{len(items):,} items of {row.model} and {len(base):,} of {reference}"
        remark = f"the difference is over these {len(common):,}" if common else "there is no difference to show"
        notes.append(f"{row.suite}: {counts} have {len(common):,} in common; {remark}")
    by_task: dict[str, list[str]] = {}
    for item_id in common:
        by_task.setdefault(base[item_id].task, []).append(item_id)
    tasks = {
        task: replace(part, difference=_difference(by_task.get(task, []), items, base))
        for task, part in row.tasks.items()
    }
    return replace(row, whole=replace(row.whole, difference=_difference(common, items, base)), tasks=tasks)


def _difference(item_ids: Sequence[str], items: Items, base: Items) -> Difference | None:
    """Model less baseline, over items that both have."""
    if not item_ids:
        return None
    values = [items[item_id].score - base[item_id].score for item_id in item_ids]
    better, worse = sum(value > 0 for value in values), sum(value < 0 for value in values)
    return Difference(math.fsum(values) / len(values), paired_bootstrap(values), len(values), better, worse)


def _different_settings(suite: str, rows: Sequence[Score]) -> Iterator[str]:
    """Yields a line for each of SETTINGS in which the rows differ."""
    # The seed matters only for results with a limit, and the hash of the prompts is named only if nothing else
    # differs, since other settings change the prompts.
    found = False
    sampled = [row for row in rows if row.facts.get("limit", "none") != "none"]
    for setting in reported.SETTINGS:
        models_by_value: dict[str, list[str]] = {}
        if found and setting == "prompts_sha256":
            continue
        for row in sampled if setting == "seed" else rows:
            if setting in row.facts:
                models_by_value.setdefault(row.facts[setting], []).append(row.model)
        if len(models_by_value) > 1:
            values = [f"{value[:12]} ({_shortened(models)})" for value, models in models_by_value.items()]
            found = True
            yield f"{suite}: {setting} differs: {', '.join(values)}"


def _shortened(names: Sequence[str]) -> str:
    """The names as one text, separated by commas; with five or more, the first three and the number of the others."""
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:NAMES_SHOWN])} and {rest} others"


def _model_folders(path: Path) -> list[Path]:
    """The folder and its direct subfolders that hold results; of a run directory those of its `evals`."""
    root = path / "evals" if (path / "evals").is_dir() else path
    try:
        children = sorted(child for child in root.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError:
        return []
    folders = [root, *children]
    return [folder.resolve() for folder in folders if any(_looks_like_result(file) for file in folder.glob("*.json"))]


def _no_results(path: Path) -> str:
    """The error line for a path without results, which says whether it is a folder, a file or does not exist."""
    if (path / "metrics.jsonl").is_file():
        rule = "must hold evaluation results, as other paths are not run directories with a metrics.jsonl"
        return str(ConfigError(str(path), rule, "a run directory without results", "give run directories alone"))
    got = "a folder that is neither" if path.is_dir() else "a file" if path.exists() else "no such folder"
    rule = "must be a run directory with a metrics.jsonl, or a folder of evaluation results (<suite>.json)"
    return str(ConfigError(str(path), rule, got, "give the folder that distill-rl train or eval wrote"))


def _looks_like_result(file: Path) -> bool:
    """Whether a JSON file is a result: it has an items file beside it, or its content is a result or damaged."""
    # Hidden files without an items file are none.
    if file.with_name(file.stem + ITEMS).is_file():
        return True
    try:
        return not file.name.startswith(".") and reported.read_score(file, "") is not None
    except DataError:
        return True


def _unfinished(folder: Path, model: str) -> Iterator[str]:
    """Yields a note for each file that an unfinished evaluation left."""
    for file in sorted(folder.glob(f".*{PARTIAL}")):
        suite = file.name.removeprefix(".").removesuffix(PARTIAL)
        yield printable(f"{suite}: the evaluation of {model} has not finished; run it again to continue")


def _labels(folders: Sequence[Path]) -> dict[Path, str]:
    """The shortest path suffix that is unique among the folders; `evals`, part of every run, is omitted."""
    parts = {folder: [part for part in folder.parts[1:] if part != "evals"] or ["/"] for folder in folders}
    labels = {}
    for folder in folders:
        sizes = range(1, len(parts[folder]) + 1)
        others = [parts[other] for other in folders if other != folder]
        size = next((n for n in sizes if all(parts[folder][-n:] != other[-n:] for other in others)), 0)
        labels[folder] = "/".join(parts[folder][-size:]) if size else str(folder)
    return labels

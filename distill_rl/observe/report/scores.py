"""Reads evaluation results, `<model>/<suite>.json`, including those written by other versions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distill_rl.errors import DataError
from distill_rl.observe.log import printable
from distill_rl.system.files import read_json_object

FIRST = ("teacher", "student_before", "student_after", "ce_only")
"""Models listed before others; also the models of a summary.json, which is used if a run has no results."""
SETTINGS = (
    *("data_sha256", "num_fewshot", "limit", "seed", "max_new_tokens", "backend", "dtype", "version"),
    *("suite_sha256", "prompts_sha256"),
)
"""Two results that differ in one of these are only compared with a note."""
FACTS = (*SETTINGS, "batch_size", "device", "model", "model_sha256", "seconds", "tokens_per_second", "resumed_items")
"""Fields of a result that are shown to explain how its score was computed."""
OUTCOMES = {
    "wrong": "wrong",
    "unparsable": "no answer found",
    "truncated": "cut off",
    "too_long": "too long to run",
    "grader_timeout": "grading timed out",
    "grader_failed": "grading failed",
}
"""Outcomes of items without a right answer → heading in the tables."""
_STEP = re.compile(r"step-(\d{1,15})")


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference from the baseline, over the items that both models answered."""

    value: float
    interval: tuple[float, float]
    num_items: int
    better: int
    """Items with a higher score than the baseline's."""
    worse: int

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True, slots=True)
class ScorePart:
    """The score (0 to 1) of all items, or of one task's. What is missing in a result is None or empty."""

    score: float
    interval: tuple[float, float] | None = None
    num_items: int | None = None
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """Items by outcome, without `right`."""
    difference: Difference | None = None

    @property
    def ungraded(self) -> int:
        """Items that scored 0 because their grading failed or took too long."""
        return sum(self.outcomes.get(name, 0) for name in ("grader_timeout", "grader_failed"))


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a model on a suite. All names are safe to print."""

    model: str
    suite: str
    whole: ScorePart
    tasks: Mapping[str, ScorePart] = field(default_factory=dict)
    macro: float | None = None
    """Mean of the tasks' scores."""
    title: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    """The FACTS that the result has, as text."""
    file: Path | None = None

    @property
    def step(self) -> int | None:
        """The training step, if this is a result from during a run, in a folder `step-<N>`."""
        match = _STEP.fullmatch(self.file.parent.name) if self.file else None
        return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores to show together."""

    scores: tuple[Score, ...] = ()
    baseline: str | None = None
    """The model that the others are compared with; None: there are no differences."""
    notes: tuple[str, ...] = ()
    """Caveats about comparing these scores, one line each."""
    problems: tuple[str, ...] = ()
    """Files that cannot be read, one line each; their scores are missing here."""

    @property
    def models(self) -> list[str]:
        """The names of the models, each once, in the order of the scores."""
        return list(dict.fromkeys(score.model for score in self.scores))

    def by_suite(self) -> dict[str, list[Score]]:
        """The scores by suite, both in the order in which they first occur."""
        suites: dict[str, list[Score]] = {}
        for score in self.scores:
            suites.setdefault(score.suite, []).append(score)
        return suites

    def outcomes(self) -> dict[str, str]:
        """Outcome → heading of all but `right` that occurred in any score; unknown ones last, under their own name."""
        occurred = {name for score in self.scores for name, count in score.whole.outcomes.items() if count}
        known = {name: heading for name, heading in OUTCOMES.items() if name in occurred}
        return known | {name: name for name in sorted(occurred - OUTCOMES.keys())}

    def tasks(self, suite: str) -> dict[str, int | None]:
        """Task → number of items, for every task in the scores of a suite; None: the first score with it has no number.

        Raises:
            KeyError: no score of that suite.
        """
        num_items: dict[str, int | None] = {}
        for score in self.by_suite()[suite]:
            for task, part in score.tasks.items():
                num_items.setdefault(task, part.num_items)
        return num_items

    def only(self, condition: Callable[[Score], bool]) -> Evaluation:
        """Returns an evaluation of the scores that meet a condition, with the same baseline, no notes or problems."""
        return Evaluation(tuple(filter(condition, self.scores)), self.baseline)


def read_runs(roots: Sequence[Path]) -> Evaluation:
    """Reads the results in `evals/` of run directories; of a run without any, those in its summary.json, if it has one.

    Damaged results are listed in `problems`; a damaged summary.json counts as none. There is no baseline. From the second
    run on, names of models begin with that of their run's folder.
    """
    scores: list[Score] = []
    problems: list[str] = []
    for i, root in enumerate(roots):
        folders = sorted(path for path in (root / "evals").glob("*") if path.is_dir())
        run_scores, run_problems = read_folders({folder: folder.name for folder in folders})
        prefix = f"{printable(root.resolve().name)}: " if i else ""
        scores += [replace(score, model=prefix + score.model) for score in run_scores or _summary(root)]
        problems += run_problems
    return Evaluation(tuple(scores), problems=tuple(problems))


def read_folders(names: Mapping[Path, str]) -> tuple[list[Score], list[str]]:
    """Reads the results `*.json` in folders of one model each, leaving out hidden files.

    The models of FIRST come first, then others by time, then training steps; within a model, suites by time.

    Args:
        names: folder → name of its model.

    Returns:
        The scores, and one line per damaged file. JSON files that are not results are skipped.
    """
    models: list[tuple[tuple[int, int, float, str], list[Score]]] = []
    problems: list[str] = []
    for folder, name in names.items():
        files = sorted((file for file in folder.glob("*.json") if not file.name.startswith(".")), key=_time)
        scores: list[Score] = []
        for file in files:
            try:
                scores += filter(None, [read_score(file, name)])
            except DataError as error:
                problems += map(printable, error.problems)
        if scores:
            models.append((_sort_key(folder, scores[0]), scores))
    models.sort(key=lambda model: model[0])
    return [score for _, scores in models for score in scores], problems


def _sort_key(folder: Path, first: Score) -> tuple[int, int, float, str]:
    """The place of a model among others, to sort by: group, position in it, time and path of its first result."""
    assert first.file is not None
    when = _time(first.file)
    if first.step is not None:
        return 2, first.step, *when
    if folder.name in FIRST:
        return 0, FIRST.index(folder.name), *when
    return 1, 0, *when


def read_score(file: Path, model: str) -> Score | None:
    """Reads one result file `<suite>.json` of the model called `model`.

    Returns None if the JSON is something else: not an object, or one with neither `score` nor `suite`.

    What is missing or invalid beside the score is left empty, and names are made safe to print.

    Raises:
        DataError: the file is unreadable or not JSON, or its score is not a number from 0 to 1.
    """
    try:
        result = json.loads(file.read_bytes())
    except OSError as error:
        raise DataError(str(file), "cannot be read", error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise DataError(str(file), "must be JSON", f"{error}"[:120], "evaluate again") from error
    if not isinstance(result, dict) or not {"score", "suite"} & result.keys():
        return None
    whole = _part(result)
    if whole is None:
        value = repr(result.get("score"))[:40]
        raise DataError(str(file), "`score` must be a number from 0 to 1", value, "evaluate again")
    per_task = result.get("per_task")
    tasks = {printable(task): _part(part) for task, part in per_task.items()} if isinstance(per_task, dict) else {}
    return Score(
        model=printable(model),
        suite=printable(result.get("suite", file.stem)),
        whole=whole,
        tasks={task: part for task, part in tasks.items() if part},
        macro=_fraction(result.get("macro")),
        title=printable(result.get("title") or ""),
        facts={name: _text(result[name]) for name in FACTS if name in result},
        file=file,
    )


def _part(result: Any) -> ScorePart | None:
    """The score and the counts in a result or in one of its tasks, as read from JSON; None without a valid score."""
    score = _fraction(result.get("score")) if isinstance(result, dict) else None
    if score is None:
        return None
    ends = result.get("interval")
    low, high = map(_fraction, ends) if isinstance(ends, list) and len(ends) == 2 else (None, None)
    interval = None if low is None or high is None else (low, high)
    raw_outcomes = result.get("outcomes")
    if not isinstance(raw_outcomes, dict):
        raw_outcomes = {"truncated": result.get("truncated")}
    counts = {printable(name): _count(count) for name, count in raw_outcomes.items() if name != "right"}
    outcomes = {name: count for name, count in counts.items() if count is not None}
    return ScorePart(score, interval, _count(result.get("num_items")), outcomes)


def _fraction(value: Any) -> float | None:
    """The value as a float if it is a number from 0 to 1, otherwise None."""
    # A comparison accepts integers of any size, unlike math.isfinite, and is false for NaN.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= 1 else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _text(value: Any) -> str:
    """A fact as text for the page."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return printable(value)[:200]


def _time(path: Path) -> tuple[float, str]:
    """Modification time and path, to sort files by; the time is 0 if the file is gone."""
    try:
        return path.stat().st_mtime, str(path)
    except OSError:
        return 0.0, str(path)


def _summary(root: Path) -> Iterable[Score]:
    """The scores in the summary.json of a run directory, on the suite "exact match", of those models of FIRST it has."""
    summary = read_json_object(root / "summary.json")
    scores = {model: _fraction(summary.get(model)) for model in FIRST}
    return [Score(model, "exact match", ScorePart(score)) for model, score in scores.items() if score is not None]

"""Results of evaluations as they lie on disk, `<model>/<suite>.json`; those of other versions are read, too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distill_rl.errors import DataError
from distill_rl.observe.log import printable

FIRST = ("teacher", "student_before", "student_after", "ce_only")
"""models that are listed before others; also those of a summary.json, which is used where a run has no results"""
SETTINGS = ("data_sha256", "num_fewshot", "limit", "seed", "max_new_tokens", "backend", "dtype", "version")
"""what two results must share for their scores to be compared without a word"""
FACTS = (*SETTINGS, "batch_size", "device", "model", "model_sha256", "seconds", "tokens_per_second", "resumed_items")
OUTCOMES = {
    "wrong": "wrong",
    "unparsable": "no answer found",
    "truncated": "cut off",
    "too_long": "too long to run",
    "grader_timeout": "grading timed out",
    "grader_failed": "grading failed",
}
"""what became of items that were not answered rightly, as a reader sees it"""
_STEP = re.compile(r"step-(\d{1,15})")


@dataclass(frozen=True, slots=True)
class Difference:
    """To the baseline, over the items that both models answered."""

    value: float
    interval: tuple[float, float]
    num_items: int
    better: int
    """items with a higher score than the baseline's"""
    worse: int

    @property
    def clear(self) -> bool:
        """Whether 0 is outside of the interval."""
        return not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True, slots=True)
class Part:
    """The score (0 to 1) of all items, or of one task's. What a result does not say is None or empty."""

    score: float
    interval: tuple[float, float] | None = None
    num_items: int | None = None
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """items by what became of them; without `right`"""
    difference: Difference | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """A model on a suite. All names are safe to print."""

    model: str
    suite: str
    whole: Part
    tasks: Mapping[str, Part] = field(default_factory=dict)
    macro: float | None = None
    """mean of the tasks' scores"""
    title: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    """of FACTS those that the result has, as text"""
    file: Path | None = None

    @property
    def step(self) -> int | None:
        """The step of a result from inside a training run, whose folder is called `step-<N>`."""
        found = _STEP.fullmatch(self.file.parent.name) if self.file else None
        return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores to be shown together."""

    scores: tuple[Score, ...] = ()
    baseline: str | None = None
    """the model that differences are to; None: there are none"""
    notes: tuple[str, ...] = ()
    """what a reader must know before comparing, one line each"""
    problems: tuple[str, ...] = ()
    """files that cannot be read, one line each; their scores are left out"""

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(score.model for score in self.scores))

    def by_suite(self) -> dict[str, list[Score]]:
        suites: dict[str, list[Score]] = {}
        for score in self.scores:
            suites.setdefault(score.suite, []).append(score)
        return suites

    def outcomes(self) -> dict[str, str]:
        """Those that befell any item, `right` aside, with their headings."""
        named = {name for score in self.scores for name, count in score.whole.outcomes.items() if count}
        return {name: words for name, words in OUTCOMES.items() if name in named} | {
            name: name for name in sorted(named - OUTCOMES.keys())
        }

    def tasks(self, suite: str) -> dict[str, int | None]:
        """Every task of a suite, with its number of items."""
        found: dict[str, int | None] = {}
        for score in self.by_suite()[suite]:
            for task, part in score.tasks.items():
                found.setdefault(task, part.num_items)
        return found

    def only(self, chosen: Callable[[Score], bool]) -> Evaluation:
        """The same with some of the scores, without notes."""
        return Evaluation(tuple(filter(chosen, self.scores)), self.baseline)


def read_runs(roots: Sequence[Path], names: Sequence[str]) -> Evaluation:
    """The results below `evals/` of run directories; the models of the second and later ones carry their run's name."""
    scores: list[Score] = []
    problems: list[str] = []
    for index, (root, name) in enumerate(zip(roots, names, strict=True)):
        folders = sorted(path for path in (root / "evals").glob("*") if path.is_dir())
        found, bad = read_folders({folder: folder.name for folder in folders})
        prefix = f"{printable(name)}: " if index else ""
        scores += [replace(score, model=prefix + score.model) for score in found or _summary(root)]
        problems += bad
    return Evaluation(tuple(scores), problems=tuple(problems))


def read_folders(names: Mapping[Path, str]) -> tuple[list[Score], list[str]]:
    """The results in folders of one model each: those of FIRST, then others by the time of their results, then steps.

    Args:
        names: folder → what its model is called.

    Returns:
        The scores, and one line per file that is damaged. JSON that is no result is passed over.
    """
    models: list[tuple[tuple[int, int, float, str], list[Score]]] = []
    problems: list[str] = []
    for folder, name in names.items():
        files = sorted((file for file in folder.glob("*.json") if not file.name.startswith(".")), key=_time)
        scores = []
        for file in files:
            try:
                score = read_score(file, name)
            except DataError as error:
                problems += map(printable, error.problems)
            else:
                scores += [score] if score else []
        if scores:
            models.append((_place(folder, scores[0]), scores))
    return [score for _, scores in sorted(models, key=lambda model: model[0]) for score in scores], problems


def _place(folder: Path, first: Score) -> tuple[int, int, float, str]:
    """Sorts models: by rank, number, time and name."""
    assert first.file is not None
    when = _time(first.file)
    if first.step is not None:
        return 2, first.step, *when
    return (0, FIRST.index(folder.name), *when) if folder.name in FIRST else (1, 0, *when)


def read_score(file: Path, model: str) -> Score | None:
    """One result; None where the JSON is not one.

    Raises:
        DataError: unreadable, not JSON, or a score that is no number from 0 to 1.
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
    named = result.get("per_task")
    tasks = {printable(task): _part(part) for task, part in named.items()} if isinstance(named, dict) else {}
    return Score(
        printable(model),
        printable(result.get("suite", file.stem)),
        whole,
        {task: part for task, part in tasks.items() if part},
        _share(result.get("macro")),
        printable(result.get("title") or ""),
        {name: _text(result[name]) for name in FACTS if name in result},
        file,
    )


def _part(result: Any) -> Part | None:
    """None without a score; whatever else is absent or odd is left blank."""
    score = _share(result.get("score")) if isinstance(result, dict) else None
    if score is None:
        return None
    ends = result.get("interval")
    bounds = [_share(end) for end in ends] if isinstance(ends, list) else []
    known = len(bounds) == 2 and None not in bounds
    named = result.get("outcomes")
    if not isinstance(named, dict):
        named = {"truncated": result.get("truncated")}
    counted = {printable(name): _count(count) for name, count in named.items() if name != "right"}
    outcomes = {name: count for name, count in counted.items() if count is not None}
    return Part(score, (bounds[0], bounds[1]) if known else None, _count(result.get("num_items")), outcomes)  # type: ignore[arg-type]


def _share(value: Any) -> float | None:
    # Comparing, unlike math.isfinite, takes integers of any size, and says no to NaN.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 <= value <= 1 else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return printable(value)[:200]


def _time(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, str(path)
    except OSError:
        return 0.0, str(path)


def _summary(root: Path) -> Iterable[Score]:
    try:
        summary = json.loads((root / "summary.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    found = {model: _share(summary.get(model)) for model in FIRST} if isinstance(summary, dict) else {}
    return [Score(model, "exact match", Part(score)) for model, score in found.items() if score is not None]

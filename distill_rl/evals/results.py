"""Results: rows and their summary, files, samples and confidence intervals."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from distill_rl.errors import ConfigError
from distill_rl.evals.backends.base import Output
from distill_rl.evals.options import LoadedSuite
from distill_rl.evals.suites.base import Item
from distill_rl.system.files import lock_file, read_json_lines, read_json_object, write_atomic, write_json

if TYPE_CHECKING:
    from distill_rl.evals.grading.grader import Graded


# Confidence intervals of a score and of the difference between two scores, over the sampling of the questions.

RESAMPLES = 10_000
_CHUNK = 1 << 22
"""Items drawn per block of resamples, to bound memory."""
_COUNT_COST = 8
"""Cost of drawing one multinomial count, in units of drawing one item."""


def wilson(score: float, count: int) -> tuple[float, float]:
    """The 95 % score interval (low, high) of a proportion (Wilson 1927, JASA 22, eq. for p); (0, 1) without
    observations.

    Args:
        score: mean of `count` observations, 0 to 1.
    """
    if count == 0:
        return 0.0, 1.0
    z = 1.959963984540054
    scale = 1 + z * z / count
    center = (score + z * z / (2 * count)) / scale
    half = z * math.sqrt(score * (1 - score) / count + z * z / (4 * count * count)) / scale
    # For scores of 0 and 1 the outer bound is exactly 0 or 1; the formula misses it by a rounding error.
    return (center - half if score > 0 else 0.0), (center + half if score < 1 else 1.0)


def paired_bootstrap(differences: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile interval of the mean difference between two models that answered the same items.

    Items are drawn with replacement (Efron 1979, Ann. Statist. 7). Each draw takes both models' scores on an item, so
    items that are hard for both models do not widen the interval.

    Args:
        differences: per item, the score of one model minus the score of the other; at least one item.
        resamples: how many sets of items are drawn.
        seed: the same seed gives the same interval.

    Returns:
        (low, high); equal if all differences are equal, since the sample then has no spread.
    """
    values = np.asarray(differences, dtype=np.float64)
    assert len(values) > 0, "no items"
    generator, total = np.random.default_rng(seed), len(values)
    block = max(1, _CHUNK // total)
    sizes = [min(block, resamples - start) for start in range(0, resamples, block)]
    distinct, counts = np.unique(values, return_counts=True)
    # The mean of a resample depends only on how often each distinct difference occurs in it, and these counts follow a
    # multinomial distribution. Items that are right or wrong have three distinct differences (-1, 0, 1), so drawing
    # the counts takes a hundredth of the time of drawing the items.
    if _COUNT_COST * len(distinct) < total:
        means = [generator.multinomial(total, counts / total, size=size) @ distinct / total for size in sizes]
    else:
        means = [values[generator.integers(total, size=(size, total), dtype=np.int32)].mean(axis=1) for size in sizes]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


# Sample completions of a run: what its models answer to the same few items, evaluation after evaluation.
#
# `samples.jsonl` has one JSON object per line:
#
#     step         optimizer step of the weights; 0: before training
#     suite, id    the item; the same ids at every evaluation
#     who          "student" or "teacher"
#     teacher      name of the teacher, in its lines only
#     prompt       text, or a chat's messages {role, content}; without worked examples
#     completion   what the model generated
#     reference    the right answer, as the suite has it
#     correct      whether the completion got the full score
#     score        0 to 1
#     outcome      one of `OUTCOMES`
#     truncated    whether the completion reached its token limit

Sample = dict[str, Any]


def samples_of(loaded: Sequence[LoadedSuite], folder: Path, count: int) -> list[Sample]:
    """Returns the samples of a finished evaluation, without `step` and `who`.

    They are the `count` items of each suite that its limit draws first, so they are the same for every limit of at
    least `count` and every model. Suites with choices have none, because nothing is generated.

    Args:
        folder: with the model's results.
    """
    samples = []
    for entry in loaded:
        if entry.choose:
            continue
        rows = {row["id"]: row for row in read_json_lines(items_file(folder, entry.suite.name))}
        for item_id in entry.drawn[:count]:
            row = rows[item_id]
            samples.append({
                "suite": entry.suite.name,
                "id": item_id,
                "prompt": row["prompt"],
                "completion": row["completion"],
                "reference": row["answer"],
                "correct": row["outcome"] == "right",
                "score": row["score"],
                "outcome": row["outcome"],
                "truncated": row["truncated"],
            })  # fmt: skip
    return samples


class SampleFile:
    """The file of a run's samples. Only one process writes to it, and it is complete at every moment.

    Args:
        path: created with the first sample.
    """

    def __init__(self, path: Path):
        self._path = path

    def add(self, step: int, samples: Sequence[Sample], *, teacher: str | None = None) -> None:
        """Adds the samples of one evaluation; they take the place of earlier ones of the same step and model.

        Args:
            teacher: name of the teacher that generated them; None: the student.
        """
        head: Sample = {"step": step, "who": "student"}
        if teacher is not None:
            head |= {"who": "teacher", "teacher": teacher}
        kept = [old for old in read_samples(self._path) if any(old.get(key) != value for key, value in head.items())]
        self._write([*kept, *(head | sample for sample in samples)])

    def drop_after(self, step: int) -> None:
        """Removes the samples of later steps, which a run that resumes from `step` trains again."""
        self._write([old for old in read_samples(self._path) if old["step"] <= step])

    def _write(self, samples: Sequence[Sample]) -> None:
        """Replaces the content of the file; does not touch a file that has it already, nor create an empty one."""
        content = b"".join(map(to_line, samples))
        if content != (self._path.read_bytes() if self._path.exists() else b""):
            write_atomic(self._path, content)


def read_samples(path: Path) -> list[Sample]:
    """Returns the samples of a run in the order of the file; empty without a file. Invalid lines are skipped."""
    return [row for row in read_json_lines(path) if isinstance(row.get("step"), int) and "completion" in row]


# Turns a model's outputs into rows, and the rows of a suite into a result.

OUTCOMES = ("right", "wrong", "unparsable", "truncated", "too_long", "grader_timeout", "grader_failed")
"""Every item has exactly one outcome:

right           full score
wrong           an answer with less than the full score
unparsable      no answer found in the completion
truncated       the completion reached its token limit and is not right
too_long        prompt and answer exceed the model's positions
grader_timeout  grading exceeded its deadline, twice
grader_failed   grading ran out of memory, or its process died
"""
UNGRADED = ("grader_timeout", "grader_failed")
"""Outcomes that say nothing about the answer, which scores 0."""

Row = dict[str, Any]


def choice_row(item: Item, output: Output) -> Row:
    """The row of an item with choices, for the items file: the likeliest choice is the answer, the first one in a tie.

    Beside the fields of every row it has `choice_logprobs`, rounded to six decimals, None where a value is not finite.
    An item that was too long to run, or without any finite value ("unparsable"), scores 0.
    """
    finite = {i: value for i, value in enumerate(output.logprobs) if math.isfinite(value)}
    outcome, letter = "too_long" if output.too_long else "unparsable", None
    if finite:
        letter = item.choices[max(finite, key=lambda i: finite[i])].strip()
        outcome = "right" if letter == item.answer.strip() else "wrong"
    rounded = [round(finite[i], 6) if i in finite else None for i in range(len(output.logprobs))]
    row = _row(item, output, outcome, float(outcome == "right"), letter)
    return row | {"run_tokens": output.run_tokens, "choice_logprobs": rounded}


def completion_row(item: Item, output: Output, graded: Graded | None) -> Row:
    """The row of an item with a completion, for the items file: the fields of every row, the `completion` itself, and,
    if grading failed, the reason as `detail`.

    Args:
        graded: None if the prompt was too long and nothing was run.
    """
    verdict = None if graded is None else graded.verdict
    if graded is None:
        outcome = "too_long"
    elif verdict is None:
        outcome = graded.outcome
    elif verdict.score >= 1:
        outcome = "right"
    elif output.truncated:
        outcome = "truncated"
    else:
        outcome = "unparsable" if verdict.extracted is None else "wrong"
    score, extracted = (0.0, None) if verdict is None else (verdict.score, verdict.extracted)
    detail = {"detail": graded.detail} if graded is not None and graded.detail else {}
    return _row(item, output, outcome, score, extracted) | detail | {"completion": output.text}


def _row(item: Item, output: Output, outcome: str, score: float, extracted: str | None) -> Row:
    """The fields that every row has."""
    return {
        "id": item.id,
        "task": item.task,
        "outcome": outcome,
        "score": score,
        "answer": item.answer,
        "extracted": extracted,
        "truncated": output.truncated,
        "num_tokens": output.num_tokens,
        "prompt_tokens": output.prompt_tokens,
        "prompt": item.prompt if isinstance(item.prompt, str) else [dict(message) for message in item.prompt],
    }


def processed_tokens(rows: Iterable[Mapping[str, Any]]) -> int:
    """Tokens that count for a model's speed: generated ones, or those that it ran where choices are compared."""
    # Rows that an older version wrote do not say how many were run.
    return sum(
        row["num_tokens"] if "completion" in row else row.get("run_tokens", row["prompt_tokens"]) for row in rows
    )


def num_ungraded(outcomes: Mapping[str, int]) -> int:
    """How many items have an outcome of UNGRADED, given the numbers by outcome."""
    return sum(outcomes.get(name, 0) for name in UNGRADED)


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Score with its 95 % interval, outcomes and counts, `ungraded` among them, over all rows and, in `per_task`, by task.

    `macro` is the mean of the tasks' scores. Rows without a task belong to none; if all are, `per_task` is empty and
    `macro` None.

    Args:
        rows: of one suite; at least one.
    """
    tasks: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["task"]:
            tasks.setdefault(row["task"], []).append(row)
    per_task = {task: _summary(task_rows) for task, task_rows in tasks.items()}
    macro = math.fsum(part["score"] for part in per_task.values()) / len(per_task) if per_task else None
    return _summary(rows) | {"macro": macro, "per_task": per_task}


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean score, its 95 % Wilson interval, and counts of outcomes."""
    score = math.fsum(row["score"] for row in rows) / len(rows)
    counted = Counter(row["outcome"] for row in rows)
    return {
        "score": score,
        "interval": list(wilson(score, len(rows))),
        "num_items": len(rows),
        "ungraded": num_ungraded(counted),
        "outcomes": {name: counted[name] for name in OUTCOMES},
        "truncated": sum(bool(row["truncated"]) for row in rows),
    }


# Results on disk, written so that an evaluation that was killed continues where it stopped.
#
# While a suite runs, its graded rows are appended to `.<suite>.partial.jsonl`. The first line of that file is the key:
# the settings that the rows belong to. When the suite is complete, `<suite>.items.jsonl` and then `<suite>.json` are
# written atomically, and the partial file is deleted.

Key = Mapping[str, Any]
"""Everything that determines the rows of a suite: model, data, prompts, backend."""


class ResultStore:
    """The results of one model on one suite.

    Args:
        folder: the folder of the model's results; None: keep them in memory only.
        key: existing rows with another key are refused.
        clean: delete existing results first.
        replace_others: delete existing results with another key instead of refusing them.

    Raises:
        ConfigError: the folder holds results of this suite with another key.
    """

    def __init__(self, folder: Path | None, suite: str, key: Key, *, clean: bool = False, replace_others: bool = False):
        self.suite, self.key = suite, dict(key)
        self.rows: dict[str, Row] = {}
        self.device: str | None = None
        """Kind of device that produced the rows."""
        self.result: dict[str, Any] | None = None
        """The final result, once the suite is complete."""
        self._folder = folder
        self._file: BinaryIO | None = None
        if folder is None:
            return
        self._items, self._json = items_file(folder, suite), folder / f"{suite}.json"
        self._partial = folder / f".{suite}.partial.jsonl"
        if clean:
            self._delete()
        try:
            self._read_earlier_run()
        except ConfigError:
            if not replace_others:
                raise
            self._delete()

    def _delete(self) -> None:
        """Deletes the suite's result, items and partial file, as far as they exist."""
        for path in (self._json, self._items, self._partial):
            path.unlink(missing_ok=True)

    def _read_earlier_run(self) -> None:
        """Takes over a complete result if there is one, otherwise the rows of the partial file, if any."""
        # A result whose items file lacks rows is ignored. Beside a complete result, a left-over partial file is
        # deleted.
        if result := read_json_object(self._json):
            self._require_same(result, self._json)
            self.rows = _by_id(read_json_lines(self._items))
            if len(self.rows) == result.get("num_items"):
                self.result = result
                self._partial.unlink(missing_ok=True)
                return
            self.rows = {}  # the items file was deleted or damaged: evaluate again
        if lines := list(read_json_lines(self._partial)):
            self._require_same(lines[0], self._partial)
            self.device = lines[0].get("device")
            self.rows = _by_id(lines[1:])

    def set_device(self, device: str) -> None:
        """Records the kind of device (cuda, cpu) that the model runs on; call it before the first row is appended.

        Raises:
            ConfigError: the existing rows come from another kind of device.
        """
        if self.rows and self.device not in (None, device):
            rule = "was started on another kind of device, where dtype auto may differ"
            remedy = "continue there, set --dtype, or delete it with --clean"
            raise ConfigError(str(self._partial), rule, f"{self.device}; now {device}", remedy)
        self.device = device

    def append(self, rows: Sequence[Row]) -> None:
        """Adds graded items; they are on disk when this returns, unless the store has no folder. Ids that are already
        there are ignored."""
        new = {row["id"]: row for row in rows if row["id"] not in self.rows}
        if self._folder is not None and new:
            if self._file is None:  # without a half-written last line
                lines = self.key | {"device": self.device}, *self.rows.values()
                write_atomic(self._partial, b"".join(map(to_line, lines)))
                self._file = self._partial.open("ab")
            self._file.write(b"".join(map(to_line, new.values())))
            self._file.flush()
            os.fsync(self._file.fileno())
        self.rows |= new

    def finish(self, order: Iterable[str], result: Mapping[str, Any]) -> dict[str, Any]:
        """Completes the suite: writes the rows in the given order of ids and then the result, and deletes the partial
        file.

        Args:
            order: ids of rows that have been added or read.
            result: the fields of the result beside the key.

        Returns:
            Key and result in one, as written; also kept in `result`.
        """
        self.result = {**self.key, **result}
        if self._folder is not None:
            write_atomic(self._items, b"".join(to_line(self.rows[item_id]) for item_id in order))
            write_json(self._json, self.result)
            self.close()
            self._partial.unlink(missing_ok=True)
        return self.result

    def close(self) -> None:
        """Closes the partial file, which stays for the next run; does nothing if it is not open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _require_same(self, existing: Mapping[str, Any], path: Path) -> None:
        """Checks that stored results have this store's key; further fields in `existing` do not matter."""
        if different := [name for name, value in self.key.items() if name not in existing or existing[name] != value]:
            was = ", ".join(f"{name} {existing.get(name)}" for name in different)
            now = ", ".join(f"{name} {self.key[name]}" for name in different)
            rule, remedy = "holds results of another evaluation", "choose another --out, or delete them with --clean"
            raise ConfigError(str(path), rule, f"{was}; now {now}"[:400], remedy)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a result folder against other evaluations for the duration of the block; creates the folder if necessary.
    The file `.lock` remains in it.

    Raises:
        ConfigError: another process holds the lock (this does not wait for it), or the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(str(folder), "must be a folder that can be written", error.strerror) from error
    try:
        if not lock_file(descriptor, folder):
            raise ConfigError(str(folder), "is in use by another evaluation", remedy="wait, or choose another")
        yield
    finally:
        os.close(descriptor)


def items_file(folder: Path, suite: str) -> Path:
    """The file with one row per item of a finished suite, in the folder of a model's results."""
    return folder / f"{suite}.items.jsonl"


def to_line(row: Mapping[str, Any]) -> bytes:
    """A row as one line of JSON in UTF-8; lone surrogates become question marks."""
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")


def _by_id(rows: Iterable[Mapping[str, Any]]) -> dict[str, Row]:
    """Rows by id, the first one where an id repeats; lines without an `id` and an `outcome` are skipped."""
    by_id: dict[str, Row] = {}
    for row in rows:
        if isinstance(row.get("id"), str) and isinstance(row.get("outcome"), str):
            by_id.setdefault(row["id"], dict(row))
    return by_id

"""Sample completions of a run: what its models answer to the same few items, evaluation after evaluation.

`samples.jsonl` has one JSON object per line:

    step         optimizer step of the weights; 0: before training
    suite, id    the item; the same ids at every evaluation
    who          "student" or "teacher"
    teacher      name of the teacher, in its lines only
    prompt       text, or a chat's messages {role, content}; without worked examples
    completion   what the model generated
    reference    the right answer, as the suite has it
    correct      whether the completion got the full score
    score        0 to 1
    outcome      one of `result.OUTCOMES`
    truncated    whether the completion reached its token limit
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill_rl.evals.options import LoadedSuite
from distill_rl.evals.results.store import items_file, to_line
from distill_rl.system.files import read_json_lines, write_atomic

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

"""The sample completions of runs (`samples.jsonl`, docs/evaluation.md) as data for the page's script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from distill_rl.observe.report.runs import Run
from distill_rl.observe.report.scores import OUTCOMES

MAX_STEPS = 20
"""Steps of a run whose completions the page holds; the first and the last are among them."""
MAX_CHARACTERS = 4000
"""A longer text is cut."""


def samples(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One entry per item in the order of the files, as JSON types, with every run's completions of it; empty without any.

    An entry has `suite`, `id`, `prompt` (a list of messages with `role`, which is empty for a plain text, and `content`),
    `reference`, and `answers`: for each `run` (index), `who` (`student`, or a teacher's name after `teacher `), `step`,
    `text`, `verdict`, and `right`.
    """
    items: dict[tuple[str, str], dict[str, Any]] = {}
    for index, run in enumerate(runs):
        rows = list(_rows(run))
        steps = _spread(sorted({row["step"] for row in rows if row.get("who") != "teacher"}))
        for row in rows:
            is_teacher = row.get("who") == "teacher"
            if not is_teacher and row["step"] not in steps:
                continue
            suite, item = _text(row.get("suite", "")), _text(row.get("id", ""))
            entry = {
                "suite": suite,
                "id": item,
                "prompt": _messages(row.get("prompt")),
                "reference": _text(row.get("reference", "")),
            }
            entry["answers"] = []
            items.setdefault((suite, item), entry)["answers"].append(
                {
                    "run": index,
                    "who": f"teacher {_text(row.get('teacher', ''))}".strip() if is_teacher else "student",
                    "step": row["step"],
                    "text": _text(row["completion"]),
                    "verdict": _verdict(row),
                    "right": row.get("correct") is True,
                }
            )
    return list(items.values())


def _rows(run: Run) -> Iterator[dict[str, Any]]:
    """The valid lines of a run's file; none without a file."""
    try:
        lines = run.paths.samples.read_bytes().split(b"\n")
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get("step")) is int and isinstance(row.get("completion"), str):
            yield row


def _spread(steps: list[int]) -> set[int]:
    """At most MAX_STEPS of the steps, evenly spread, with the first and the last."""
    if len(steps) <= MAX_STEPS:
        return set(steps)
    return {steps[round(i * (len(steps) - 1) / (MAX_STEPS - 1))] for i in range(MAX_STEPS)}


def _messages(prompt: Any) -> list[dict[str, str]]:
    """A prompt as a list of messages; a plain text is one without a role."""
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return [{"role": _text(each.get("role", "")), "content": _text(each.get("content", ""))} for each in prompt]
    return [{"role": "", "content": _text(prompt)}]


def _verdict(row: dict[str, Any]) -> str:
    """In a few words, how the completion was judged."""
    outcome = _text(row.get("outcome", ""))
    words = [OUTCOMES.get(outcome, outcome)]
    if row.get("truncated") is True:
        words.append(OUTCOMES["truncated"])
    return ", ".join(dict.fromkeys(filter(None, words)))


def _text(value: Any) -> str:
    """A value as text, cut to MAX_CHARACTERS."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} …"

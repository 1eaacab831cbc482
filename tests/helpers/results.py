"""Results of evaluations in the files of `distill-rl eval`, from given scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SETTINGS = {
    "num_fewshot": 5,
    "data_sha256": "ab" * 32,
    "suite_sha256": "ef" * 32,
    "prompts_sha256": "ef" * 32,
    "limit": None,
    "seed": 0,
    "max_new_tokens": 9,
    "backend": "hf",
}


def write_result(
    folder: Path, scores: Mapping[str, float], suite: str = "quiz", tasks: Sequence[str] = (), **fields: Any
) -> Path:
    """Writes `<folder>/<suite>.json` and its items file; item i belongs to task i modulo the number of tasks."""
    rows = [
        {"id": name, "task": tasks[index % len(tasks)] if tasks else "", "score": score, "prompt": "", "completion": ""}
        for index, (name, score) in enumerate(scores.items())
    ]
    per_task = {task: _summary([row["score"] for row in rows if row["task"] == task]) for task in tasks}
    result = {"suite": suite, **_summary(list(scores.values())), "per_task": per_task, **SETTINGS, **fields}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{suite}.items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{suite}.json").write_text(json.dumps(result))
    return folder


def numbered(scores: Sequence[float]) -> dict[str, float]:
    return {f"q/{index}": score for index, score in enumerate(scores)}


def _summary(scores: Sequence[float]) -> dict[str, Any]:
    wrong = sum(score < 1 for score in scores)
    outcomes = {"right": len(scores) - wrong, "wrong": wrong, "unparsable": 0}
    return {"score": sum(scores) / len(scores), "interval": [0.1, 0.9], "num_items": len(scores), "outcomes": outcomes}
